"""The tiles of a step's chunks, in the order in which `prefill_hopper.py` takes them: those with most keys first.

Its programs stay for a whole step and take tiles in a fixed pattern, so only this order evens out what each of them
gets. All layers of a step have the same tiles.
"""

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import cdiv, let_next_start, pdl_options, rows_to_search, wait_for_inputs
from qwen_engine.kernels.gpu.launching import Kernel

HALF_M = 64
"""Dot rows of half a tile, a query of `group` heads each: what the instruction of a warp group takes."""
TILE_WORDS = 8
"""First query of the row, queries of the row, first query of the tile in it (beyond them: the tile is nobody's), slot,
length of the row's context, keys that the tile attends to (0: its outputs are zero)."""
_WORDS = tl.constexpr(TILE_WORDS)
_USED_WORDS = tl.constexpr(6)
_KEYS = tl.constexpr(5)
_AT_ONCE = 64
_COMPARED_AT_ONCE = 256


@Kernel
@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _tiles_kernel(
    query_start,
    seq_lens,
    slots,
    tiles,
    rows,
    num_tiles,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tile number start // BLOCK_Q + r is the first of row r, so that every row has room for its tiles."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.arange(0, ROWS)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    first_tile = tl.load(query_start + row, mask=row < rows, other=0) // BLOCK_Q + row
    has_begun = (first_tile[None, :] <= tile[:, None]) & (row < rows)[None, :]
    row = tl.maximum(tl.sum(has_begun.to(tl.int32), 1) - 1, 0)  # the last that has
    row_start = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - row_start
    context = tl.load(seq_lens + row)
    slot = tl.load(slots + row)
    first_query = (tile - row_start // BLOCK_Q - row) * BLOCK_Q
    num_queries = tl.where(first_query < 0, first_query, num_queries)  # in front of the first row: none is the tile's
    keys = tl.minimum(context - num_queries + first_query + BLOCK_Q, context)
    keys = tl.where((slot < 0) | (first_query >= num_queries), 0, keys)
    target = tiles + tile * _WORDS
    exists = tile < num_tiles
    tl.store(target, row_start, mask=exists)
    tl.store(target + 1, num_queries, mask=exists)
    tl.store(target + 2, first_query, mask=exists)
    tl.store(target + 3, slot, mask=exists)
    tl.store(target + 4, context, mask=exists)
    tl.store(target + _KEYS, keys, mask=exists)


@Kernel
@triton.jit(do_not_specialize=["num_tiles"])
def _sort_kernel(tiles, sorted_tiles, num_tiles, TILES: tl.constexpr, OTHERS: tl.constexpr, PDL: tl.constexpr):
    """A tile's place is the number of those with more keys, and of those with as many in front of it."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    exists = tile < num_tiles
    keys = tl.load(tiles + tile * _WORDS + _KEYS, mask=exists, other=0)
    place = tl.zeros([TILES], tl.int32)
    for first in range(0, num_tiles, OTHERS):
        other = first + tl.arange(0, OTHERS)
        other_keys = tl.load(tiles + other * _WORDS + _KEYS, mask=other < num_tiles, other=-1)
        is_before = other_keys[None, :] > keys[:, None]
        is_before |= (other_keys[None, :] == keys[:, None]) & (other[None, :] < tile[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    for word in tl.static_range(_USED_WORDS):
        value = tl.load(tiles + tile * _WORDS + word, mask=exists, other=0)
        tl.store(sorted_tiles + place * _WORDS + word, value, mask=exists)


def sorted_tiles(
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    tokens: int,
    group: int,
) -> torch.Tensor:
    """int32 [tiles, TILE_WORDS]. tokens: queries of all rows, and of nobody; group: query heads of a KV head."""
    rows, device, block_q = len(slots), slots.device, 2 * (HALF_M // group)
    num_tiles = tokens // block_q + rows
    tiles, result = torch.empty(2, num_tiles, TILE_WORDS, dtype=torch.int32, device=device).unbind(0)
    launch = {"num_warps": 4, **pdl_options(device)}
    grid = (cdiv(num_tiles, _AT_ONCE),)
    _tiles_kernel[grid](
        query_start,
        seq_lens,
        slots,
        tiles,
        rows,
        num_tiles,
        BLOCK_Q=block_q,
        ROWS=rows_to_search(rows, block_tables),
        TILES=_AT_ONCE,
        **launch,
    )
    _sort_kernel[grid](tiles, result, num_tiles, TILES=_AT_ONCE, OTHERS=_COMPARED_AT_ONCE, **launch)
    return result
