"""What a model is (`ModelConfig`, read from config.json) and how the engine runs it (`EngineConfig`).

Both are frozen: nothing changes after construction. Shapes come from the checkpoint's config.json alone, never from a
model's name. Everything above reads these; this file reads nothing but JSON.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen_engine.checks import is_integer, is_number
from qwen_engine.errors import ConfigError, UnknownOptionError, shown, suggestion

logger = logging.getLogger(__name__)

DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN context extension (Peng et al. 2023, arXiv:2309.00071); see `layers/rotary.py` for the formula.

    `attention_factor` multiplies cos and sin; None means 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of a dense Qwen3 model, and the defaults of its generation_config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    yarn: YarnScaling | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices of one decoder layer, so multiplications for one token."""
        heads = 2 * (self.num_heads + self.num_kv_heads)  # q, k, v and the projection of the output
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def balanced_context_tokens(self) -> float:
        """Context in which a token's attention takes as many multiplications as its matrix products."""
        return self.layer_parameters / (2 * self.num_heads * self.head_dim)

    @property
    def max_context_tokens(self) -> int:
        """Longest context the position encoding was made for; YaRN multiplies its original length."""
        if self.yarn is None:
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.yarn.factor * self.yarn.original_max_position_embeddings))

    def kv_bytes_per_token(self, dtype_bytes: int, tensor_parallel_size: int = 1) -> int:
        """Bytes of K and V one token takes on one rank, all layers together."""
        kv_heads = max(1, self.num_kv_heads // tensor_parallel_size)
        return 2 * self.num_layers * kv_heads * self.head_dim * dtype_bytes

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads config.json and, where present, generation_config.json. Raises ConfigError in one line."""
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"no config.json in {folder}; a model is a folder with config.json and *.safetensors")
        generation_path = folder / "generation_config.json"
        config = _read_json(path)
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        try:
            return cls.from_dict(config, generation)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Builds from the content of config.json and generation_config.json; refuses what this engine cannot run."""
        _refuse_unsupported(config)
        hidden_size = _integer(config, "hidden_size")
        num_heads = _integer(config, "num_attention_heads")
        num_kv_heads = _integer(config, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        head_dim = _integer(config, "head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ConfigError(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
        max_position = _integer(config, "max_position_embeddings")
        vocab_size = _integer(config, "vocab_size")
        # Newer Transformers write rope_theta inside rope_parameters, beside the scaling.
        # A user adds YaRN to either kind of file as rope_scaling, so that one has the last word.
        rope = {**_object(config, "rope_parameters"), **_object(config, "rope_scaling")}
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in DTYPES[1:]:
            raise ConfigError(f"torch_dtype {dtype!r} is not supported; use one of {', '.join(DTYPES[1:])}")
        generation = generation or {}
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", default=1e-6),
            rope_theta=_number(rope, "rope_theta", default=_number(config, "rope_theta", default=DEFAULT_ROPE_THETA)),
            max_position_embeddings=max_position,
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=_flag(config, "attention_bias"),
            dtype=dtype,
            yarn=_yarn(rope, max_position),
            eos_token_ids=_eos_token_ids(config, generation, vocab_size),
            sampling_defaults={
                name: generation[name]
                for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
                if is_number(generation.get(name))
            }
            if generation.get("do_sample", True)
            else {"temperature": 0.0},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every option of the engine. `None` and "auto" are decided when the engine starts, from model and machine.

    model: local folder, Hugging Face repository name, or "demo" (the checkpoint inside this package).
    tensor_parallel_size: number of ranks one model is spread over.
    dtype: of weights and KV cache: bfloat16, float16, float32, or auto (on a GPU the checkpoint's, else float32).
    max_model_len: most tokens of prompt + output (default: what the checkpoint allows).
    max_num_seqs: most requests that run at once.
    max_num_batched_tokens: token budget of one step; at least max_num_seqs.
    max_late_chunk_tokens: most prompt tokens of a new request in a step, while earlier ones are generating.
    block_size: tokens per KV block, a power of two ≥ 8.
    gpu_memory_utilization: share of the GPU's memory this engine may use, weights included.
    kv_cache_bytes: size of the KV pool (default: what gpu_memory_utilization leaves; on a CPU up to 4 GiB).
    enable_prefix_caching: share KV blocks between requests with equal prefixes.
    enforce_eager: never use CUDA graphs.
    deterministic: a request gets the same bits, tokens and logprobs, whatever runs beside it; slower.
    enable_custom_all_reduce: between GPUs of one host, sum through one another's memory instead of NCCL where possible.
    load_format: auto and safetensors read the checkpoint; dummy fills random weights on the device.
    seed: seed of dummy weights and of requests that bring none.
    device: auto, cpu, cuda or cuda:N.
    scheduling_policy: fcfs, or priority (lower number first, then arrival).
    max_num_waiting: most requests waiting at once (default: any number).
    max_logprobs: largest `logprobs` or `prompt_logprobs` a request may ask for; -1: any number.
    step_timeout_s: with several ranks, a step of more seconds counts as hanging and ends the engine.
    debug_checks: with several ranks, compare each step's rows and sampled ids on all of them.
    skip_tokenizer_init: work with token ids only.
    """

    model: str = "demo"
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_late_chunk_tokens: int = 256
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    deterministic: bool = False
    enable_custom_all_reduce: bool = True
    load_format: str = "auto"
    seed: int = 0
    device: str = "auto"
    scheduling_policy: str = "fcfs"
    max_num_waiting: int | None = None
    max_logprobs: int = 20
    step_timeout_s: float = 60.0
    debug_checks: bool = False
    skip_tokenizer_init: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", str(self.model))
        object.__setattr__(self, "device", str(self.device))
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", {"half": "float16", "float": "float32"}.get(dtype, dtype))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        for name in (
            "tensor_parallel_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_late_chunk_tokens",
            "block_size",
        ):
            _at_least(name, getattr(self, name), 1)
        # One prompt token and one output token are the least there is.
        for name, minimum in (("max_model_len", 2), ("kv_cache_bytes", 1), ("max_num_waiting", 1)):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), minimum)
        for name in (
            "enable_prefix_caching",
            "enforce_eager",
            "deterministic",
            "enable_custom_all_reduce",
            "debug_checks",
            "skip_tokenizer_init",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it must be True or False")
        _at_least("max_logprobs", self.max_logprobs, -1)
        _at_least("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed is {shown(self.seed)}; it must be less than 2**63")
        if self.block_size < 8 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; it must be a power of two and at least 8")
        if not is_number(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization is {shown(self.gpu_memory_utilization)}; it must be in (0, 1]")
        if not is_number(self.step_timeout_s) or not 0 < self.step_timeout_s <= 86400:
            raise ConfigError(f"step_timeout_s is {shown(self.step_timeout_s)}; it must be in (0, 86400] seconds")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}; "
                "every running request needs one token a step, so raise the first or lower the second"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Builds from keyword options; an unknown name raises UnknownOptionError with the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownOptionError(f"unknown option {shown(name)}; {suggestion(name, known)}")
        return cls(**options)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(f"architectures is {shown(architectures)}; it must be a list")
    if model_type != "qwen3" or (architectures and "Qwen3ForCausalLM" not in architectures):
        found = ", ".join(map(shown, architectures)) or f"model_type {model_type!r}"
        raise ConfigError(f"architecture {found} is not supported; this engine runs dense Qwen3 (Qwen3ForCausalLM)")
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ConfigError(
            f"quantised checkpoints (quant_method {shown(method)}) are not supported; use the bfloat16 one"
        )
    if config.get("use_sliding_window"):
        raise ConfigError("use_sliding_window is true; sliding-window attention is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; Qwen3 uses silu")


def _yarn(rope: Mapping[str, Any], max_position_embeddings: int) -> YarnScaling | None:
    for name, neutral in (("mscale", 0), ("mscale_all_dim", 0), ("partial_rotary_factor", 1)):
        if rope.get(name) not in (None, neutral):
            raise ConfigError(f"{name} of the rotary embedding is {shown(rope[name])}; it is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"rope type {kind!r} is not supported; use 'default' or 'yarn'")
    factor = _number(rope, "factor")
    if factor < 1:
        raise ConfigError(f"yarn factor is {factor}; it must be at least 1")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=_integer(
            rope, "original_max_position_embeddings", default=max_position_embeddings
        ),
        attention_factor=None if rope.get("attention_factor") is None else _number(rope, "attention_factor"),
        beta_fast=_number(rope, "beta_fast", default=32.0),
        beta_slow=_number(rope, "beta_slow", default=1.0),
        truncate=bool(rope.get("truncate", True)),
    )


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Every end-of-sequence id of both files, each an int or a list, in order of mention.

    Ids that the vocabulary does not have can never be sampled, nor may they index a row of logits.
    """
    found: list[int] = []
    for source in (config, generation):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None or token_id in found:
                continue
            if not is_integer(token_id):
                raise ConfigError(f"eos_token_id {shown(token_id)} is not a token id")
            if 0 <= token_id < vocab_size:
                found.append(token_id)
            else:
                logger.warning("eos_token_id %d is left out: ids are 0 to %d", token_id, vocab_size - 1)
    return tuple(found)


def _object(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {shown(value)}; it must be an object")
    return value


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{name} is {shown(value)}; it must be true or false")
    return bool(value)


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{name} is missing")
    if not is_integer(value) or value < 1:
        raise ConfigError(f"{name} is {shown(value)}; it must be a positive integer")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{name} is missing")
    if not is_number(value) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} is {shown(value)}; it must be a positive number")
    return float(value)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {shown(value)}; it must be one of {', '.join(allowed)}")


def _at_least(name: str, value: object, minimum: int) -> None:
    if not is_integer(value) or value < minimum:
        raise ConfigError(f"{name} is {shown(value)}; it must be an integer of at least {minimum}")
