"""The Triton kernels: the functions of `qwen_engine.kernels` for CUDA tensors.

Each module holds kernels and the functions that launch them; none synchronises with the host, and every grid follows
from shapes and host-side bounds alone, so that a step can be captured as a CUDA graph. With TRITON_INTERPRET=1 in the
environment before Triton is imported, the same functions take CPU tensors.
"""

from qwen_engine.kernels.gpu import deterministic
from qwen_engine.kernels.gpu.bookkeeping import advance, advance_to_best, decode_inputs
from qwen_engine.kernels.gpu.decode import DecodeSplits, decode_attention, split_decodes
from qwen_engine.kernels.gpu.elementwise import embed_tokens, silu_mul
from qwen_engine.kernels.gpu.filters import adjust_logits, lowest_kept
from qwen_engine.kernels.gpu.launching import compile_launched
from qwen_engine.kernels.gpu.matrix_products import gated_linear, linear, linear_parts
from qwen_engine.kernels.gpu.norm import add_rms_norm, rms_norm
from qwen_engine.kernels.gpu.prefill import chunk_tiles, prefill_attention
from qwen_engine.kernels.gpu.push_reduce import push_add_rms_norm
from qwen_engine.kernels.gpu.rope import qk_norm_rope_kv_write
from qwen_engine.kernels.gpu.sampling import best_ids, gumbel_argmax, slot_argmax, token_logprobs

__all__ = [
    "DecodeSplits",
    "add_rms_norm",
    "adjust_logits",
    "advance",
    "advance_to_best",
    "best_ids",
    "chunk_tiles",
    "compile_launched",
    "decode_attention",
    "decode_inputs",
    "deterministic",
    "embed_tokens",
    "gated_linear",
    "gumbel_argmax",
    "linear",
    "linear_parts",
    "lowest_kept",
    "prefill_attention",
    "push_add_rms_norm",
    "qk_norm_rope_kv_write",
    "rms_norm",
    "silu_mul",
    "slot_argmax",
    "split_decodes",
    "token_logprobs",
]
