"""Varlen causal attention over the paged cache.

The query tokens of a row are cut into tiles of BLOCK_Q; a program takes one tile for one KV head, with the GROUP query
heads of that KV head side by side in the dot's rows:

    dot row m  ->  query m // GROUP of the tile, head m % GROUP of the group

so K and V are read once for the whole group, and only the last KV tile or two need the causal mask. A row needs
ceil(length / BLOCK_Q) tiles; numbering row r's tiles from query_start[r] // BLOCK_Q + r leaves room for them whatever
the lengths, so a program finds its row from the device's query_start and the grid follows from the token count alone.
Tiles are taken from the last to the first: in a row those have the longest prefix.
"""

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import (
    LOG2_E,
    cache_rows,
    dot_dtype,
    needs_wide_offsets,
    next_power_of_2,
    shared_memory_bytes,
)
from qwen_engine.kernels.gpu.launching import Kernel

_DEEP_PIPELINE_BYTES = 120 * 1024
_FEW_ROWS = 64  # a program looks through as many for its own; beyond, through as many as there can be


@triton.jit
def _attend(
    acc,
    total,
    peak,
    query,
    query_positions,
    k_head,
    v_head,
    table,
    start,
    end,
    cache_stride_block,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Online softmax over the keys [start, end); without MASKED every query sees every one of them."""
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        rows = cache_rows(table, first, end, cache_stride_block, HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED, WIDE)
        if MASKED:
            live = (tokens < end)[:, None]
            k = tl.load(k_head + rows, mask=live, other=0.0)
            v = tl.load(v_head + rows, mask=live, other=0.0)
        else:
            k = tl.load(k_head + rows)
            v = tl.load(v_head + rows)
        scores = tl.dot(query, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
        if MASKED:
            scores = tl.where(tokens[None, :] <= query_positions[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(
            weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), acc=acc * decay[:, None], input_precision="ieee"
        )
        peak = new_peak
    return acc, total, peak


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    slots,
    query_start,
    seq_lens,
    out,
    scale_log2,
    rows,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    cache_stride_block,
    cache_stride_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    candidates = tl.arange(0, MAX_ROWS)
    starts = tl.load(query_start + candidates, mask=candidates < rows, other=0)
    started = (candidates < rows) & (starts // BLOCK_Q + candidates <= tile)
    row = tl.maximum(tl.sum(started.to(tl.int32), 0) - 1, 0)
    row_start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - row_start
    first_query = (tile - row_start // BLOCK_Q - row) * BLOCK_Q
    if (first_query < 0) | (first_query >= query_len):  # in front of the first row, or room that a row does not need
        return

    dims = tl.arange(0, HEAD_DIM)
    member = tl.arange(0, BLOCK_M)
    query_index = first_query + member // GROUP
    head = kv_head * GROUP + member % GROUP
    stored = (query_index < query_len) & (member < BLOCK_Q * GROUP)
    token = (row_start + query_index).to(tl.int64)
    target = out + token[:, None] * out_stride_token + head[:, None] * out_stride_head + dims[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    if (slot < 0) | (seq_len == 0):
        tl.store(target, tl.zeros([BLOCK_M, HEAD_DIM], out.dtype.element_ty), mask=stored[:, None])
        return

    query = tl.load(
        q + token[:, None] * q_stride_token + head[:, None] * q_stride_head + dims[None, :],
        mask=stored[:, None],
        other=0.0,
    ).to(DOT_DTYPE)
    first_position = seq_len - query_len + first_query
    query_positions = first_position + member // GROUP
    table = block_tables + slot * table_stride
    k_head = k_cache + kv_head.to(tl.int64) * cache_stride_head + dims[None, :]
    v_head = v_cache + kv_head.to(tl.int64) * cache_stride_head + dims[None, :]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # [0, unmasked_end) precedes every query of the tile; [unmasked_end, end) meets the causal edge or the row's end.
    unmasked_end = (first_position + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    acc, total, peak = _attend(
        acc,
        total,
        peak,
        query,
        query_positions,
        k_head,
        v_head,
        table,
        0,
        unmasked_end,
        cache_stride_block,
        scale_log2,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        False,
        DOT_DTYPE,
        WIDE,
    )
    acc, total, peak = _attend(
        acc,
        total,
        peak,
        query,
        query_positions,
        k_head,
        v_head,
        table,
        unmasked_end,
        end,
        cache_stride_block,
        scale_log2,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        True,
        DOT_DTYPE,
        WIDE,
    )
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=stored[:, None])


def launch_shape(head_dim: int, dot_rows: int, *, element_size: int, shared_memory_bytes: int) -> dict[str, int]:
    """Tile and launch parameters. dot_rows: query tokens of the longest row of the batch times the group."""
    if element_size == 4:  # fp32 dots run on the plain cores, with operands in registers
        return {"BLOCK_M": 32 if head_dim <= 128 else 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}
    if head_dim > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    # Two programs of 113 KB just share a Hopper multiprocessor, one in its softmax while the other is in its dots.
    num_stages = 5 if shared_memory_bytes >= _DEEP_PIPELINE_BYTES else 3
    return {"BLOCK_M": 64 if dot_rows > 16 else 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": num_stages}


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    rows = slots.shape[0]
    group = num_heads // num_kv_heads
    out = torch.empty((tokens, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    shape = launch_shape(
        head_dim,
        max_query_len * group,
        element_size=q.element_size(),
        shared_memory_bytes=shared_memory_bytes(q.device),
    )
    shape["BLOCK_M"] = max(shape["BLOCK_M"], next_power_of_2(group))
    tiles = tokens // (shape["BLOCK_M"] // group) + rows
    _prefill_kernel[(num_kv_heads, tiles)](
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        query_start,
        seq_lens,
        out,
        scale * LOG2_E,
        rows,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        MAX_ROWS=_FEW_ROWS if rows <= _FEW_ROWS else next_power_of_2(max(rows, len(block_tables))),
        DOT_DTYPE=dot_dtype(q.dtype),
        WIDE=needs_wide_offsets(k_cache),
        **shape,
    )
    return out
