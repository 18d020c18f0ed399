"""Decode attention in one launch of a fixed grid, which shares out the batch's tokens evenly (stream-K).

    rows, KV heads, tiles of KV_TILE_TOKENS   | row 0, head 0 | row 0, head 1 | row 1, head 0 | ...
    programs, an equal share of tiles each    | 0    | 1    | 2    | 3    | 4    | 5    | ...

An *item* is a KV head of a row. A program walks along its share, which may be the end of one item, several whole ones
and the start of another, with all query heads of the KV head in one dot. An item that one program covers is written at
once. Of one that several cover each leaves its softmax-weighted mean of V and the base-2 logarithm of its softmax
denominator, and the last to arrive, by a counter per item, weighs them in the order of the programs: results have the
same bits whoever is last. The lengths are read on the device, so one captured call serves all of them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import LOG2_E, dot_dtype, num_sms, pdl_options, wait_for_inputs
from qwen_engine.kernels.reference import KV_TILE_TOKENS

_MIN_DOT_ROWS = 16  # smallest side of a tl.dot
_LOWEST = tl.constexpr(-3e38)  # below any score, and finite: a difference of two is a number
_ROWS_PER_WARP = 64  # rows searched at a time
_LANE_VALUES = 1024  # values of partial means that a warp holds
_STAGE_BYTES = 200 * 1024  # shared memory of a multiprocessor that its programs may fill with K and V


@dataclass(frozen=True, slots=True)
class Shares:
    """How the work is cut. A warp takes `warp_tokens` of every step of warps * warp_tokens tokens.

    No more programs take part than get `min_tokens` of an item each, as far as every item has one.
    """

    warps: int
    warp_tokens: int = 16
    stages: int = 4
    programs_per_sm: int = 1
    min_tokens: int = 128


SHARES = Shares(warps=4, programs_per_sm=2)
FP32_SHARES = Shares(warps=1, programs_per_sm=4)  # products of fp32 take the registers of several warps


@triton.jit
def _first_tile(program, num_tiles, programs):
    """Where the program's share begins; those of the first num_tiles % programs are longer by a tile."""
    return program * (num_tiles // programs) + tl.minimum(program, num_tiles % programs)


@triton.jit
def _owner(tile, num_tiles, programs):
    """The program whose share the tile is in; num_tiles >= programs."""
    size = num_tiles // programs
    longer = num_tiles % programs
    return tl.where(tile < longer * (size + 1), tile // (size + 1), (tile - longer) // size)


@triton.jit
def _load_rows(first, tile_starts, slots, seq_lens, rows, ROWS: tl.constexpr):
    """(row, first tile per KV head, slot, length) of the rows first, first + 1, ...; each [ROWS]."""
    row = first + tl.arange(0, ROWS)
    inside = row < rows
    start = tl.load(tile_starts + row, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=-1)
    seq_len = tl.load(seq_lens + row, mask=inside, other=0)
    return row, start, slot, seq_len


@triton.jit
def _find_row(tile, row, start, slot, seq_len, num_kv_heads, TILE: tl.constexpr):
    """(row, first tile, slot, length) of the row that the tile is in, zeros if it is none of these."""
    first = start * num_kv_heads
    found = (first <= tile) & (tile < first + tl.cdiv(seq_len, TILE) * num_kv_heads)
    return (
        tl.sum(tl.where(found, row, 0)),
        tl.sum(tl.where(found, first, 0)),
        tl.sum(tl.where(found, slot, 0)),
        tl.sum(tl.where(found, seq_len, 0)),
    )


@triton.jit
def _blocks(table, first, end, BLOCK_SIZE: tl.constexpr, WARPS: tl.constexpr, WARP_TOKENS: tl.constexpr):
    """Cache blocks of the tokens first, first + 1, ..., `first` being a multiple of WARP_TOKENS.

    [WARPS, WARP_TOKENS], or [WARPS, 1] where a warp's tokens lie in one block.

    Tokens from `end` on get the block of the token end - 1: no table entry behind it is read.
    """
    start = first + tl.arange(0, WARPS) * WARP_TOKENS
    block = tl.load(table + tl.minimum(start, end - 1) // BLOCK_SIZE)[:, None]
    if BLOCK_SIZE < WARP_TOKENS:
        lane = tl.arange(0, WARP_TOKENS)[None, :]
        for page in tl.static_range(1, WARP_TOKENS // BLOCK_SIZE):
            entry = tl.minimum(start + page * BLOCK_SIZE, end - 1) // BLOCK_SIZE
            block = tl.where(lane // BLOCK_SIZE == page, tl.load(table + entry)[:, None], block)
    return block


@triton.jit
def _merge(peak, total, mean):
    """Lanes' online softmax as one: (mean [M, D] of V, log2 [M] of the denominator).

    peak [lanes, M]: the largest score; total [lanes, M] and mean [lanes, M, D]: sums of exp2(score - peak) and of this
    times V.
    """
    top = tl.max(peak, 0)
    weights = tl.exp2(peak - top[None, :])
    whole = tl.sum(total * weights, 0)
    return tl.sum(mean * weights[:, :, None], 0) / whole[:, None], top + tl.log2(whole)


@triton.jit
def _attend(
    query,
    k_head,
    v_head,
    table,
    next_block,
    start,
    end,
    scale_log2,
    cache_stride_block,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,
    WARP_TOKENS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Mean of V over the tokens [start, end), [BLOCK_M, HEAD_DIM], and log2 of the softmax denominator, [BLOCK_M].

    next_block: `_blocks` of the first tokens. Each warp walks along tokens of its own: the dots are batched over the
    warps, which meet only at the end.
    """
    peak = tl.full([WARPS, BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([WARPS, BLOCK_M], tl.float32)
    mean = tl.zeros([WARPS, BLOCK_M, HEAD_DIM], tl.float32)
    warp_start = tl.arange(0, WARPS)[:, None] * WARP_TOKENS
    lane = tl.arange(0, WARP_TOKENS)[None, :]
    in_block = (lane % BLOCK_SIZE * HEAD_DIM)[:, :, None] + tl.arange(0, HEAD_DIM)[None, None, :]
    # The table is read a step ahead by hand: the pipeliner would halve the stages of K and V to fit it in.
    for first in range(start, end, WARPS * WARP_TOKENS):
        live = first + warp_start + lane < end
        offset = next_block.to(tl.int64) * cache_stride_block + (first + warp_start) % BLOCK_SIZE * HEAD_DIM
        next_block = _blocks(table, first + WARPS * WARP_TOKENS, end, BLOCK_SIZE, WARPS, WARP_TOKENS)
        k = tl.load(k_head + offset[:, :, None] + in_block, mask=live[:, :, None], other=0.0)
        v = tl.load(v_head + offset[:, :, None] + in_block, mask=live[:, :, None], other=0.0)
        scores = tl.dot(query, tl.permute(k.to(DOT_DTYPE), (0, 2, 1)), input_precision="ieee")
        scores = tl.where(live[:, None, :], scores * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 2))
        weights = tl.exp2(scores - new_peak[:, :, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 2)
        mean = tl.dot(
            weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), acc=mean * decay[:, :, None], input_precision="ieee"
        )
        peak = new_peak
    return _merge(peak, total, mean)


@triton.jit
def _combine(
    partial_mean,
    partial_lse,
    first,
    last,
    first_is_second,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MEMBERS: tl.constexpr,
    LANES: tl.constexpr,
):
    """[MEMBERS, HEAD_DIM] of an item from the partials of the programs first to last, LANES of them at a time.

    first_is_second: program `first` came to the item in the course of its share, not at the beginning.
    """
    lane = tl.arange(0, LANES)
    member = tl.arange(0, MEMBERS)
    dims = tl.arange(0, HEAD_DIM)
    peak = tl.full([LANES, MEMBERS], _LOWEST, tl.float32)
    total = tl.zeros([LANES, MEMBERS], tl.float32)
    mean = tl.zeros([LANES, MEMBERS, HEAD_DIM], tl.float32)
    for start in tl.range(first, last + 1, LANES, num_stages=4):
        split = start + lane
        live = (split <= last)[:, None] & (member < GROUP)[None, :]
        partial = (split * 2 + ((split == first) & first_is_second).to(tl.int32))[:, None] * GROUP + member[None, :]
        lse = tl.load(partial_lse + partial, mask=live, other=_LOWEST)
        means = tl.load(
            partial_mean + partial[:, :, None] * HEAD_DIM + dims[None, None, :], mask=live[:, :, None], other=0.0
        )
        new_peak = tl.maximum(peak, lse)
        weights = tl.exp2(lse - new_peak)  # of a dead lane or member they do not matter: their means are 0
        decay = tl.exp2(peak - new_peak)
        total = total * decay + weights
        mean = mean * decay[:, :, None] + means * weights[:, :, None]
        peak = new_peak
    return _merge(peak, total, mean)[0]


@triton.jit(do_not_specialize=["rows", "num_kv_heads", "min_tiles"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    slots,
    seq_lens,
    tile_starts,
    out,
    partial_mean,
    partial_lse,
    arrivals,
    scale_log2,
    rows,
    num_kv_heads,
    min_tiles,
    q_stride_row,
    q_stride_head,
    out_stride_row,
    out_stride_head,
    table_stride,
    cache_stride_block,
    cache_stride_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MEMBERS: tl.constexpr,
    WARPS: tl.constexpr,
    WARP_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """partial_mean [programs, 2, GROUP, HEAD_DIM] and partial_lse [programs, 2, GROUP] hold what programs leave of the
    items they share: 0 of one at the beginning of the program's share, 1 of one that starts later.
    """
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    # Loaded beside their sum, so that the first K comes after three loads in a row: these, the block table, K.
    known_rows, known_starts, known_slots, known_lens = _load_rows(0, tile_starts, slots, seq_lens, rows, ROWS)
    num_tiles = tl.load(tile_starts + rows) * num_kv_heads
    # At least one tile each, so that every one of the programs that share an item arrives.
    programs = tl.minimum(tl.maximum(num_tiles // min_tiles, rows * num_kv_heads), tl.num_programs(0))
    programs = tl.maximum(tl.minimum(programs, num_tiles), 1)

    member = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    in_group = (member < GROUP)[:, None]
    own = member[:, None] * HEAD_DIM + dims[None, :]
    share_start = _first_tile(program, num_tiles, programs)
    share_end = tl.where(program < programs, _first_tile(program + 1, num_tiles, programs), share_start)
    tile = share_start
    while tile < share_end:
        row, row_start, slot, seq_len = _find_row(
            tile, known_rows, known_starts, known_slots, known_lens, num_kv_heads, TILE
        )
        for first_row in range(ROWS, rows, ROWS):
            more_rows, more_starts, more_slots, more_lens = _load_rows(
                first_row, tile_starts, slots, seq_lens, rows, ROWS
            )
            found = _find_row(tile, more_rows, more_starts, more_slots, more_lens, num_kv_heads, TILE)
            row += found[0]
            row_start += found[1]
            slot += found[2]
            seq_len += found[3]
        row_tiles = tl.cdiv(seq_len, TILE)
        kv_head = (tile - row_start) // row_tiles
        item_start = row_start + kv_head * row_tiles
        item_end = item_start + row_tiles
        tile_end = tl.minimum(item_end, share_end)

        start = (tile - item_start) * TILE
        end = tl.minimum((tile_end - item_start) * TILE, seq_len)
        table = block_tables + slot.to(tl.int64) * table_stride
        blocks = _blocks(table, start, end, BLOCK_SIZE, WARPS, WARP_TOKENS)
        row, kv_head = row.to(tl.int64), kv_head.to(tl.int64)
        head = kv_head * GROUP + member
        query = tl.load(
            q + row * q_stride_row + head[:, None] * q_stride_head + dims[None, :], mask=in_group, other=0.0
        )
        mean, lse = _attend(
            tl.broadcast_to(query.to(DOT_DTYPE)[None, :, :], [WARPS, BLOCK_M, HEAD_DIM]),
            k_cache + kv_head * cache_stride_head,
            v_cache + kv_head * cache_stride_head,
            table,
            blocks,
            start,
            end,
            scale_log2,
            cache_stride_block,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_M,
            WARPS,
            WARP_TOKENS,
            DOT_DTYPE,
        )
        item_out = out + row * out_stride_row + kv_head * GROUP * out_stride_head
        if tile_end - tile == row_tiles:
            target = item_out + member[:, None] * out_stride_head + dims[None, :]
            tl.store(target, mean.to(out.dtype.element_ty), mask=in_group)
        else:
            partial = (program * 2 + (share_start < item_start).to(tl.int32)) * GROUP
            tl.store(partial_mean + partial * HEAD_DIM + own, mean, mask=in_group)
            tl.store(partial_lse + partial + member, lse, mask=member < GROUP)
            first = _owner(item_start, num_tiles, programs)
            last = _owner(item_end - 1, num_tiles, programs)
            item_arrivals = arrivals + row * num_kv_heads + kv_head
            tl.debug_barrier()  # all warps have stored before one of them arrives for all
            if tl.atomic_add(item_arrivals, 1, sem="acq_rel") == last - first:
                result = _combine(
                    partial_mean,
                    partial_lse,
                    first,
                    last,
                    _first_tile(first, num_tiles, programs) < item_start,
                    GROUP,
                    HEAD_DIM,
                    MEMBERS,
                    LANES,
                )
                members = tl.arange(0, MEMBERS)
                target = item_out + members[:, None] * out_stride_head + dims[None, :]
                tl.store(target, result.to(out.dtype.element_ty), mask=(members < GROUP)[:, None])
                tl.store(item_arrivals, 0)
        tile = tile_end

    # Rows without tokens belong to no share. The last programs, which small batches leave idle, clear the first rows.
    row = (tl.num_programs(0) - 1 - program).to(tl.int64)
    while row < rows:
        if tl.load(seq_lens + row) == 0:
            for kv_head in range(num_kv_heads):
                target = out + row * out_stride_row + (kv_head * GROUP + member[:, None]) * out_stride_head
                tl.store(target + dims[None, :], tl.zeros([BLOCK_M, HEAD_DIM], out.dtype.element_ty), mask=in_group)
        row += tl.num_programs(0)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_starts: torch.Tensor,
    arrivals: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    shares: Shares | None = None,
) -> torch.Tensor:
    rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if shares is None:
        shares = SHARES if q.element_size() == 2 else FP32_SHARES
    out = torch.empty((rows, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    programs = shares.programs_per_sm * num_sms(q.device)
    partial_mean = torch.empty((programs, 2, group, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((programs, 2, group), dtype=torch.float32, device=q.device)
    stage_bytes = 2 * shares.warps * shares.warp_tokens * head_dim * q.element_size() * shares.programs_per_sm
    members = triton.next_power_of_2(group)
    _decode_kernel[(programs,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        seq_lens,
        tile_starts,
        out,
        partial_mean,
        partial_lse,
        arrivals,
        scale * LOG2_E,
        rows,
        num_kv_heads,
        triton.cdiv(shares.min_tokens, KV_TILE_TOKENS),
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
        BLOCK_M=max(_MIN_DOT_ROWS, members),
        MEMBERS=members,
        WARPS=shares.warps,
        WARP_TOKENS=shares.warp_tokens,
        TILE=KV_TILE_TOKENS,
        ROWS=_ROWS_PER_WARP * shares.warps,
        LANES=max(1, shares.warps * _LANE_VALUES // (members * head_dim)),
        DOT_DTYPE=dot_dtype(q.dtype),
        num_warps=shares.warps,
        num_stages=max(2, min(shares.stages, _STAGE_BYTES // stage_bytes + 1)),
        **pdl_options(q.device),
    )
    return out
