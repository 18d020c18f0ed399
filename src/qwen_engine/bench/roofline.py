"""What a decode step costs at least: arithmetic and memory traffic of the model, and what devices can do."""

from __future__ import annotations

from dataclasses import dataclass

from qwen_engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Measured limits of one device: bytes read a second, dense bf16 operations a second."""

    bytes_s: float
    flop_s: float


CEILINGS = {"h200": Ceiling(bytes_s=4.36e12, flop_s=790e12)}


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes of one step on one rank."""

    flops: float
    num_bytes: float


def decode_work(
    model: ModelConfig, *, num_rows: int, context_tokens: float, dtype_bytes: int, num_ranks: int = 1
) -> Work:
    """One token for each of `num_rows` requests whose contexts sum to `context_tokens`.

    Each weight is read once and takes two operations a row; each key and value of the contexts is read once and takes
    two operations a query head.
    """
    heads_dim = model.num_heads * model.head_dim
    attention_weights = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    layer_weights = attention_weights + 3 * model.hidden_size * model.intermediate_size
    weights = (model.num_layers * layer_weights + model.vocab_size * model.hidden_size) / num_ranks
    attention_flops = 4 * context_tokens * heads_dim * model.num_layers / num_ranks
    kv_bytes = context_tokens * model.kv_bytes_per_token(dtype_bytes, num_ranks)
    return Work(flops=2 * weights * num_rows + attention_flops, num_bytes=weights * dtype_bytes + kv_bytes)
