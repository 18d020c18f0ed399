"""The functions of `qwen_engine.kernels` with `deterministic`: a row's bits do not depend on its batch."""

from qwen_engine.kernels.gpu.deterministic.attention import decode_attention, prefill_attention, split_decodes
from qwen_engine.kernels.gpu.deterministic.products import gated_linear, linear
from qwen_engine.kernels.gpu.push_reduce import add_rms_norm
from qwen_engine.kernels.reference import chunk_tiles

__all__ = [
    "add_rms_norm",
    "chunk_tiles",
    "decode_attention",
    "gated_linear",
    "linear",
    "prefill_attention",
    "split_decodes",
]
