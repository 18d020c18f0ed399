"""Attention in which a query token has the same bits in a decode step and in any chunk of a prompt.

The positions of a sequence are cut into spans of _SPAN tokens, whoever looks at them. A span is an online softmax of
its own over tiles of BLOCK_N keys, begun from nothing; spans are merged in order:

    keys    | tile | tile | tile | tile | tile | tile | tile | tile | tile ..
            |----------- span 0 --------|----------- span 1 --------|---- ..
    result    ((nothing + span 0) + span 1) + ..

Prefill walks all tiles of a query and merges as it goes. In decode many programs share a row's spans, leave what each
came to, and a second launch merges. Both have the same tiles, warps and helpers, so that every dot and every sum is
the same instructions in the same order; a key that is masked adds nothing, not even a rounding. Launches are compiled
without fusing multiplications into additions, but for those that say so: the compiler could choose differently.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import (
    LOG2_E,
    cache_rows,
    cdiv,
    dot_dtype,
    find_row,
    let_next_start,
    needs_wide_offsets,
    next_power_of_2,
    pdl_options,
    rows_to_search,
    shared_memory_bytes,
    wait_for_inputs,
)
from qwen_engine.kernels.gpu.launching import Kernel

_SPAN = 256
_DECODE_PROGRAMS = 8192  # at most, unless there are more rows times KV heads
_PARTIAL_BYTES = 1 << 28  # at most, of one launch
_MERGED_AT_ONCE = tl.constexpr(16)
_DEEP_PIPELINE_BYTES = 120 * 1024


@triton.jit
def _finite(peak):
    """The peak, or 0 where there is nothing yet: something that can be subtracted."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _weigh(scores, peak, scale_log2):
    """(weights of a tile's keys, peak with them, factor for what was summed up to the old peak)."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(tl.fma(scores, scale_log2, -_finite(new_peak)[:, None]))
    return weights, new_peak, tl.exp2(peak - _finite(new_peak))


@triton.jit
def _merge_sums(peak, total, span_peak, span_total):
    """(peak and total of two parts, factors for what each of them has accumulated)."""
    new_peak = tl.maximum(peak, span_peak)
    keep, take = tl.exp2(peak - _finite(new_peak)), tl.exp2(span_peak - _finite(new_peak))
    return new_peak, tl.fma(total, keep, span_total * take), keep, take


@triton.jit
def _merge_tiles(acc, total, peak, span_acc, span_total, span_peak):
    peak, total, keep, take = _merge_sums(peak, total, span_peak, span_total)
    return tl.fma(acc, keep[:, None], span_acc * take[:, None]), total, peak


@triton.jit
def _accumulate(acc, total, weights, decay, v, DOT_DTYPE: tl.constexpr):
    """Adds a tile's weights to the span's total, and what they make of V to its accumulator, which has decayed."""
    total = tl.fma(total, decay, tl.sum(weights, 1))
    weights = weights.to(v.dtype).to(DOT_DTYPE)
    return tl.dot(weights, v.to(DOT_DTYPE), acc=acc, input_precision="ieee"), total


@Kernel
@triton.jit(do_not_specialize=["max_spans", "rows", "first_row"])
def _span_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    slots,
    seq_lens,
    live_rows,
    partial_acc,
    partial_sums,
    scale_log2,
    q_stride_row,
    q_stride_head,
    table_stride,
    cache_stride_block,
    cache_stride_head,
    max_spans,
    rows,
    first_row,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """partial_acc: [rows, max_spans, heads, HEAD_DIM]; partial_sums: [rows, max_spans, heads, 2], peak and total.

    The programs share out KV heads, rows and, last, the spans of each row, which are known here only.
    """
    if live_rows is not None:
        rows = tl.minimum(tl.load(live_rows) - first_row, rows)
    rows = tl.maximum(rows, 1)
    kv_head = tl.program_id(0) % num_kv_heads
    row = (tl.program_id(0) // num_kv_heads % rows).to(tl.int64)
    share = tl.program_id(0) // num_kv_heads // rows
    shares = tl.num_programs(0) // (num_kv_heads * rows)
    slot = tl.load(slots + row).to(tl.int64)
    seq_len = tl.where((slot < 0) | (share >= shares), 0, tl.load(seq_lens + row))
    wait_for_inputs(PDL)
    num_spans = tl.cdiv(seq_len, SPAN)
    spans_each = tl.cdiv(num_spans, shares)
    first_span = share * spans_each
    end_span = tl.minimum(first_span + spans_each, num_spans)
    if first_span >= end_span:
        return

    member = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + member
    in_group = member < GROUP
    query = tl.load(
        q + row * q_stride_row + head[:, None] * q_stride_head + dims[None, :], mask=in_group[:, None], other=0.0
    ).to(DOT_DTYPE)
    table = block_tables + slot * table_stride
    k_head = k_cache + kv_head.to(tl.int64) * cache_stride_head + dims[None, :]
    v_head = v_cache + kv_head.to(tl.int64) * cache_stride_head + dims[None, :]
    for span in range(first_span, end_span):
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        end = tl.minimum((span + 1) * SPAN, seq_len)
        for first in range(span * SPAN, end, BLOCK_N):
            tokens = first + tl.arange(0, BLOCK_N)
            live = tokens < end
            offsets = cache_rows(table, first, end, cache_stride_block, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, WIDE)
            k = tl.load(k_head + offsets, mask=live[:, None], other=0.0)
            v = tl.load(v_head + offsets, mask=live[:, None], other=0.0)
            scores = tl.dot(query, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
            scores = tl.where(live[None, :], scores, float("-inf"))
            weights, peak, decay = _weigh(scores, peak, scale_log2)
            acc, total = _accumulate(acc * decay[:, None], total, weights, decay, v, DOT_DTYPE)
        partial = (row * max_spans + span) * num_kv_heads * GROUP + head
        tl.store(partial_acc + partial[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_group[:, None])
        tl.store(partial_sums + 2 * partial, peak, mask=in_group)
        tl.store(partial_sums + 2 * partial + 1, total, mask=in_group)
    let_next_start(PDL)


@Kernel
@triton.jit(do_not_specialize=["max_spans"])
def _merge_kernel(
    partial_acc,
    partial_sums,
    slots,
    seq_lens,
    out,
    out_stride_row,
    out_stride_head,
    max_spans,
    HEAD_DIM: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    seq_len = tl.where(tl.load(slots + row) < 0, 0, tl.load(seq_lens + row))
    wait_for_inputs(PDL)
    let_next_start(PDL)
    dims = tl.arange(0, HEAD_DIM)
    num_spans = tl.cdiv(seq_len, SPAN)
    peak, total = float("-inf"), 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(0, num_spans, _MERGED_AT_ONCE):
        for index in tl.static_range(_MERGED_AT_ONCE):
            is_span = first + index < num_spans
            partial = (row * max_spans + first + index) * num_heads + head
            span_peak = tl.load(partial_sums + 2 * partial, mask=is_span, other=float("-inf"))
            span_total = tl.load(partial_sums + 2 * partial + 1, mask=is_span, other=0.0)
            inside = dims < tl.where(is_span, HEAD_DIM, 0)
            span_acc = tl.load(partial_acc + partial * HEAD_DIM + dims, mask=inside, other=0.0)
            peak, total, keep, take = _merge_sums(peak, total, span_peak, span_total)
            acc = tl.fma(acc, keep, span_acc * take)
    acc = acc / tl.where(num_spans > 0, total, 1.0)
    tl.store(out + row * out_stride_row + head * out_stride_head + dims, acc.to(out.dtype.element_ty))


@triton.jit
def _walk(
    acc,
    total,
    peak,
    span_acc,
    span_total,
    span_peak,
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
    SPAN: tl.constexpr,
    MASKED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The keys [start, end), in one loop over all spans, which keeps its loads in flight across them; the span before
    is merged where the next begins. Without MASKED every query sees every key."""
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        offsets = cache_rows(table, first, end, cache_stride_block, HEAD_DIM, BLOCK_SIZE, BLOCK_N, MASKED, WIDE)
        if MASKED:
            live = (tokens < end)[:, None]
            k = tl.load(k_head + offsets, mask=live, other=0.0)
            v = tl.load(v_head + offsets, mask=live, other=0.0)
        else:
            k = tl.load(k_head + offsets)
            v = tl.load(v_head + offsets)
        scores = tl.dot(query, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
        if MASKED:
            scores = tl.where(tokens[None, :] <= query_positions[:, None], scores, float("-inf"))
        is_new_span = first % SPAN == 0
        weights, new_peak, decay = _weigh(scores, tl.where(is_new_span, float("-inf"), span_peak), scale_log2)
        # Multiplied in any case: an accumulator that the branch alone reads would keep the dots from overlapping.
        span_acc *= tl.where(is_new_span, 1.0, decay)[:, None]
        if is_new_span:
            acc, total, peak = _merge_tiles(acc, total, peak, span_acc, span_total, span_peak)
            span_acc = tl.zeros_like(span_acc)
        span_acc, span_total = _accumulate(span_acc, span_total, weights, decay, v, DOT_DTYPE)
        span_peak = new_peak
    return acc, total, peak, span_acc, span_total, span_peak


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
    SPAN: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Tiles of queries and their order in a row are those of `gpu/prefill.py`."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    every_row = tl.arange(0, MAX_ROWS)
    exists = every_row < rows
    starts = tl.load(query_start + every_row, mask=exists, other=0)
    tiles = tl.cdiv(tl.load(query_start + every_row + 1, mask=exists, other=0) - starts, BLOCK_Q)
    if tl.program_id(1) >= tl.sum(tiles, 0):
        return

    row, number = find_row(tl.program_id(1), tiles)
    row_start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - row_start
    first_query = (tl.cdiv(query_len, BLOCK_Q) - 1 - number) * BLOCK_Q
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
    nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
    zero = tl.zeros([BLOCK_M], tl.float32)
    zeros = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # [0, unmasked_end) precedes every query of the tile; [unmasked_end, end) meets the causal edge or the row's end.
    unmasked_end = (first_position + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    acc, total, peak, span_acc, span_total, span_peak = _walk(
        zeros,
        zero,
        nothing,
        zeros,
        zero,
        nothing,
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
        SPAN,
        False,
        DOT_DTYPE,
        WIDE,
    )
    acc, total, peak, span_acc, span_total, span_peak = _walk(
        acc,
        total,
        peak,
        span_acc,
        span_total,
        span_peak,
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
        SPAN,
        True,
        DOT_DTYPE,
        WIDE,
    )
    acc, total, peak = _merge_tiles(acc, total, peak, span_acc, span_total, span_peak)
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=stored[:, None])


def _shape(head_dim: int, group: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile and warps of both kernels, on which the bits depend."""
    if dtype == torch.float32:  # dots run on the plain cores, with operands in registers
        rows, keys = 32 if head_dim <= 128 else 16, 16
    else:
        rows, keys = 64, 64 if head_dim <= 128 else 32
    return {"BLOCK_M": max(rows, next_power_of_2(group)), "BLOCK_N": keys, "num_warps": 4}


def _stages(device: torch.device, dtype: torch.dtype, head_dim: int) -> int:
    if dtype == torch.float32 or head_dim > 128:
        return 2
    return 5 if shared_memory_bytes(device) >= _DEEP_PIPELINE_BYTES else 3


class DecodeSplits(NamedTuple):
    """The spans of a row are fixed; the programs share them out themselves."""

    max_seq_len: int
    live_rows: torch.Tensor | None
    programs: int


def split_decodes(
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    live_rows: torch.Tensor | None = None,
    programs: int | None = None,
) -> DecodeSplits:
    return DecodeSplits(max_seq_len, live_rows, programs or _DECODE_PROGRAMS)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    splits: DecodeSplits,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    max_spans = cdiv(splits.max_seq_len, _SPAN)
    rows_at_once = max(1, _PARTIAL_BYTES // (max_spans * num_heads * (head_dim + 2) * 4))
    for first in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - first)
        part = slice(first, first + rows)
        partial_acc = torch.empty(rows, max_spans, num_heads, head_dim, dtype=torch.float32, device=q.device)
        partial_sums = torch.empty(rows, max_spans, num_heads, 2, dtype=torch.float32, device=q.device)
        items = rows * num_kv_heads
        _span_kernel[(max(items, min(items * max_spans, splits.programs)),)](
            q[part],
            k_cache,
            v_cache,
            block_tables,
            slots[part],
            seq_lens[part],
            splits.live_rows,
            partial_acc,
            partial_sums,
            scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            block_tables.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            max_spans,
            rows,
            first,
            num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            SPAN=_SPAN,
            BLOCK_SIZE=block_size,
            DOT_DTYPE=dot_dtype(q.dtype),
            WIDE=needs_wide_offsets(k_cache),
            num_stages=_stages(q.device, q.dtype, head_dim),
            enable_fp_fusion=False,
            **_shape(head_dim, group, q.dtype),
            **pdl_options(q.device),
        )
        _merge_kernel[(num_heads, rows)](
            partial_acc,
            partial_sums,
            slots[part],
            seq_lens[part],
            out[part],
            out.stride(0),
            out.stride(1),
            max_spans,
            HEAD_DIM=head_dim,
            SPAN=_SPAN,
            num_warps=4,
            enable_fp_fusion=False,
            **pdl_options(q.device),
        )
    return out


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
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    rows, group = slots.shape[0], num_heads // num_kv_heads
    out = torch.empty((tokens, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    shape = _shape(head_dim, group, q.dtype)
    _prefill_kernel[(num_kv_heads, tokens // (shape["BLOCK_M"] // group) + rows)](
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
        SPAN=_SPAN,
        BLOCK_SIZE=block_size,
        MAX_ROWS=rows_to_search(rows, block_tables),
        DOT_DTYPE=dot_dtype(q.dtype),
        WIDE=needs_wide_offsets(k_cache),
        num_stages=_stages(q.device, q.dtype, head_dim),
        enable_fp_fusion=False,
        **shape,
    )
    return out
