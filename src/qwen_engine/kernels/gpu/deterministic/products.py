"""Matrix products in which a row of x has the same bits whatever other rows there are: y = x Wᵀ.

An element of the product is one chain of tensor-core instructions along the columns, from the first to the last, in
fp32, rounded once. The chain does not depend on the tile that the element lies in, as long as all tiles use the same
instruction: so the weight is the wide side of tl.dot, 64 rows or more (a warp group's `wgmma` on Hopper), and no
program takes a share of the columns. Only the shape of the tiles follows from the number of rows of x. The kernel of
`linear_hopper` makes the same chains, so it takes the same products here as elsewhere, none of them in parts.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qwen_engine.kernels.gpu.common import (
    cdiv,
    dot_dtype,
    let_next_start,
    num_sms,
    pdl_options,
    shared_memory_bytes,
    wait_for_inputs,
)
from qwen_engine.kernels.gpu.launching import Kernel
from qwen_engine.kernels.gpu.matrix_products import hopper_product

_SPARE_BYTES = 2048  # of shared memory, for what the compiler needs beside the stages
_X_TILES_AT_ONCE = 8  # neighbouring programs share tiles of x and of the weight in the L2


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of the weight (of a gated one: of each half) and of x in a tile, columns at a time; warps and stages."""

    rows: int
    x_rows: int
    columns: int
    warps: int
    stages: int


# For few rows of x: as many bytes of the weight in flight as fit. Gated products have more tiles than a GPU has
# multiprocessors, so two share one of these. Chosen among some 40 on an H200, in the shapes of 8B and 32B.
_FEW_ROWS = {
    False: (Tiles(64, 16, 128, 4, 6), Tiles(64, 32, 256, 4, 4), Tiles(64, 64, 128, 4, 6)),
    True: (Tiles(64, 16, 128, 4, 3), Tiles(64, 32, 64, 4, 5), Tiles(64, 64, 64, 4, 4)),
}
# For many: the largest that most multiprocessors get one of, and that are more than half full.
_MANY_ROWS = {
    False: (Tiles(128, 256, 64, 8, 4), Tiles(128, 128, 64, 8, 6), Tiles(64, 128, 128, 4, 4), Tiles(64, 64, 128, 4, 6)),
    True: (Tiles(128, 128, 64, 8, 4), Tiles(64, 128, 64, 4, 4)),
}
_BUSY_SHARE = 0.6
_FLOAT32 = Tiles(64, 32, 32, 4, 2)


def tiles_for(gated: bool, num_rows: int, x_rows: int, dtype: torch.dtype, sms: int) -> Tiles:
    """The tiles of a product of x_rows rows of x with num_rows rows of the weight (of each half, if it is gated)."""
    if dtype == torch.float32:
        return _FLOAT32
    for tiles in _FEW_ROWS[gated]:
        if x_rows <= tiles.x_rows:
            return tiles
    for tiles in _MANY_ROWS[gated]:
        num_tiles = cdiv(num_rows, tiles.rows) * cdiv(x_rows, tiles.x_rows)
        if x_rows > tiles.x_rows // 2 and num_tiles >= _BUSY_SHARE * sms:
            break
    return tiles


def _stages(tiles: Tiles, gated: bool, device: torch.device) -> int:
    """As many as the tiles ask for, fewer where the device has no room for them."""
    stage_bytes = 2 * tiles.columns * (tiles.rows * (1 + gated) + tiles.x_rows)
    return max(2, min(tiles.stages, (shared_memory_bytes(device) - _SPARE_BYTES) // stage_bytes))


@triton.jit
def _tile(
    source,
    row,
    column,
    num_rows,
    num_columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """[ROWS, COLUMNS] of a matrix [num_rows, num_columns], zeros outside of it."""
    if TMA:
        tile = source.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        tile = tl.load(source + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    return tile.to(DOT_DTYPE)


@Kernel
@triton.jit(do_not_specialize=["x_rows"])
def _product_kernel(
    x,
    weight,
    out,
    num_rows,
    num_columns,
    x_rows,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    X_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_TILES_AT_ONCE: tl.constexpr,
    GATED: tl.constexpr,
    TMA: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out: [x_rows, num_rows]. GATED: the weight holds num_rows rows of the gate, then as many of up. With TMA x and
    weight are tensor descriptors."""
    row_tiles, x_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(x_rows, X_ROWS)
    group = tl.program_id(0) // (X_TILES_AT_ONCE * row_tiles)
    within = tl.program_id(0) % (X_TILES_AT_ONCE * row_tiles)
    group_size = tl.minimum(x_tiles - group * X_TILES_AT_ONCE, X_TILES_AT_ONCE)
    x_row = (group * X_TILES_AT_ONCE + within % group_size) * X_ROWS
    row = within // group_size * ROWS
    all_rows = 2 * num_rows if GATED else num_rows
    wait_for_inputs(PDL)
    let_next_start(PDL)
    total = tl.zeros([ROWS, X_ROWS], tl.float32)
    up = tl.zeros([ROWS, X_ROWS], tl.float32)
    for column in range(0, num_columns, COLUMNS):
        x_tile = _tile(x, x_row, column, x_rows, num_columns, x_stride, X_ROWS, COLUMNS, TMA, DOT_DTYPE).T
        tile = _tile(weight, row, column, all_rows, num_columns, num_columns, ROWS, COLUMNS, TMA, DOT_DTYPE)
        total = tl.dot(tile, x_tile, acc=total, input_precision="ieee")
        if GATED:
            tile = _tile(
                weight, row + num_rows, column, all_rows, num_columns, num_columns, ROWS, COLUMNS, TMA, DOT_DTYPE
            )
            up = tl.dot(tile, x_tile, acc=up, input_precision="ieee")
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    rows, xs = row + tl.arange(0, ROWS), x_row + tl.arange(0, X_ROWS)
    target = out + xs[None, :].to(tl.int64) * out_stride + rows[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (xs < x_rows)[None, :])


@cache
def _has_copy_engine(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _has_tma(*operands: torch.Tensor) -> bool:
    """Whether the copy engine of Hopper can fetch tiles of these: it takes steps of 16 bytes."""
    return all(
        _has_copy_engine(tensor.device)
        and tensor.element_size() == 2
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) % 8 == 0
        for tensor in operands
    )


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, gated: bool, tiles: Tiles) -> torch.Tensor:
    (x_rows, num_columns), num_rows = x.shape, out.shape[1]
    tma = _has_tma(x, weight)
    operands: tuple[Any, Any] = (x, weight)
    if tma:
        operands = (
            TensorDescriptor.from_tensor(x, [tiles.x_rows, tiles.columns]),
            TensorDescriptor.from_tensor(weight, [tiles.rows, tiles.columns]),
        )
    _product_kernel[(cdiv(num_rows, tiles.rows) * cdiv(x_rows, tiles.x_rows),)](
        *operands,
        out,
        num_rows,
        num_columns,
        x_rows,
        x.stride(0),
        out.stride(0),
        ROWS=tiles.rows,
        X_ROWS=tiles.x_rows,
        COLUMNS=tiles.columns,
        X_TILES_AT_ONCE=_X_TILES_AT_ONCE,
        GATED=gated,
        TMA=tma,
        DOT_DTYPE=dot_dtype(x.dtype),
        num_warps=tiles.warps,
        num_stages=_stages(tiles, gated, x.device),
        enable_fp_fusion=False,
        **pdl_options(x.device),
    )
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    parts = hopper_product(x, weight, out)
    if parts is not None:
        return parts[0]
    num_rows = weight.shape[0]
    if out is None:
        out = torch.empty(x.shape[0], num_rows, dtype=x.dtype, device=x.device)
    tiles = tiles_for(False, num_rows, x.shape[0], x.dtype, num_sms(x.device))
    return _launch(x, weight, out, gated=False, tiles=tiles)


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = hopper_product(x, weight, gated=True)
    if parts is not None:
        return parts[0]
    num_rows = weight.shape[0] // 2
    out = torch.empty(x.shape[0], num_rows, dtype=x.dtype, device=x.device)
    tiles = tiles_for(True, num_rows, x.shape[0], x.dtype, num_sms(x.device))
    return _launch(x, weight, out, gated=True, tiles=tiles)
