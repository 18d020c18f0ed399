"""`prefill.py` for Hopper, in Gluon: softmax and dots overlapped inside a program.

A program takes tiles of that module's kind, with the group's heads side by side in the dot's rows, in 2 x 64 rows:

    producer warp    TMA: K0 V0 K1 V1 ...  one box per page   ->  ring of NUM_STAGES tiles of K and as many of V
    consumer 0       rows 0 to 63     for each tile j:  Q Kj (async), P V(j-1) (async), softmax j while P V runs
    consumer 1       rows 64 to 127   the same; where one is in its softmax, the dots are the other's

`full` barriers tell that a tile's bytes have arrived, `empty` barriers that both consumers are done with a slot. Both
take as many passes as there are tiles, so a phase follows from a running count.
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

from qwen_engine.kernels.gpu.common import LOG2_E, TensorAddress, let_next_start, num_sms, pdl_options, wait_for_inputs
from qwen_engine.kernels.gpu.launching import only_compiles
from qwen_engine.kernels.gpu.prefill_tiles import HALF_M, TILE_WORDS

_HEAD_DIM = 128
_HALF_M = gl.constexpr(HALF_M)  # dot rows of a consumer
_PANEL = 64  # dims of a box: 128 bytes, the width of a row in swizzled shared memory
_BLOCK_N = 128
_NUM_STAGES = 3
_TILE_WORDS = gl.constexpr(TILE_WORDS)


@gluon.jit
def _locate(item, work):
    """KV head and tile of an item: all heads of a tile follow one another. See `prefill_tiles.py` for the words."""
    tiles, kv_heads, _ = work
    word = tiles + item // kv_heads * _TILE_WORDS
    return (
        item % kv_heads,
        gl.load(word),
        gl.load(word + 1),
        gl.load(word + 2),
        gl.load(word + 3),
        gl.load(word + 4),
        gl.load(word + 5),
    )


@gluon.jit
def _item(round, items):
    """Rounds go through the programs forth and back, which evens out their shares of long and short tiles."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    place = program + (round % 2) * (programs - 1 - 2 * program)
    return round * programs + place


@gluon.jit
def _produce(
    ring,
    work,
    block_tables,
    table_stride,
    BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    k_cache, v_cache, k_ring, v_ring, k_full, k_empty, v_full, v_empty = ring
    kv_heads, num_tiles = work[1], work[2]
    BOX: gl.constexpr = k_cache.block_shape[0]
    PANELS: gl.constexpr = k_ring.shape[2] // k_cache.block_shape[1]
    PIECES: gl.constexpr = BLOCK_N // BOX
    # The ring's slots as boxes in the order of their bytes: [slot, panel of 64 dims, piece of BOX tokens].
    boxes: gl.constexpr = [NUM_STAGES * PANELS * PIECES, BOX, k_cache.block_shape[1]]
    k_boxes = k_ring._reinterpret(k_ring.dtype, boxes, k_cache.layout)
    v_boxes = v_ring._reinterpret(v_ring.dtype, boxes, v_cache.layout)
    tile_bytes: gl.constexpr = BLOCK_N * k_ring.shape[2] * 2

    count = 0
    items = num_tiles * kv_heads
    for round in range(gl.cdiv(items, gl.num_programs(0))):
        item = _item(round, items)
        if item < items:
            kv_head, _, _, _, slot, seq_len, end = _locate(item, work)
            table = block_tables + slot.to(gl.int64) * table_stride
            last_block = (seq_len - 1) // BLOCK_SIZE
            for first in range(0, end, BLOCK_N):
                stage = count % NUM_STAGES
                free = (count // NUM_STAGES + 1) & 1
                cache_rows = ()
                for piece in gl.static_range(PIECES):
                    token = first + piece * BOX
                    block = gl.load(table + gl.minimum(token // BLOCK_SIZE, last_block))
                    cache_row = (block * kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
                    cache_rows = cache_rows + (cache_row,)  # noqa: RUF005
                mbarrier.wait(k_empty.index(stage), free)
                mbarrier.expect(k_full.index(stage), tile_bytes)
                for piece in gl.static_range(PIECES):
                    for panel in gl.static_range(PANELS):
                        tma.async_copy_global_to_shared(
                            k_cache,
                            [cache_rows[piece], panel * k_cache.block_shape[1]],
                            k_full.index(stage),
                            k_boxes.index((stage * PANELS + panel) * PIECES + piece),
                        )
                mbarrier.wait(v_empty.index(stage), free)
                mbarrier.expect(v_full.index(stage), tile_bytes)
                for piece in gl.static_range(PIECES):
                    for panel in gl.static_range(PANELS):
                        tma.async_copy_global_to_shared(
                            v_cache,
                            [cache_rows[piece], panel * k_cache.block_shape[1]],
                            v_full.index(stage),
                            v_boxes.index((stage * PANELS + panel) * PIECES + piece),
                        )
                count += 1


@gluon.jit
def _softmax(scores, peak, total, scale_log2):
    """One step of the online softmax, in powers of two."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_peak[:, None])
    decay = gl.exp2(peak - new_peak)
    return weights, decay, new_peak, total * decay + gl.sum(weights, 1)


@gluon.jit
def _steps(
    state,
    count,
    start,
    end,
    tiles,
    query,
    ring,
    query_positions,
    scale_log2,
    MASKED: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Scores and softmax of the tiles [start, end), each with the weighted values of the tile before it."""
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = ring
    acc, weights, peak, total = state
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    layout: gl.constexpr = acc.type.layout
    for tile in range(start, end):
        now = count + tile
        stage = now % NUM_STAGES
        before = (now - 1) % NUM_STAGES
        scores = warpgroup_mma(
            query,
            k_ring.index(stage).permute((1, 0)),
            gl.zeros([_HALF_M, BLOCK_N], gl.float32, layout),
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(v_full.index(before), ((now - 1) // NUM_STAGES) & 1)
        acc = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            tokens = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
            scores = gl.where(tokens[None, :] <= query_positions[:, None], scores, float("-inf"))
        new_weights, decay, peak, total = _softmax(scores, peak, total, scale_log2)
        new_weights = new_weights.to(k_ring.dtype)
        # The assembler takes no arithmetic past this wait's loop; else it would wait for the values before the softmax.
        mbarrier.wait(k_full.index((now + 1) % NUM_STAGES), ((now + 1) // NUM_STAGES) & 1, pred=tile + 1 < tiles)
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * decay[:, None]
        weights = gl.convert_layout(new_weights, gl.DotOperandLayout(0, layout, 2))
    return acc, weights, peak, total


@gluon.jit
def _consume(
    ring,
    query,
    work,
    tensors,
    scale_log2,
    CONSUMER: gl.constexpr,
    GROUP: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    k_ring, v_ring, k_full, k_empty, v_full, v_empty = ring
    kv_heads, num_tiles = work[1], work[2]
    q, out, q_heads, out_heads = tensors
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    HALF_Q: gl.constexpr = _HALF_M // GROUP
    dtype: gl.constexpr = k_ring.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(BLOCK_N, HEAD_DIM), 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    # 16 bytes per thread, a row of 128 dims by 16 threads.
    memory: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    count = 0
    items = num_tiles * kv_heads
    for round in range(gl.cdiv(items, gl.num_programs(0))):
        item = _item(round, items)
        if item < items:
            kv_head, row_start, query_len, first_query, _slot, seq_len, end = _locate(item, work)
            member = gl.arange(0, _HALF_M, gl.SliceLayout(1, memory))
            query_index = first_query + CONSUMER * HALF_Q + member // GROUP
            stored = ((query_index < query_len) & (member < HALF_Q * GROUP))[:, None]
            token = (row_start + query_index).to(gl.int64)[:, None]
            head = (kv_head * GROUP + member % GROUP)[:, None]
            dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, memory))[None, :]
            kv_tiles = gl.cdiv(end, BLOCK_N)

            total = gl.full([_HALF_M], 1.0, gl.float32, row_layout)
            acc = gl.zeros([_HALF_M, HEAD_DIM], gl.float32, layout)
            if kv_tiles > 0:
                q_tile = gl.load(q + (token * q_heads + head) * HEAD_DIM + dims, mask=stored, other=0.0)
                query.store(q_tile)
                fence_async_shared()
                first_position = seq_len - query_len + first_query
                row_member = gl.arange(0, _HALF_M, row_layout)
                query_positions = first_position + CONSUMER * HALF_Q + row_member // GROUP

                mbarrier.wait(k_full.index(count % NUM_STAGES), (count // NUM_STAGES) & 1)
                scores = warpgroup_mma(
                    query,
                    k_ring.index(count % NUM_STAGES).permute((1, 0)),
                    gl.zeros([_HALF_M, BLOCK_N], gl.float32, layout),
                    use_acc=False,
                    is_async=True,
                )
                scores = warpgroup_mma_wait(0, deps=(scores,))
                mbarrier.arrive(k_empty.index(count % NUM_STAGES), count=1)
                tokens = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
                scores = gl.where(tokens[None, :] <= query_positions[:, None], scores, float("-inf"))
                peak = gl.full([_HALF_M], float("-inf"), gl.float32, row_layout)
                weights, _decay, peak, total = _softmax(scores, peak, total * 0.0, scale_log2)
                weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, layout, 2))

                mbarrier.wait(
                    k_full.index((count + 1) % NUM_STAGES), ((count + 1) // NUM_STAGES) & 1, pred=kv_tiles > 1
                )
                # Tiles before this one precede every query.
                unmasked_tiles = gl.maximum((first_position + 1) // BLOCK_N, 1)
                state = (acc, weights, peak, total)
                state = _steps(
                    state,
                    count,
                    1,
                    unmasked_tiles,
                    kv_tiles,
                    query,
                    ring,
                    query_positions,
                    scale_log2,
                    False,
                    NUM_STAGES,
                )
                state = _steps(
                    state,
                    count,
                    unmasked_tiles,
                    kv_tiles,
                    kv_tiles,
                    query,
                    ring,
                    query_positions,
                    scale_log2,
                    True,
                    NUM_STAGES,
                )
                acc, weights, peak, total = state

                count += kv_tiles
                stage = (count - 1) % NUM_STAGES
                mbarrier.wait(v_full.index(stage), ((count - 1) // NUM_STAGES) & 1)
                values = v_ring.index(stage)
                if kv_tiles * BLOCK_N > seq_len:  # what lies behind the row may be NaN, which no weight of 0 undoes
                    last = seq_len - (kv_tiles - 1) * BLOCK_N
                    live = gl.arange(0, BLOCK_N, gl.SliceLayout(1, memory)) < last
                    values.store(gl.where(live[:, None], values.load(memory), 0.0))
                    fence_async_shared()
                acc = warpgroup_mma(weights, values, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(stage), count=1)
            query.store((acc * (1.0 / total)[:, None]).to(dtype))
            gl.store(out + (token * out_heads + head) * HEAD_DIM + dims, query.load(memory), mask=stored)


@gluon.jit(do_not_specialize=["kv_heads", "num_tiles", "q_heads", "out_heads", "table_stride"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    tiles,
    out,
    scale_log2,
    kv_heads,
    num_tiles,
    q_heads,
    out_heads,
    table_stride,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = k_cache.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    query_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF_M, HEAD_DIM], dtype)
    barriers: gl.constexpr = [NUM_STAGES, 1]
    k_ring = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    v_ring = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    queries = gl.allocate_shared_memory(dtype, [2, _HALF_M, HEAD_DIM], query_layout)
    k_full = gl.allocate_shared_memory(gl.int64, barriers, mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, barriers, mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, barriers, mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, barriers, mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    wait_for_inputs(PDL)
    let_next_start(PDL)

    work = (tiles, kv_heads, num_tiles)
    tensors = (q, out, q_heads, out_heads)
    ring = (k_ring, v_ring, k_full, k_empty, v_full, v_empty)
    source = (k_cache, v_cache, k_ring, v_ring, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_consume, (ring, queries.index(0), work, tensors, scale_log2, 0, GROUP, NUM_STAGES)),
            (_consume, (ring, queries.index(1), work, tensors, scale_log2, 1, GROUP, NUM_STAGES)),
            (_produce, (source, work, block_tables, table_stride, BLOCK_N, BLOCK_SIZE, NUM_STAGES)),
        ],
        [4, 1],
        [232, 40],
    )


@functools.lru_cache(maxsize=1024)
def _pages(address: int, dtype: torch.dtype, num_rows: int, block_size: int) -> TensorDescriptor:
    """A layer's K or V as [num_rows, head_dim], of which a page's rows, at most a tile's, come in one box per panel."""
    box = [min(block_size, _BLOCK_N), _PANEL]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)  # the same for fp16
    return TensorDescriptor(TensorAddress(address, dtype), [num_rows, _HEAD_DIM], [_HEAD_DIM, 1], box, layout)


def _compile(device: torch.device, dtype: torch.dtype, group: int, block_size: int) -> tuple[CompiledKernel, tuple]:
    """The kernel for 16-byte-aligned tensors, and its constants."""
    pages = _pages(0, dtype, 1, block_size)
    launch = pdl_options(device)
    constants = (group, _HEAD_DIM, block_size, _BLOCK_N, _NUM_STAGES, launch["PDL"])
    kernel = _prefill_kernel.warmup(
        dtype,
        pages,
        pages,
        *[torch.int32] * 2,
        dtype,
        1.0,
        *[1] * 5,
        *constants,
        grid=(1,),
        num_warps=4,
        maxnreg=168,
        **{name: value for name, value in launch.items() if name != "PDL"},
    )
    return kernel, constants


_compiled = functools.cache(_compile)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """For tensors that `prefill.suits_hopper`. tiles: what `prefill_tiles.sorted_tiles` gives."""
    _, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    num_rows = num_blocks * num_kv_heads * block_size
    if only_compiles():
        _compile(q.device, q.dtype, group, block_size)
        return
    kernel, constants = _compiled(q.device, q.dtype, group, block_size)
    # Not through Triton's look-up by the types of all arguments, which takes longer than the rest of the call.
    kernel[min(num_kv_heads * len(tiles), num_sms(q.device)), 1, 1](
        q,
        _pages(k_cache.data_ptr(), k_cache.dtype, num_rows, block_size),
        _pages(v_cache.data_ptr(), v_cache.dtype, num_rows, block_size),
        block_tables,
        tiles,
        out,
        scale * LOG2_E,
        num_kv_heads,
        len(tiles),
        q.stride(0) // head_dim,
        out.stride(0) // head_dim,
        block_tables.stride(0),
        *constants,
    )
