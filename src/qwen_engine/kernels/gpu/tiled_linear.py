"""Matrix products of a few rows, bound by reading the weight once: y = x Wᵀ for up to MAX_ROWS rows of x.

The weight is the wide side of tl.dot: a program owns a tile of its rows and walks along its columns, or along a share
of them (split-K), which leaves fp32 parts of the product for the next kernel to add. Which tiles are best depends on
the shape; `TUNED` holds what `benchmarks/tune_linear.py` measured. Whatever is not there goes to cuBLAS, but for the
logits of the fewest rows, which the product of `deterministic` reads the weight faster for.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from qwen_engine.kernels.gpu.common import (
    cdiv,
    dot_dtype,
    let_next_start,
    next_power_of_2,
    pdl_options,
    wait_for_inputs,
)
from qwen_engine.kernels.gpu.deterministic import products
from qwen_engine.kernels.gpu.elementwise import silu_mul
from qwen_engine.kernels.gpu.launching import Kernel

MAX_ROWS = 64
_MIN_DOT_ROWS = 16  # smallest side of a tl.dot
_VOCABULARY_ROWS = 100_000  # of a weight; cuBLAS reads such a one at 84 % of the memory's speed for one row of x


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: rows and columns of the weight per tile, programs that share a row of tiles."""

    rows: int
    columns: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


TUNED: dict[tuple[str, int, int], dict[int, Tiles]] = {
    # Qwen3-32B on two GPUs
    ("linear", 5120, 5120): {16: Tiles(64, 256, stages=4)},
    ("linear", 5120, 4096): {16: Tiles(64, 256, stages=4)},
    ("gated", 25600, 5120): {32: Tiles(64, 128, stages=3), 64: Tiles(64, 64, stages=4)},
    ("linear", 5120, 12800): {32: Tiles(64, 256, stages=4), 64: Tiles(128, 128, splits=2, stages=4)},
    # Qwen3-8B on one
    ("linear", 6144, 4096): {32: Tiles(64, 256, stages=4)},
    ("linear", 4096, 4096): {16: Tiles(64, 256, stages=5), 32: Tiles(64, 256, stages=4)},
    ("gated", 24576, 4096): {32: Tiles(32, 128, stages=3), 64: Tiles(64, 64, stages=4)},
    ("linear", 4096, 12288): {16: Tiles(64, 128, splits=2, stages=5)},
    # Qwen3-0.6B
    ("linear", 4096, 1024): {16: Tiles(64, 256, stages=4), 32: Tiles(64, 128, stages=5), 64: Tiles(64, 256, stages=3)},
    ("linear", 1024, 2048): {16: Tiles(64, 256, splits=2, stages=4), 64: Tiles(64, 256, splits=4, stages=3)},
    ("gated", 6144, 1024): {32: Tiles(64, 128, stages=4)},
    ("linear", 1024, 3072): {16: Tiles(64, 256, splits=2, stages=4), 64: Tiles(64, 256, splits=4, stages=3)},
}
"""("linear" or "gated", weight rows, weight columns) → the largest number of rows of x → tiles, for bf16 on an H200."""


def tuned_tiles(kind: str, x: torch.Tensor, weight: torch.Tensor) -> Tiles | None:
    """The tiles to use, None where cuBLAS is as fast or nothing was measured."""
    if x.dtype != torch.bfloat16:
        return None
    by_rows = TUNED.get((kind, *weight.shape), {})
    return next((tiles for limit, tiles in sorted(by_rows.items()) if x.shape[0] <= limit), None)


@triton.jit
def _weight_tile(weight, row, column, num_rows, num_columns, WHOLE: tl.constexpr):
    """[rows, columns] of the weight; WHOLE: all of them exist."""
    pointers = weight + row[:, None] * num_columns + column[None, :]
    if WHOLE:
        return tl.load(pointers)
    return tl.load(pointers, mask=(row < num_rows)[:, None] & (column < num_columns)[None, :], other=0.0)


@triton.jit
def _activations(x, column, x_rows, x_stride, num_columns, X_ROWS: tl.constexpr):
    """[columns, X_ROWS] of x. Every program reads it, so it stays in the L2; the weight passes through once."""
    x_row = tl.arange(0, X_ROWS)
    mask = (column < num_columns)[:, None] & (x_row < x_rows)[None, :]
    return tl.load(x + x_row[None, :] * x_stride + column[:, None], mask=mask, other=0.0)


@Kernel
@triton.jit(do_not_specialize=["x_rows"])
def _linear_kernel(
    x,
    weight,
    out,
    num_rows,
    num_columns,
    x_rows,
    x_stride,
    columns_per_split,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out: [splits, x_rows, num_rows]."""
    split = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    total = tl.zeros([ROWS, X_ROWS], tl.float32)
    # columns_per_split is a multiple of COLUMNS, so only the last split may end inside a tile.
    for first in range(split * columns_per_split, tl.minimum((split + 1) * columns_per_split, num_columns), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        tile = _weight_tile(weight, row, column, num_rows, num_columns, WHOLE).to(DOT_DTYPE)
        activations = _activations(x, column, x_rows, x_stride, num_columns, X_ROWS).to(DOT_DTYPE)
        total = tl.dot(tile, activations, acc=total, input_precision="ieee")
    x_row = tl.arange(0, X_ROWS)
    target = out + (split * x_rows + x_row[None, :]).to(tl.int64) * num_rows + row[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (x_row < x_rows)[None, :])


@Kernel
@triton.jit(do_not_specialize=["x_rows"])
def _gated_kernel(
    x,
    weight,
    out,
    num_rows,
    num_columns,
    x_rows,
    x_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out: [x_rows, num_rows]; the weight holds num_rows rows of the gate, then as many of up."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    gate = tl.zeros([ROWS, X_ROWS], tl.float32)
    up = tl.zeros([ROWS, X_ROWS], tl.float32)
    for first in range(0, num_columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        activations = _activations(x, column, x_rows, x_stride, num_columns, X_ROWS).to(DOT_DTYPE)
        tile = _weight_tile(weight, row, column, num_rows, num_columns, WHOLE).to(DOT_DTYPE)
        gate = tl.dot(tile, activations, acc=gate, input_precision="ieee")
        tile = _weight_tile(weight, row + num_rows, column, 2 * num_rows, num_columns, WHOLE).to(DOT_DTYPE)
        up = tl.dot(tile, activations, acc=up, input_precision="ieee")
    x_row = tl.arange(0, X_ROWS)
    value = gate / (1.0 + tl.exp(-gate)) * up
    target = out + x_row[None, :].to(tl.int64) * num_rows + row[:, None]
    tl.store(target, value.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (x_row < x_rows)[None, :])


def linear_tiled(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """x [rows, columns] times weight [n, columns], transposed; at most MAX_ROWS rows. Gives [splits, rows, n], parts of
    the product, fp32 if there are several."""
    rows, (num_rows, num_columns) = x.shape[0], weight.shape
    splits = min(tiles.splits, cdiv(num_columns, tiles.columns))
    columns_per_split = cdiv(cdiv(num_columns, tiles.columns), splits) * tiles.columns
    dtype = x.dtype if splits == 1 else torch.float32
    parts = torch.empty(splits, rows, num_rows, dtype=dtype, device=x.device)
    _linear_kernel[(cdiv(num_rows, tiles.rows), splits)](
        x,
        weight,
        parts,
        num_rows,
        num_columns,
        rows,
        x.stride(0),
        columns_per_split,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        X_ROWS=_padded(rows),
        WHOLE=_is_whole(num_rows, num_columns, tiles),
        DOT_DTYPE=dot_dtype(x.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(x.device),
    )
    return parts


def gated_linear_tiled(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """silu(x Gᵀ) · (x Uᵀ) for a weight that holds G above U; rounded once."""
    rows, (num_rows, num_columns) = x.shape[0], weight.shape
    out = torch.empty(rows, num_rows // 2, dtype=x.dtype, device=x.device)
    _gated_kernel[(cdiv(num_rows // 2, tiles.rows),)](
        x,
        weight,
        out,
        num_rows // 2,
        num_columns,
        rows,
        x.stride(0),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        X_ROWS=_padded(rows),
        WHOLE=_is_whole(num_rows // 2, num_columns, tiles),
        DOT_DTYPE=dot_dtype(x.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_options(x.device),
    )
    return out


def _padded(rows: int) -> int:
    return max(_MIN_DOT_ROWS, next_power_of_2(rows))


def _is_whole(num_rows: int, num_columns: int, tiles: Tiles) -> bool:
    return num_rows % tiles.rows == 0 and num_columns % tiles.columns == 0


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    tiles = tuned_tiles("linear", x, weight)
    return F.linear(x, weight)[None] if tiles is None else linear_tiled(x, weight, tiles)


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if tuned_tiles("linear", x, weight) is None:
        if x.dtype == torch.bfloat16 and x.shape[0] <= _MIN_DOT_ROWS and weight.shape[0] >= _VOCABULARY_ROWS:
            return products.linear(x, weight, out)
        return torch.mm(x, weight.t(), out=out)
    parts = linear_parts(x, weight)
    whole = parts[0] if len(parts) == 1 else parts.sum(dim=0).to(x.dtype)
    return whole if out is None else out.copy_(whole)


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    tiles = tuned_tiles("gated", x, weight)
    return silu_mul(F.linear(x, weight)) if tiles is None else gated_linear_tiled(x, weight, tiles)
