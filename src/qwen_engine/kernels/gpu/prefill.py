"""Varlen causal attention over the paged cache.

The query tokens of a row are cut into tiles of BLOCK_Q; a tile for one KV head is done by one program, with the GROUP
query heads of that KV head side by side in the dot's rows:

    dot row m  ->  query m // GROUP of the tile, head m % GROUP of the group

so K and V are read once for the whole group, and only the last KV tile or two need the causal mask.

A few tiles behind a long context would leave most of the device idle, so then their keys are split into spans, whose
means of V a second kernel weighs (as in `decode`). How tiles and spans are numbered follows on the device from the
lengths of the rows, so that one captured call serves any rows: a program takes every num_programs-th of them. In a row
those of the last queries, which have the longest way, come first.

On Hopper the kernel of `prefill_hopper` takes steps that fill the device with its tiles.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import (
    LOG2_E,
    cache_rows,
    dot_dtype,
    find_row,
    has_hopper_kernels,
    let_next_start,
    needs_wide_offsets,
    next_power_of_2,
    num_sms,
    pdl_options,
    rows_to_search,
    shared_memory_bytes,
    wait_for_inputs,
)
from qwen_engine.kernels.gpu.launching import Kernel
from qwen_engine.kernels.gpu.prefill_tiles import sorted_tiles

_DEEP_PIPELINE_BYTES = 120 * 1024
_PROGRAMS_PER_SM = 2  # that run at once
_PIECES_PER_SM = 4  # tiles times spans: so many even out
_HOPPER_ROWS_PER_SM = 112  # rows of dots; a tile of that kernel has 128
_HOPPER_SEQ_LEN = 256
_MIN_SPAN = tl.constexpr(512)
_ENDLESS = tl.constexpr(2**30)


@triton.jit
def _rows_and_span(
    query_start,
    seq_lens,
    rows,
    num_kv_heads,
    max_pieces,
    MAX_ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """(tiles [MAX_ROWS] of each row, spans [MAX_ROWS] that the keys of each are split into, keys of a span)."""
    row = tl.arange(0, MAX_ROWS)
    exists = row < rows
    start = tl.load(query_start + row, mask=exists, other=0)
    tiles = tl.cdiv(tl.load(query_start + row + 1, mask=exists, other=0) - start, BLOCK_Q)
    length = tl.load(seq_lens + row, mask=exists, other=0)
    span = _ENDLESS + tl.zeros([], tl.int32)
    if SPLIT:  # noqa: SIM102 (known when compiled, the other is not)
        if tl.sum(tiles, 0) * num_kv_heads <= max_pieces:
            keys = tl.sum(tiles.to(tl.int64) * length, 0) * num_kv_heads
            span = tl.maximum(tl.cdiv(keys, max_pieces), _MIN_SPAN).to(tl.int32)
            span = tl.cdiv(span, BLOCK_N) * BLOCK_N
    return tiles, tl.maximum(tl.cdiv(length, span), 1), span


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
        shift = new_peak
        if MASKED:  # a query may come before every key of the span
            shift = tl.where(new_peak > float("-inf"), new_peak, 0.0)
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(
            weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), acc=acc * decay[:, None], input_precision="ieee"
        )
        peak = new_peak
    return acc, total, peak


@Kernel
@triton.jit(do_not_specialize=["rows", "max_pieces"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    slots,
    query_start,
    seq_lens,
    out,
    partial_out,
    partial_lse,
    scale_log2,
    rows,
    num_kv_heads,
    max_pieces,
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
    SPLIT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tiles, spans, span = _rows_and_span(
        query_start, seq_lens, rows, num_kv_heads, max_pieces, MAX_ROWS, BLOCK_Q, BLOCK_N, SPLIT
    )
    pieces = tiles * spans * num_kv_heads
    wait_for_inputs(PDL)
    let_next_start(PDL)
    dims = tl.arange(0, HEAD_DIM)
    member = tl.arange(0, BLOCK_M)
    for piece in range(tl.program_id(0), tl.sum(pieces, 0), tl.num_programs(0)):
        row, number = find_row(piece, pieces)
        kv_head = number % num_kv_heads
        row_start = tl.load(query_start + row)
        query_len = tl.load(query_start + row + 1) - row_start
        num_tiles = tl.cdiv(query_len, BLOCK_Q)
        first_query = (num_tiles - 1 - number // num_kv_heads % num_tiles) * BLOCK_Q
        start = number // num_kv_heads // num_tiles * span

        query_index = first_query + member // GROUP
        head = kv_head * GROUP + member % GROUP
        stored = (query_index < query_len) & (member < BLOCK_Q * GROUP)
        token = (row_start + query_index).to(tl.int64)
        slot = tl.load(slots + row).to(tl.int64)
        seq_len = tl.where(slot < 0, 0, tl.load(seq_lens + row))
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
        # [start, unmasked_end) precedes every query of the tile; [unmasked_end, end) meets the causal edge or the
        # row's end.
        end = tl.minimum(tl.minimum(first_position + BLOCK_Q, seq_len), start + span)
        unmasked_end = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end), start)
        acc, total, peak = _attend(
            acc,
            total,
            peak,
            query,
            query_positions,
            k_head,
            v_head,
            table,
            start,
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
        has_key = total > 0  # not in a row without context, nor where a span lies behind the query
        total = tl.where(has_key, total, 1.0)
        mean = acc / total[:, None]
        if tl.max(tl.where(tl.arange(0, MAX_ROWS) == row, spans, 0), 0) > 1:
            place = piece * BLOCK_M + member
            tl.store(partial_out + place[:, None] * HEAD_DIM + dims[None, :], mean)
            tl.store(partial_lse + place, tl.where(has_key, peak + tl.log2(total), float("-inf")))
        else:
            target = out + token[:, None] * out_stride_token + head[:, None] * out_stride_head + dims[None, :]
            tl.store(target, mean.to(out.dtype.element_ty), mask=stored[:, None])


@Kernel
@triton.jit(do_not_specialize=["rows", "max_pieces"])
def _combine_kernel(
    query_start,
    seq_lens,
    out,
    partial_out,
    partial_lse,
    rows,
    num_kv_heads,
    max_pieces,
    out_stride_token,
    out_stride_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tiles, spans, _ = _rows_and_span(
        query_start, seq_lens, rows, num_kv_heads, max_pieces, MAX_ROWS, BLOCK_Q, BLOCK_N, True
    )
    pieces = tiles * spans * num_kv_heads
    split_tiles = tl.where(spans > 1, tiles * num_kv_heads, 0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    dims = tl.arange(0, HEAD_DIM)
    member = tl.arange(0, BLOCK_M)
    every_row = tl.arange(0, MAX_ROWS)
    for index in range(tl.program_id(0), tl.sum(split_tiles, 0), tl.num_programs(0)):
        row, number = find_row(index, split_tiles)
        row_start = tl.load(query_start + row)
        query_len = tl.load(query_start + row + 1) - row_start
        num_tiles = tl.cdiv(query_len, BLOCK_Q)
        first_piece = tl.sum(tl.where(every_row < row, pieces, 0), 0) + number
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        for part in range(tl.max(tl.where(every_row == row, spans, 0), 0)):
            place = (first_piece + part * num_tiles * num_kv_heads) * BLOCK_M + member
            lse = tl.load(partial_lse + place)
            new_peak = tl.maximum(tl.maximum(peak, lse), -1e30)  # of padding no part has a key
            weight, decay = tl.exp2(lse - new_peak), tl.exp2(peak - new_peak)
            mean = tl.load(partial_out + place[:, None] * HEAD_DIM + dims[None, :])
            total = total * decay + weight
            acc = acc * decay[:, None] + mean * weight[:, None]
            peak = new_peak
        query_index = (num_tiles - 1 - number // num_kv_heads) * BLOCK_Q + member // GROUP
        head = number % num_kv_heads * GROUP + member % GROUP
        stored = (query_index < query_len) & (member < BLOCK_Q * GROUP)
        token = (row_start + query_index).to(tl.int64)
        target = out + token[:, None] * out_stride_token + head[:, None] * out_stride_head + dims[None, :]
        total = tl.where(total > 0, total, 1.0)
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


@functools.cache
def hopper_attention(device: torch.device) -> Callable[..., None] | None:
    """`prefill_hopper.prefill_attention` where it can run."""
    if not has_hopper_kernels(device):
        return None
    from qwen_engine.kernels.gpu import prefill_hopper

    return prefill_hopper.prefill_attention


def fills_hopper(tokens: int, num_heads: int, max_seq_len: int, sms: int) -> bool:
    """Whether a step has as many and as long tiles as `hopper_attention` needs to be the faster one."""
    return tokens * num_heads >= _HOPPER_ROWS_PER_SM * sms and max_seq_len >= _HOPPER_SEQ_LEN


def chunk_tiles(
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    tokens: int,
    num_heads: int,
) -> torch.Tensor | None:
    device = k_cache.device
    if hopper_attention(device) is None or not fills_hopper(tokens, num_heads, max_seq_len, num_sms(device)):
        return None
    return sorted_tiles(block_tables, slots, query_start, seq_lens, tokens, num_heads // k_cache.shape[1])


def suits_hopper(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether `hopper_attention` is right for tensors of such dtypes, shapes, strides and addresses."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k_cache.dtype == v_cache.dtype == out.dtype
        and head_dim == 128
        and num_heads // num_kv_heads <= 64
        and block_size >= 8  # rows of shared memory that TMA swizzles together
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and all(t.data_ptr() % 16 == 0 for t in (q, k_cache, v_cache, out))
        and all(t.stride(1) == head_dim and t.stride(0) % head_dim == 0 for t in (q, out))
    )


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
    rows = slots.shape[0]
    group = num_heads // num_kv_heads
    out = torch.empty((tokens, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    if fills_hopper(tokens, num_heads, max_seq_len, num_sms(q.device)):
        hopper = hopper_attention(q.device)
        if hopper and suits_hopper(q, k_cache, v_cache, out):
            if tiles is None:
                tiles = sorted_tiles(block_tables, slots, query_start, seq_lens, tokens, group)
            hopper(q, k_cache, v_cache, block_tables, tiles, scale, out)
            return out
    shape = launch_shape(
        head_dim,
        max_query_len * group,
        element_size=q.element_size(),
        shared_memory_bytes=shared_memory_bytes(q.device),
    )
    block_m = shape["BLOCK_M"] = max(shape["BLOCK_M"], next_power_of_2(group))
    tiles = (tokens // (block_m // group) + rows) * num_kv_heads  # at most, all heads together
    max_pieces = _PIECES_PER_SM * num_sms(q.device)
    # Never more tokens than the tiles that may be split: then a few programs, which share out what there is.
    may_split = tokens // (block_m // group) * num_kv_heads <= max_pieces and max_seq_len > _MIN_SPAN.value
    programs = _PROGRAMS_PER_SM * num_sms(q.device) if may_split else tiles
    num_partials = 2 * max_pieces * block_m if may_split else 0
    partial_out = torch.empty(num_partials, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(num_partials, dtype=torch.float32, device=q.device)
    max_rows = rows_to_search(rows, block_tables)
    _prefill_kernel[(programs,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        query_start,
        seq_lens,
        out,
        partial_out,
        partial_lse,
        scale * LOG2_E,
        rows,
        num_kv_heads,
        max_pieces,
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
        MAX_ROWS=max_rows,
        SPLIT=may_split,
        DOT_DTYPE=dot_dtype(q.dtype),
        WIDE=needs_wide_offsets(k_cache),
        **shape,
        **pdl_options(q.device),
    )
    if may_split:
        _combine_kernel[(min(programs, tiles),)](
            query_start,
            seq_lens,
            out,
            partial_out,
            partial_lse,
            rows,
            num_kv_heads,
            max_pieces,
            out.stride(0),
            out.stride(1),
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_M=block_m,
            BLOCK_N=shape["BLOCK_N"],
            MAX_ROWS=max_rows,
            num_warps=4,
            **pdl_options(q.device),
        )
    return out
