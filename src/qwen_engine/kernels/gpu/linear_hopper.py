"""Products for Hopper, in Gluon, above all of a few rows: y = x Wᵀ starts to read the weight before x exists.

    producer warp    TMA: W0 W1 ... of the whole ring, then waits for the kernel before, then x0 x1 ..., then by turns
    consumers        wgmma with 64 rows of the weight for each group of four warps, and the rows of x as columns

A weight is nobody's output, so its first tiles are on their way while the kernel before still runs: a norm, attention
or a sum over ranks, which leave the memory idle, or the end of another product, whose last programs do. A program
takes every so-many-th of the units, a unit being a tile of the weight's rows, one of x and a share of the columns.

`full` barriers tell that a slot's bytes have arrived, `empty` ones that the consumers are done with it.
"""

import functools

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

from qwen_engine.kernels.gpu.common import TensorAddress, cdiv, let_next_start, num_sms, pdl_options, wait_for_inputs
from qwen_engine.kernels.gpu.launching import only_compiles
from qwen_engine.kernels.gpu.linear_tiles import Tiles

_PANEL = 64  # columns of a box: 128 bytes, the width of a row in swizzled shared memory
_PANEL_COLUMNS = gl.constexpr(_PANEL)
_GROUP_ROWS = gl.constexpr(64)  # rows of a consumer
_TOGETHER = gl.constexpr(8)  # tiles of the weight that all tiles of x meet before the next ones do


@gluon.jit
def _tile(unit, work):
    """The tiles of rows of the weight and of x, and the share of the columns. Neighbouring programs have neighbouring
    tiles of both, which they share in the L2."""
    row_tiles, x_tiles, _, splits = work
    tile = unit // splits
    first = tile // (_TOGETHER * x_tiles) * _TOGETHER
    together = gl.minimum(row_tiles - first, _TOGETHER)
    within = tile % (_TOGETHER * x_tiles)
    return first + within % together, within // together, unit % splits


@gluon.jit
def _place(step, work, COLUMNS: gl.constexpr):
    """The tiles of a program's step and its first column."""
    steps = work[2]
    row_tile, x_tile, split = _tile(gl.program_id(0) + step // steps * gl.num_programs(0), work)
    return row_tile, x_tile, (split * steps + step % steps) * COLUMNS


@gluon.jit
def _ask_for_weight(step, weight, boxes, full, work, x_bytes, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    PANELS: gl.constexpr = COLUMNS // _PANEL_COLUMNS
    NUM_STAGES: gl.constexpr = full.shape[0]
    row_tile, _, column = _place(step, work, COLUMNS)
    stage = step % NUM_STAGES
    CONSUMERS: gl.constexpr = ROWS // _GROUP_ROWS
    mbarrier.expect(full.index(stage), ROWS * COLUMNS * 2 + x_bytes)
    for panel in gl.static_range(PANELS):
        first = column + panel * _PANEL_COLUMNS
        for consumer in gl.static_range(CONSUMERS):
            group = row_tile * CONSUMERS + consumer
            if len(weight.block_shape) == 4:
                place = [group * weight.block_shape[0], 0, 0, first]
            else:
                place = [group * _GROUP_ROWS, first]
            box = boxes.index((stage * CONSUMERS + consumer) * PANELS + panel)
            tma.async_copy_global_to_shared(weight, place, full.index(stage), box)


@gluon.jit
def _ask_for_x(step, x, boxes, full, work, COLUMNS: gl.constexpr):
    PANELS: gl.constexpr = COLUMNS // _PANEL_COLUMNS
    NUM_STAGES: gl.constexpr = full.shape[0]
    _, x_tile, column = _place(step, work, COLUMNS)
    stage = step % NUM_STAGES
    for panel in gl.static_range(PANELS):
        place = [x_tile * x.block_shape[0], column + panel * _PANEL_COLUMNS]
        tma.async_copy_global_to_shared(x, place, full.index(stage), boxes.index(stage * PANELS + panel))


@gluon.jit
def _produce(ring, x, weight, work, PDL: gl.constexpr):
    w_ring, x_ring, full, empty = ring
    NUM_STAGES: gl.constexpr = x_ring.shape[0]
    ROWS: gl.constexpr = w_ring.shape[0] // NUM_STAGES * _GROUP_ROWS
    COLUMNS: gl.constexpr = w_ring.shape[2]
    # The rings' slots as boxes in the order of their bytes: panels of 64 columns.
    NUM_BOXES: gl.constexpr = NUM_STAGES * (COLUMNS // _PANEL_COLUMNS)
    w_shape: gl.constexpr = [NUM_BOXES * (ROWS // _GROUP_ROWS)] + weight.block_shape  # noqa: RUF005
    w_boxes = w_ring._reinterpret(w_ring.dtype, w_shape, weight.layout)
    x_boxes = x_ring._reinterpret(x_ring.dtype, [NUM_BOXES] + x.block_shape, x.layout)  # noqa: RUF005
    x_bytes: gl.constexpr = x_ring.shape[1] * COLUMNS * 2
    row_tiles, x_tiles, steps, splits = work
    units = row_tiles * x_tiles * splits
    total = gl.cdiv(units - gl.program_id(0), gl.num_programs(0)) * steps
    first = gl.minimum(total, NUM_STAGES)
    for step in range(first):
        _ask_for_weight(step, weight, w_boxes, full, work, x_bytes, ROWS, COLUMNS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    for step in range(first):
        _ask_for_x(step, x, x_boxes, full, work, COLUMNS)
    for step in range(first, total):
        mbarrier.wait(empty.index(step % NUM_STAGES), (step // NUM_STAGES + 1) & 1)
        _ask_for_weight(step, weight, w_boxes, full, work, x_bytes, ROWS, COLUMNS)
        _ask_for_x(step, x, x_boxes, full, work, COLUMNS)


@gluon.jit
def _consume(ring, out, work, num_rows, x_rows, CONSUMER: gl.constexpr, GATED: gl.constexpr):
    w_ring, x_ring, full, empty = ring
    NUM_STAGES: gl.constexpr = x_ring.shape[0]
    CONSUMERS: gl.constexpr = w_ring.shape[0] // NUM_STAGES
    X_ROWS: gl.constexpr = x_ring.shape[1]
    OUT_ROWS: gl.constexpr = _GROUP_ROWS // 2 if GATED else _GROUP_ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X_ROWS, 16])
    # Along the rows of the weight, which are the columns of the output.
    memory: gl.constexpr = gl.BlockedLayout([8, 1], [OUT_ROWS // 8, 256 // OUT_ROWS], [1, 4], [0, 1])
    row_tiles, x_tiles, steps, splits = work
    count = 0
    for unit in range(gl.program_id(0), row_tiles * x_tiles * splits, gl.num_programs(0)):
        acc = gl.zeros([_GROUP_ROWS, X_ROWS], gl.float32, layout)
        for step in range(steps):
            stage = count % NUM_STAGES
            mbarrier.wait(full.index(stage), (count // NUM_STAGES) & 1)
            w_tile = w_ring.index(stage * CONSUMERS + CONSUMER)
            acc = warpgroup_mma(w_tile, x_ring.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((count + NUM_STAGES - 1) % NUM_STAGES), count=1, pred=step > 0)
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count - 1) % NUM_STAGES), count=1)
        if GATED:  # eight rows of the gate, the same eight of up: a thread has both
            gate, up = acc.reshape([_GROUP_ROWS // 16, 2, 8, X_ROWS]).permute((0, 2, 3, 1)).split()
            value = (gate / (1.0 + gl.exp(-gate)) * up).to(out.dtype.element_ty).reshape([OUT_ROWS, X_ROWS])
        else:
            value = acc.to(out.dtype.element_ty)
        value = gl.convert_layout(value, memory)
        row_tile, x_tile, split = _tile(unit, work)
        row = (row_tile * CONSUMERS + CONSUMER) * OUT_ROWS + gl.arange(0, OUT_ROWS, gl.SliceLayout(1, memory))
        x_row = x_tile * X_ROWS + gl.arange(0, X_ROWS, gl.SliceLayout(0, memory))
        target = out + (split * x_rows + x_row).to(gl.int64)[None, :] * num_rows + row[:, None]
        gl.store(target, value, mask=(row < num_rows)[:, None] & (x_row < x_rows)[None, :])


@gluon.jit(do_not_specialize=["x_rows", "row_tiles", "x_tiles", "steps", "splits"])
def _linear_kernel(
    x,
    weight,
    out,
    num_rows,
    x_rows,
    row_tiles,
    x_tiles,
    steps,
    splits,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    X_ROWS: gl.constexpr,
    GATED: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out: [splits, x_rows, num_rows]; GATED: the weight holds num_rows rows of the gate, then as many of up."""
    dtype: gl.constexpr = x.dtype
    CONSUMERS: gl.constexpr = ROWS // _GROUP_ROWS
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_GROUP_ROWS, COLUMNS], dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([X_ROWS, COLUMNS], dtype)
    w_ring = gl.allocate_shared_memory(dtype, [NUM_STAGES * CONSUMERS, _GROUP_ROWS, COLUMNS], w_layout)
    x_ring = gl.allocate_shared_memory(dtype, [NUM_STAGES, X_ROWS, COLUMNS], x_layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    ring = (w_ring, x_ring, full, empty)
    work = (row_tiles, x_tiles, steps, splits)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (ring, out, work, num_rows, x_rows, 0, GATED)),
                (_produce, (ring, x, weight, work, PDL)),
            ],
            [1],
            [40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, out, work, num_rows, x_rows, 0, GATED)),
                (_consume, (ring, out, work, num_rows, x_rows, 1, GATED)),
                (_produce, (ring, x, weight, work, PDL)),
            ],
            [4, 1],
            [REGISTERS, 40],
        )


@functools.lru_cache(maxsize=4096)
def _boxes(address: int, dtype: torch.dtype, rows: int, columns: int, stride: int, box_rows: int) -> TensorDescriptor:
    """A matrix that is read in boxes of so many rows and a panel's columns; what lies outside of it is zeros."""
    box = [box_rows, _PANEL]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)  # the same for fp16
    return TensorDescriptor(TensorAddress(address, dtype), [rows, columns], [stride, 1], box, layout)


@functools.lru_cache(maxsize=1024)
def _boxes_of_halves(
    address: int, dtype: torch.dtype, rows: int, columns: int, stride: int, box_rows: int
) -> TensorDescriptor:
    """The same for a gate above up: eight rows of the one, the same eight of the other, and so on."""
    box = [box_rows // 16, 2, 8, _PANEL]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    shape, strides = [rows // 16, 2, 8, columns], [8 * stride, rows // 2 * stride, stride, 1]
    return TensorDescriptor(TensorAddress(address, dtype), shape, strides, box, layout)


def _registers(x_rows: int) -> int:
    """Of a thread, on average over the warps: few, so that programs of the next kernel find room beside these."""
    return {64: 88, 128: 120, 256: 168}.get(x_rows, 72)


def _compile(
    device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype, tiles: Tiles, gated: bool, aligned: bool
) -> tuple[CompiledKernel, tuple]:
    """The kernel for 16-byte-aligned tensors, and its constants. aligned: so are the rows of the output."""
    launch = pdl_options(device)
    registers = _registers(tiles.x_rows)
    constants = (tiles.rows, tiles.columns, tiles.x_rows, gated, tiles.stages, (3 * registers - 40) // 2, launch["PDL"])
    kernel = _linear_kernel.warmup(
        _boxes(0, dtype, 1, _PANEL, _PANEL, tiles.x_rows),
        (_boxes_of_halves if gated else _boxes)(0, dtype, 16, _PANEL, _PANEL, _GROUP_ROWS.value),
        out_dtype,
        16 if aligned else 15,
        *[1] * 5,
        *constants,
        grid=(1,),
        num_warps=4,
        maxnreg=registers,
        **{name: value for name, value in launch.items() if name != "PDL"},
    )
    return kernel, constants


_compiled = functools.cache(_compile)


def product(
    x: torch.Tensor, weight: torch.Tensor, tiles: Tiles, out: torch.Tensor | None = None, *, gated: bool = False
) -> torch.Tensor:
    """x [rows, columns] times weight [n, columns], transposed: [splits, rows, n], parts of it, fp32 if several.

    gated: silu(x Gᵀ) · (x Uᵀ), [1, rows, n / 2], for a weight that holds G above U, each of them a multiple of 8 rows.
    Addresses and strides are multiples of 16 bytes. out: [rows, n], contiguous, that the one part goes to.
    """
    (rows, num_columns), num_rows = x.shape, weight.shape[0] // (2 if gated else 1)
    out_dtype = x.dtype if tiles.splits == 1 else torch.float32
    parts = torch.empty(tiles.splits, rows, num_rows, dtype=out_dtype, device=x.device) if out is None else out[None]
    variant = (x.device, x.dtype, out_dtype, tiles, gated, num_rows % 16 == 0)
    if only_compiles():
        _compile(*variant)
        return parts
    kernel, constants = _compiled(*variant)
    row_tiles, x_tiles = cdiv(weight.shape[0], tiles.rows), cdiv(rows, tiles.x_rows)
    steps = cdiv(cdiv(num_columns, tiles.columns), tiles.splits)
    # Not through Triton's look-up by the types of all arguments, which takes longer than the rest of the call.
    kernel[min(row_tiles * x_tiles * tiles.splits, tiles.programs * num_sms(x.device)), 1, 1](
        _boxes(x.data_ptr(), x.dtype, rows, num_columns, x.stride(0), tiles.x_rows),
        (_boxes_of_halves if gated else _boxes)(
            weight.data_ptr(), x.dtype, *weight.shape, weight.stride(0), _GROUP_ROWS.value
        ),
        parts,
        num_rows,
        rows,
        row_tiles,
        x_tiles,
        steps,
        tiles.splits,
        *constants,
    )
    return parts
