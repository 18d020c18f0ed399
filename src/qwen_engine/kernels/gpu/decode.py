"""Split-KV decode attention.

Once a step, `split_decodes` cuts the rows into pieces that keep the device busy; every layer then takes two launches.
The first has a program for each (piece, KV head), which walks the piece's pages with all query heads of the KV head in
one dot, by online softmax. A row in one piece is then done; of the others it leaves the softmax-weighted mean of V and
the base-2 logarithm of the softmax denominator, by which the second launch weighs the pieces of a row.

Lengths are read on the device and the grids follow from the number of rows alone, so that one captured call serves all
lengths.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import (
    LOG2_E,
    cache_rows,
    cdiv,
    dot_dtype,
    let_next_start,
    needs_wide_offsets,
    next_power_of_2,
    num_sms,
    pdl_options,
    rows_to_search,
    wait_for_inputs,
)
from qwen_engine.kernels.gpu.launching import Kernel

_MIN_DOT_ROWS = 16  # smallest side of a tl.dot
# Many small programs keep more loads in flight than few large ones and even out rows of different lengths: one warp
# and tiles of 4 KB (a 16-token page of head size 128 in bf16) of K and of V.
_TILE_BYTES = 4096
_PROGRAMS_PER_SM = 4
_FINER = tl.constexpr(4)  # pieces as long as what each program would take in all would leave the device idle at the end
_FULL = tl.constexpr(256)  # programs of rows as long as each other, one for each KV head, that keep the device busy
_SLACK = tl.constexpr(512)  # tokens beyond its share that a program may then take before it pays to cut its row
_MAX_PIECES = tl.constexpr(128)  # of a row
_MIN_PIECE = tl.constexpr(32)  # tokens
_PIECE_WORDS = tl.constexpr(8)  # row (-1: none), slot, first token, end, pieces of the row
_ROW_WORDS = tl.constexpr(4)  # row, its first piece, their number
_PIECES_AT_ONCE = 32
_ROWS_JOINED = 64  # at most, by programs of their own
_JOINED_AT_ONCE = tl.constexpr(32)
_TILES_AHEAD = tl.constexpr(2)  # of a piece, that come into the L2 while the kernel before still runs


class DecodeSplits(NamedTuple):
    """What `split_decodes` has made of the rows. pieces: int32 [room, _PIECE_WORDS], those of a row in order;
    split_rows: int32 [room, _ROW_WORDS], the rows in several pieces; num_split_rows: int32 [1]."""

    pieces: torch.Tensor
    split_rows: torch.Tensor
    num_split_rows: torch.Tensor


@triton.jit
def _cut(length, whole, piece, TILE: tl.constexpr):
    """(pieces of a row, at least one; tokens of each but the last, a multiple of TILE)."""
    wanted = tl.where(length <= whole, 1, tl.cdiv(length, piece))
    span = tl.maximum(tl.cdiv(tl.cdiv(length, wanted), TILE), 1) * TILE
    return tl.maximum(tl.cdiv(length, span), 1), span


@Kernel
@triton.jit(do_not_specialize=["rows", "fill", "num_kv_heads", "num_pieces"])
def _split_rows_kernel(
    slots,
    seq_lens,
    live_rows,
    pieces,
    split_rows,
    num_split_rows,
    rows,
    fill,
    num_kv_heads,
    num_pieces,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    LIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.arange(0, ROWS)
    if LIVE:
        rows = tl.minimum(tl.load(live_rows), rows)
    inside = row < rows
    is_padding = tl.load(slots + row, mask=inside, other=-1) < 0
    length = tl.where(is_padding, 0, tl.load(seq_lens + row, mask=inside, other=0))
    tokens, longest = tl.sum(length, 0), tl.max(length, 0)
    used = tl.sum((length > 0).to(tl.int32), 0)
    share = tl.cdiv(tokens, fill)
    # A row's time grows with its pieces' length and, as they have to be joined, with their number.
    shortest = (2 * tl.sqrt(longest.to(tl.float32))).to(tl.int32) + 1
    piece = tl.maximum(tl.maximum(tl.cdiv(share, _FINER), shortest), tl.cdiv(longest, _MAX_PIECES))
    piece = tl.maximum(piece, _MIN_PIECE)
    is_even = (2 * longest.to(tl.int64) * used <= 3 * tokens.to(tl.int64)) & (used * num_kv_heads >= _FULL)
    whole = tl.maximum(tl.where(is_even, share + _SLACK, 0), piece + piece // 2)
    count, _ = _cut(length, whole, piece, TILE)
    count = tl.where(inside, count, 0)
    end = tl.cumsum(count, 0)

    index = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    exists = index < tl.sum(count, 0)
    before = end[None, :] <= index[:, None]
    of_row = tl.where(exists, tl.sum(before.to(tl.int32), 1), 0)
    first = tl.max(tl.where(before, end[None, :], 0), 1)
    slot = tl.load(slots + of_row, mask=exists, other=-1)
    length_of_row = tl.where(slot < 0, 0, tl.load(seq_lens + of_row, mask=exists, other=0))
    count_of_row, span = _cut(length_of_row, whole, piece, TILE)
    start = (index - first) * span
    target = pieces + index * _PIECE_WORDS
    has_room = index < num_pieces
    tl.store(target, tl.where(exists, of_row, -1), mask=has_room)
    tl.store(target + 1, slot, mask=has_room)
    tl.store(target + 2, start, mask=has_room)
    tl.store(target + 3, tl.minimum(start + span, length_of_row), mask=has_room)
    tl.store(target + 4, count_of_row, mask=has_room)

    if tl.program_id(0) == 0:
        is_split = (count > 1).to(tl.int32)
        entry = split_rows + (tl.cumsum(is_split, 0) - 1) * _ROW_WORDS
        tl.store(entry, row, mask=is_split != 0)
        tl.store(entry + 1, end - count, mask=is_split != 0)
        tl.store(entry + 2, count, mask=is_split != 0)
        tl.store(num_split_rows, tl.sum(is_split, 0))


@triton.jit
def _prefetch(pointers):
    """Into the L2, which sees what is written there later."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@Kernel
@triton.jit
def _pieces_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    pieces,
    out,
    partial_out,
    partial_lse,
    scale_log2,
    q_stride_row,
    q_stride_head,
    out_stride_row,
    out_stride_head,
    table_stride,
    cache_stride_block,
    cache_stride_head,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0) % num_kv_heads
    piece = tl.program_id(0) // num_kv_heads
    row = tl.load(pieces + piece * _PIECE_WORDS).to(tl.int64)
    slot = tl.load(pieces + piece * _PIECE_WORDS + 1).to(tl.int64)
    start = tl.load(pieces + piece * _PIECE_WORDS + 2)
    end = tl.load(pieces + piece * _PIECE_WORDS + 3)
    is_whole = tl.load(pieces + piece * _PIECE_WORDS + 4) == 1
    table = block_tables + slot * table_stride
    if PDL and (row >= 0) & (start < end):
        LINE: tl.constexpr = 1024 // k_cache.dtype.element_ty.primitive_bitwidth  # 128 bytes
        line = tl.arange(0, max(HEAD_DIM // LINE, 1))[None, :] * LINE + kv_head.to(tl.int64) * cache_stride_head
        last = (end - 1) // BLOCK_N * BLOCK_N
        for tile in tl.static_range(_TILES_AHEAD):
            first = tl.minimum(start + tile * BLOCK_N, last)
            rows = cache_rows(table, first, end, cache_stride_block, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, WIDE)
            _prefetch(k_cache + rows + line)
            _prefetch(v_cache + rows + line)
    wait_for_inputs(PDL)
    if row < 0:
        return
    member = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + member
    in_group = member < GROUP
    target = out + row * out_stride_row + head[:, None] * out_stride_head + dims[None, :]
    if start >= end:  # padding
        tl.store(target, tl.zeros([BLOCK_M, HEAD_DIM], out.dtype.element_ty), mask=in_group[:, None])
        return

    query = tl.load(
        q + row * q_stride_row + head[:, None] * q_stride_head + dims[None, :], mask=in_group[:, None], other=0.0
    ).to(DOT_DTYPE)
    k_head = k_cache + kv_head.to(tl.int64) * cache_stride_head + dims[None, :]
    v_head = v_cache + kv_head.to(tl.int64) * cache_stride_head + dims[None, :]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        live = tokens < end
        rows = cache_rows(table, first, end, cache_stride_block, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, WIDE)
        k = tl.load(k_head + rows, mask=live[:, None], other=0.0)
        v = tl.load(v_head + rows, mask=live[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
        scores = tl.where(live[None, :], scores * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        mean = tl.dot(
            weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), acc=mean * decay[:, None], input_precision="ieee"
        )
        peak = new_peak
    let_next_start(PDL)
    mean = mean / total[:, None]
    if is_whole:
        tl.store(target, mean.to(out.dtype.element_ty), mask=in_group[:, None])
    else:
        partial = piece * num_kv_heads * GROUP + head
        tl.store(partial_out + partial[:, None] * HEAD_DIM + dims[None, :], mean, mask=in_group[:, None])
        tl.store(partial_lse + partial, peak + tl.log2(total), mask=in_group)


@Kernel
@triton.jit
def _join_kernel(
    partial_out,
    partial_lse,
    split_rows,
    num_split_rows,
    out,
    out_stride_row,
    out_stride_head,
    HEAD_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    end = tl.load(num_split_rows)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    dims = tl.arange(0, HEAD_DIM)
    every = tl.arange(0, _MAX_PIECES)
    for entry in range(tl.program_id(1), end, tl.num_programs(1)):
        row = tl.load(split_rows + entry * _ROW_WORDS).to(tl.int64)
        partial = tl.load(split_rows + entry * _ROW_WORDS + 1) * num_heads + head
        count = tl.load(split_rows + entry * _ROW_WORDS + 2)
        peak = tl.max(tl.load(partial_lse + partial + every * num_heads, mask=every < count, other=float("-inf")), 0)
        total = 0.0
        result = tl.zeros([HEAD_DIM], tl.float32)
        for first in range(0, count, _JOINED_AT_ONCE):
            piece = first + tl.arange(0, _JOINED_AT_ONCE)
            exists = piece < count
            partials = partial + piece * num_heads
            weights = tl.exp2(tl.load(partial_lse + partials, mask=exists, other=float("-inf")) - peak)
            means = tl.load(partial_out + partials[:, None] * HEAD_DIM + dims[None, :], mask=exists[:, None], other=0.0)
            total += tl.sum(weights, 0)
            result += tl.sum(means * weights[:, None], 0)
        tl.store(out + row * out_stride_row + head * out_stride_head + dims, (result / total).to(out.dtype.element_ty))


def _tile_tokens(k_cache: torch.Tensor) -> int:
    return max(_MIN_DOT_ROWS, _TILE_BYTES // (k_cache.shape[3] * k_cache.element_size()))


def split_decodes(
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    live_rows: torch.Tensor | None = None,
    programs: int | None = None,
) -> DecodeSplits:
    rows, num_kv_heads, device = len(slots), k_cache.shape[1], slots.device
    fill = cdiv(programs or _PROGRAMS_PER_SM * num_sms(device), num_kv_heads)
    # Rows of L tokens in pieces of P are at most sum(L) / P and one more of each: P is a share's part, or 2 sqrt(L).
    num_pieces = min(rows + fill * _FINER.value, rows * (math.isqrt(max_seq_len) // 2 + 1))
    pieces = torch.empty(num_pieces, _PIECE_WORDS.value, dtype=torch.int32, device=device)
    split_rows = torch.empty(rows, _ROW_WORDS.value, dtype=torch.int32, device=device)
    num_split_rows = torch.empty(1, dtype=torch.int32, device=device)
    _split_rows_kernel[(cdiv(num_pieces, _PIECES_AT_ONCE),)](
        slots,
        seq_lens,
        slots if live_rows is None else live_rows,
        pieces,
        split_rows,
        num_split_rows,
        rows,
        fill,
        num_kv_heads,
        num_pieces,
        TILE=_tile_tokens(k_cache),
        ROWS=rows_to_search(rows, block_tables),
        PIECES=_PIECES_AT_ONCE,
        LIVE=live_rows is not None,
        num_warps=4,
        **pdl_options(device),
    )
    return DecodeSplits(pieces, split_rows, num_split_rows)


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
    num_heads, head_dim = q.shape[1:]
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    pieces, split_rows, num_split_rows = splits
    partial_out = torch.empty(len(pieces) * num_heads, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(len(pieces) * num_heads, dtype=torch.float32, device=q.device)
    _pieces_kernel[(len(pieces) * num_kv_heads,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        pieces,
        out,
        partial_out,
        partial_lse,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(_MIN_DOT_ROWS, next_power_of_2(group)),
        BLOCK_N=_tile_tokens(k_cache),
        DOT_DTYPE=dot_dtype(q.dtype),
        WIDE=needs_wide_offsets(k_cache),
        num_warps=max(1, head_dim * q.element_size() // 256),
        num_stages=6,
        **pdl_options(q.device),
    )
    _join_kernel[(num_heads, min(len(split_rows), _ROWS_JOINED))](
        partial_out,
        partial_lse,
        split_rows,
        num_split_rows,
        out,
        out.stride(0),
        out.stride(1),
        HEAD_DIM=head_dim,
        num_warps=4,
        **pdl_options(q.device),
    )
    return out
