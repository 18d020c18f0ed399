"""Products of a few rows for Hopper, in Gluon: y = x Wᵀ bound by reading the weight, which starts before x exists.

    producer warp    TMA: W0 W1 ... of the whole ring, then waits for the kernel before, then x0 x1 ..., then by turns
    consumers        wgmma with 64 rows of the weight for each group of four warps, and all rows of x as columns

A weight is nobody's output, so its first tiles are on their way while the kernel before still runs: a norm, attention
or a sum over ranks, which leave the memory idle, or the end of another product, whose last programs do. A program
takes every so-many-th of the units, a unit being a tile of the weight's rows and a share of its columns.

`full` barriers tell that a slot's bytes have arrived, `empty` ones that the consumers are done with it.
"""

import functools
from dataclasses import dataclass

import torch
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qwen_engine.kernels.gpu.common import cdiv, let_next_start, num_sms, pdl_options, wait_for_inputs
from qwen_engine.kernels.gpu.launching import only_compiles
from qwen_engine.kernels.gpu.linear_tiles import Tiles

_PANEL = 64  # columns of a box: 128 bytes, the width of a row in swizzled shared memory
_PANEL_COLUMNS = gl.constexpr(_PANEL)


@gluon.jit
def _place(step, work, COLUMNS: gl.constexpr):
    """The tile of rows and the first column of a program's step."""
    _, steps, splits = work
    unit = gl.program_id(0) + step // steps * gl.num_programs(0)
    return unit // splits, (unit % splits * steps + step % steps) * COLUMNS


@gluon.jit
def _ask_for_weight(step, weight, boxes, full, work, num_rows, x_bytes, PIECES: gl.constexpr, COLUMNS: gl.constexpr):
    PANELS: gl.constexpr = COLUMNS // _PANEL_COLUMNS
    NUM_STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = weight.block_shape[0]
    tile, column = _place(step, work, COLUMNS)
    stage = step % NUM_STAGES
    mbarrier.expect(full.index(stage), PIECES * ROWS * COLUMNS * 2 + x_bytes)
    for panel in gl.static_range(PANELS):
        for piece in gl.static_range(PIECES):
            tma.async_copy_global_to_shared(
                weight,
                [piece * num_rows + tile * ROWS, column + panel * _PANEL_COLUMNS],
                full.index(stage),
                boxes.index((stage * PANELS + panel) * PIECES + piece),
            )


@gluon.jit
def _ask_for_x(step, x, boxes, full, work, COLUMNS: gl.constexpr):
    PANELS: gl.constexpr = COLUMNS // _PANEL_COLUMNS
    NUM_STAGES: gl.constexpr = full.shape[0]
    _, column = _place(step, work, COLUMNS)
    stage = step % NUM_STAGES
    for panel in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(
            x, [0, column + panel * _PANEL_COLUMNS], full.index(stage), boxes.index(stage * PANELS + panel)
        )


@gluon.jit
def _produce(ring, x, weight, work, num_rows, PIECES: gl.constexpr, PDL: gl.constexpr):
    w_ring, x_ring, full, empty = ring
    NUM_STAGES: gl.constexpr = w_ring.shape[0]
    COLUMNS: gl.constexpr = w_ring.shape[2]
    PANELS: gl.constexpr = COLUMNS // _PANEL_COLUMNS
    # The rings' slots as boxes in the order of their bytes: [slot, panel of 64 columns, piece of rows].
    w_shape: gl.constexpr = [NUM_STAGES * PANELS * PIECES, w_ring.shape[1] // PIECES, _PANEL_COLUMNS]
    x_shape: gl.constexpr = [NUM_STAGES * PANELS, x_ring.shape[1], _PANEL_COLUMNS]
    w_boxes = w_ring._reinterpret(w_ring.dtype, w_shape, weight.layout)
    x_boxes = x_ring._reinterpret(x_ring.dtype, x_shape, x.layout)
    x_bytes: gl.constexpr = x_ring.shape[1] * COLUMNS * 2
    units, steps, _ = work
    total = gl.cdiv(units - gl.program_id(0), gl.num_programs(0)) * steps
    first = gl.minimum(total, NUM_STAGES)
    for step in range(first):
        _ask_for_weight(step, weight, w_boxes, full, work, num_rows, x_bytes, PIECES, COLUMNS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    for step in range(first):
        _ask_for_x(step, x, x_boxes, full, work, COLUMNS)
    for step in range(first, total):
        mbarrier.wait(empty.index(step % NUM_STAGES), (step // NUM_STAGES + 1) & 1)
        _ask_for_weight(step, weight, w_boxes, full, work, num_rows, x_bytes, PIECES, COLUMNS)
        _ask_for_x(step, x, x_boxes, full, work, COLUMNS)


@gluon.jit
def _consume(ring, out, work, num_rows, x_rows, GATED: gl.constexpr):
    w_ring, x_ring, full, empty = ring
    NUM_STAGES: gl.constexpr = w_ring.shape[0]
    ROWS: gl.constexpr = w_ring.shape[1]
    X_ROWS: gl.constexpr = x_ring.shape[1]
    OUT_ROWS: gl.constexpr = ROWS // 2 if GATED else ROWS
    WARPS: gl.constexpr = ROWS // 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, X_ROWS, 16])
    # Along the rows of the weight, which are the columns of the output.
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [OUT_ROWS // 8, 256 // OUT_ROWS], [1, WARPS], [0, 1])
    units, steps, splits = work
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        acc = gl.zeros([ROWS, X_ROWS], gl.float32, layout)
        for step in range(steps):
            stage = count % NUM_STAGES
            mbarrier.wait(full.index(stage), (count // NUM_STAGES) & 1)
            acc = warpgroup_mma(w_ring.index(stage), x_ring.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((count + NUM_STAGES - 1) % NUM_STAGES), count=1, pred=step > 0)
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count - 1) % NUM_STAGES), count=1)
        if GATED:
            pair: gl.constexpr = gl.BlockedLayout(
                [8, 1, 2], [OUT_ROWS // 8, 256 // OUT_ROWS, 1], [1, WARPS, 1], [2, 0, 1]
            )
            gate, up = gl.convert_layout(acc.reshape([2, OUT_ROWS, X_ROWS]).permute((1, 2, 0)), pair).split()
            value = (gate / (1.0 + gl.exp(-gate)) * up).to(out.dtype.element_ty)
        else:
            value = acc.to(out.dtype.element_ty)
        value = gl.convert_layout(value, memory)
        row = unit // splits * OUT_ROWS + gl.arange(0, OUT_ROWS, gl.SliceLayout(1, memory))
        x_row = gl.arange(0, X_ROWS, gl.SliceLayout(0, memory))
        target = out + (unit % splits * x_rows + x_row)[None, :] * num_rows + row[:, None]
        gl.store(target, value, mask=(row < num_rows)[:, None] & (x_row < x_rows)[None, :])


@gluon.jit(do_not_specialize=["x_rows", "units", "steps", "splits"])
def _linear_kernel(
    x,
    weight,
    out,
    num_rows,
    x_rows,
    units,
    steps,
    splits,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    X_ROWS: gl.constexpr,
    GATED: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """out: [splits, x_rows, num_rows]; GATED: the weight holds num_rows rows of the gate, then as many of up."""
    dtype: gl.constexpr = x.dtype
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([X_ROWS, COLUMNS], dtype)
    w_ring = gl.allocate_shared_memory(dtype, [NUM_STAGES, ROWS, COLUMNS], w_layout)
    x_ring = gl.allocate_shared_memory(dtype, [NUM_STAGES, X_ROWS, COLUMNS], x_layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    ring = (w_ring, x_ring, full, empty)
    work = (units, steps, splits)
    gl.warp_specialize(
        [
            (_consume, (ring, out, work, num_rows, x_rows, GATED)),
            (_produce, (ring, x, weight, work, num_rows, 2 if GATED else 1, PDL)),
        ],
        [1],
        [40],
    )


@dataclass(frozen=True, slots=True)
class _Address:
    """A tensor, as far as a descriptor needs it; unlike one it keeps no memory allocated."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(maxsize=4096)
def _boxes(address: int, dtype: torch.dtype, rows: int, columns: int, stride: int, box_rows: int) -> TensorDescriptor:
    """A matrix that is read in boxes of so many rows and a panel's columns; rows beyond its last are zeros."""
    box = [box_rows, _PANEL]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)  # the same for fp16
    return TensorDescriptor(_Address(address, dtype), [rows, columns], [stride, 1], box, layout)


def _registers(x_rows: int) -> int:
    """Of a thread, on average over the warps: few, so that programs of the next kernel find room beside these."""
    return {64: 88, 128: 120, 256: 168}.get(x_rows, 72)


def _compile(
    device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype, tiles: Tiles, gated: bool, aligned: bool
) -> tuple[CompiledKernel, tuple]:
    """The kernel for 16-byte-aligned tensors, and its constants. aligned: so are the rows of the output."""
    launch = pdl_options(device)
    constants = (tiles.rows, tiles.columns, tiles.x_rows, gated, tiles.stages, launch["PDL"])
    kernel = _linear_kernel.warmup(
        _boxes(0, dtype, 1, _PANEL, _PANEL, tiles.x_rows),
        _boxes(0, dtype, 1, _PANEL, _PANEL, _box_rows(tiles, gated)),
        out_dtype,
        16 if aligned else 15,
        *[1] * 4,
        *constants,
        grid=(1,),
        num_warps=tiles.rows // 16,
        maxnreg=_registers(tiles.x_rows),
        **{name: value for name, value in launch.items() if name != "PDL"},
    )
    return kernel, constants


_compiled = functools.cache(_compile)


def product(
    x: torch.Tensor, weight: torch.Tensor, tiles: Tiles, out: torch.Tensor | None = None, *, gated: bool = False
) -> torch.Tensor:
    """x [rows, columns] times weight [n, columns], transposed: [splits, rows, n], parts of it, fp32 if several.

    gated: silu(x Gᵀ) · (x Uᵀ), [1, rows, n / 2], for a weight that holds G above U. x has at most the tiles' x_rows,
    and addresses and strides are multiples of 16 bytes. out: [rows, n] that the one part goes to.
    """
    (rows, num_columns), num_rows = x.shape, weight.shape[0] // (2 if gated else 1)
    out_dtype = x.dtype if tiles.splits == 1 else torch.float32
    parts = torch.empty(tiles.splits, rows, num_rows, dtype=out_dtype, device=x.device) if out is None else out[None]
    variant = (x.device, x.dtype, out_dtype, tiles, gated, num_rows % 16 == 0)
    if only_compiles():
        _compile(*variant)
        return parts
    kernel, constants = _compiled(*variant)
    steps = cdiv(cdiv(num_columns, tiles.columns), tiles.splits)
    units = cdiv(weight.shape[0], tiles.rows) * tiles.splits
    # Not through Triton's look-up by the types of all arguments, which takes longer than the rest of the call.
    kernel[min(units, tiles.programs * num_sms(x.device)), 1, 1](
        _boxes(x.data_ptr(), x.dtype, rows, num_columns, x.stride(0), tiles.x_rows),
        _boxes(weight.data_ptr(), x.dtype, *weight.shape, weight.stride(0), _box_rows(tiles, gated)),
        parts,
        num_rows,
        rows,
        units,
        steps,
        tiles.splits,
        *constants,
    )
    return parts


def _box_rows(tiles: Tiles, gated: bool) -> int:
    """Of the weight; a tile of a gated one has rows of both halves."""
    return tiles.rows // 2 if gated else tiles.rows
