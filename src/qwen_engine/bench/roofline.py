"""What a step costs at least: arithmetic and memory traffic of the model, and what devices can do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qwen_engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Measured limits of one device: bytes read a second, dense bf16 operations a second."""

    bytes_s: float
    flop_s: float


CEILINGS = {"h200": Ceiling(bytes_s=4.32e12, flop_s=722e12)}
"""By device label, as `benchmarks/kernels.py` measures them: the sum of 4 GiB, cuBLAS on 8192³ random bf16."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes of a step, or a part of it, on one rank."""

    flops: float
    num_bytes: float


def decode_work(
    model: ModelConfig, *, num_rows: int, context_tokens: float, dtype_bytes: int, num_ranks: int = 1
) -> Work:
    """One token for each of `num_rows` requests whose contexts sum to `context_tokens`: `decode_parts` together."""
    parts = decode_parts(
        model, num_rows=num_rows, context_tokens=context_tokens, dtype_bytes=dtype_bytes, num_ranks=num_ranks
    )
    return Work(flops=sum(part.flops for part in parts), num_bytes=sum(part.num_bytes for part in parts))


def decode_parts(
    model: ModelConfig, *, num_rows: int, context_tokens: float, dtype_bytes: int, num_ranks: int = 1
) -> tuple[Work, Work]:
    """A decode step on one rank: (matrix products, attention).

    Each weight is read once and takes two operations a row; each key and value of the contexts is read once and takes
    two operations a query head.
    """
    weights = num_weights(model, num_ranks)
    attention_flops = 4 * context_tokens * model.num_heads * model.head_dim * model.num_layers / num_ranks
    kv_bytes = context_tokens * model.kv_bytes_per_token(dtype_bytes, num_ranks)
    return Work(2 * weights * num_rows, weights * dtype_bytes), Work(attention_flops, kv_bytes)


def prefill_parts(
    model: ModelConfig,
    *,
    num_rows: int,
    new_tokens: int,
    cached_tokens: int = 0,
    dtype_bytes: int,
    num_ranks: int = 1,
) -> tuple[Work, Work]:
    """The prompts of `num_rows` requests on one rank, up to their first tokens: (matrix products, attention).

    Each has `new_tokens` behind `cached_tokens` that are in the KV cache. A token attends to itself and to all before
    it; the output layer is applied to the last token of each prompt only.
    """
    weights = num_weights(model, num_ranks)
    head = model.vocab_size * model.hidden_size / num_ranks
    matrix_flops = 2 * num_rows * ((weights - head) * new_tokens + head)
    num_pairs = new_tokens * (cached_tokens + new_tokens / 2)
    attention_flops = 4 * num_rows * num_pairs * model.num_heads * model.head_dim * model.num_layers / num_ranks
    kv_bytes = num_rows * (cached_tokens + new_tokens) * model.kv_bytes_per_token(dtype_bytes, num_ranks)
    return Work(matrix_flops, weights * dtype_bytes), Work(attention_flops, kv_bytes)


def floor_s(parts: Iterable[Work], ceiling: Ceiling) -> float:
    """Least time of parts that run one after the other, each as long as its traffic or its arithmetic takes."""
    return sum(max(part.num_bytes / ceiling.bytes_s, part.flops / ceiling.flop_s) for part in parts)


def num_weights(model: ModelConfig, num_ranks: int = 1) -> float:
    """Elements of the matrices that a decode step reads on one rank; the embedding table is not among them."""
    attention = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    return (model.num_layers * layer + model.vocab_size * model.hidden_size) / num_ranks
