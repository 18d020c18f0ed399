"""QK-norm, rotary embedding and the KV write in one pass over qkv.

A program takes one token and a group of its heads as a tile [heads, head_dim], held as two halves because the rotation
pairs element i with i + head_dim / 2.
"""

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import cdiv, let_next_start, next_power_of_2, pdl_options, wait_for_inputs
from qwen_engine.kernels.gpu.launching import Kernel
from qwen_engine.kernels.gpu.matrix_products import starts_early

_MAX_TILE_HEADS = 16
_MAX_EARLY_TOKENS = 32  # of more the programs of attention would crowd where the product has left room


@Kernel
@triton.jit
def _qk_norm_rope_kv_write_kernel(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    slots,
    positions,
    block_tables,
    k_cache,
    v_cache,
    qkv_stride,
    table_stride,
    cache_stride_block,
    cache_stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    if EARLY:
        let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.where(slot < 0, 0, tl.load(positions + token))
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (half >= 0)
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)

    weight1 = tl.where(is_q, tl.load(q_weight + half).to(tl.float32), tl.load(k_weight + half).to(tl.float32))
    weight2 = tl.where(
        is_q, tl.load(q_weight + HALF + half).to(tl.float32), tl.load(k_weight + HALF + half).to(tl.float32)
    )
    angles = cos_sin + position.to(tl.int64) * (2 * HALF) + half
    cos, sin = tl.load(angles), tl.load(angles + HALF)
    block = tl.load(block_tables + tl.maximum(slot, 0) * table_stride + position // BLOCK_SIZE).to(tl.int64)

    wait_for_inputs(PDL)
    if not EARLY:
        let_next_start(PDL)
    if slot < 0:
        return
    source = qkv + token * qkv_stride + head * (2 * HALF) + half
    raw1 = tl.load(source, mask=inside, other=0.0)
    raw2 = tl.load(source + HALF, mask=inside, other=0.0)
    first, second = raw1.to(tl.float32), raw2.to(tl.float32)
    mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
    inverse_rms = (1.0 / tl.sqrt_rn(mean_square + eps))[:, None]
    first = first * inverse_rms * weight1
    second = second * inverse_rms * weight2
    rotated1 = (first * cos - second * sin).to(qkv.dtype.element_ty)
    rotated2 = (second * cos + first * sin).to(qkv.dtype.element_ty)
    tl.store(source, rotated1, mask=inside & is_q)
    tl.store(source + HALF, rotated2, mask=inside & is_q)
    page_row = block * cache_stride_block + (position % BLOCK_SIZE) * (2 * HALF)
    k_target = k_cache + page_row + (head - NUM_HEADS) * cache_stride_head + half
    tl.store(k_target, rotated1, mask=inside & is_k)
    tl.store(k_target + HALF, rotated2, mask=inside & is_k)
    v_target = v_cache + page_row + (head - NUM_HEADS - NUM_KV_HEADS) * cache_stride_head + half
    tl.store(v_target, raw1, mask=inside & is_v)
    tl.store(v_target + HALF, raw2, mask=inside & is_v)


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    tokens = qkv.shape[0]
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    heads = num_heads + 2 * num_kv_heads
    tile_heads = min(next_power_of_2(heads), _MAX_TILE_HEADS)
    _qk_norm_rope_kv_write_kernel[(tokens, cdiv(heads, tile_heads))](
        qkv,
        q_weight,
        k_weight,
        eps,
        cos_sin,
        slots,
        positions,
        block_tables,
        k_cache,
        v_cache,
        qkv.stride(0),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        TILE_HEADS=tile_heads,
        EARLY=starts_early(tokens, qkv.dtype, qkv.device) and tokens <= _MAX_EARLY_TOKENS,
        **pdl_options(qkv.device),
    )
    return qkv.view(tokens, heads, head_dim)[:, :num_heads]
