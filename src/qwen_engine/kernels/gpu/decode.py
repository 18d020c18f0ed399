"""Split-KV decode attention.

Stage 1: one program per (row, KV head, split) walks its share of the row's pages with all query heads of the KV head in
one dot, by online softmax, and leaves its softmax-weighted mean of V and the base-2 logarithm of its softmax
denominator. Stage 2 weighs the partials of a (row, head) by those logarithms. The lengths are read on the device, which
decides how many splits of the grid a row uses; the grid follows from the number of rows and the host's bound of the
lengths alone, so that one captured call serves every length below the bound.

Programs without work come last: between the others they would leave some multiprocessors with twice the work of most.
With `live_rows` the device also reads how many rows there are, and the programs of a fixed grid share out the splits of
as many as that.
"""

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
    wait_for_inputs,
)
from qwen_engine.kernels.gpu.launching import Kernel

_MIN_DOT_ROWS = 16  # smallest side of a tl.dot
# Many small programs keep more loads in flight than few large ones and even out rows of different lengths: one warp
# and tiles of 4 KB (a 16-token page of head size 128 in bf16) of K and of V.
_TILE_BYTES = 4096
_PROGRAMS_PER_SM = 4
_MAX_SPLITS = tl.constexpr(128)
_MAX_PROGRAMS = 16384
_LIVE_PROGRAMS = 4096  # splits of all KV heads of all rows, where the device reads how many live
_COMBINED_AT_ONCE = tl.constexpr(16)
_MIN_SPLIT_TOKENS = tl.constexpr(32)
_MAX_SPLIT_TOKENS = tl.constexpr(2048)


@triton.jit
def _tokens_per_split(seq_len, fill, num_splits, BLOCK_N: tl.constexpr):
    """Tokens each used split of a row takes, a multiple of BLOCK_N: `fill` splits, more so that none is too long, fewer
    so that none is too short."""
    wanted = tl.maximum(fill, tl.cdiv(seq_len, _MAX_SPLIT_TOKENS))
    used = tl.minimum(tl.minimum(wanted, tl.cdiv(seq_len, _MIN_SPLIT_TOKENS)), num_splits)
    return tl.cdiv(tl.cdiv(seq_len, tl.maximum(used, 1)), BLOCK_N) * BLOCK_N


@triton.jit
def _shared_out(fill, num_splits, live_rows, num_kv_heads, LIVE: tl.constexpr):
    """(splits per row that keep the device busy, room for splits per row, live rows). With LIVE the first two come as
    what all KV heads of all live rows share; without, the number of rows is of no interest."""
    num_live = 1
    if LIVE:
        num_live = tl.maximum(tl.load(live_rows), 1)
        num_splits = tl.minimum(tl.maximum(num_splits // (num_live * num_kv_heads), 1), _MAX_SPLITS)
        fill = tl.minimum(tl.maximum(fill // (num_live * num_kv_heads), 1), num_splits)
    return fill, num_splits, num_live


@Kernel
@triton.jit(do_not_specialize=["fill", "num_splits"])
def _split_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    slots,
    seq_lens,
    live_rows,
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
    fill,
    num_splits,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    LIVE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    fill, num_splits, num_live = _shared_out(fill, num_splits, live_rows, num_kv_heads, LIVE)
    if LIVE:
        kv_head = tl.program_id(0) % num_kv_heads
        row = tl.program_id(0) // num_kv_heads % num_live
        split = tl.program_id(0) // num_kv_heads // num_live
    else:
        kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row.to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    seq_len = tl.where((slot < 0) | (split >= num_splits), 0, seq_len)
    wait_for_inputs(PDL)
    span = _tokens_per_split(seq_len, fill, num_splits, BLOCK_N)
    start = split * span
    end = tl.minimum(start + span, seq_len)

    member = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + member
    in_group = member < GROUP
    num_heads = num_kv_heads * GROUP
    if ONE_SPLIT:
        target = out + row * out_stride_row + head[:, None] * out_stride_head + dims[None, :]
    else:
        partial = (row * num_heads + head) * num_splits + split
        target = partial_out + partial[:, None] * HEAD_DIM + dims[None, :]
    if start >= end:
        if ONE_SPLIT:
            tl.store(target, tl.zeros([BLOCK_M, HEAD_DIM], out.dtype.element_ty), mask=in_group[:, None])
        return

    query = tl.load(
        q + row * q_stride_row + head[:, None] * q_stride_head + dims[None, :], mask=in_group[:, None], other=0.0
    ).to(DOT_DTYPE)
    table = block_tables + slot * table_stride
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
    tl.store(target, mean.to(target.dtype.element_ty), mask=in_group[:, None])
    if not ONE_SPLIT:
        tl.store(partial_lse + partial, peak + tl.log2(total), mask=in_group)


@Kernel
@triton.jit(do_not_specialize=["fill", "num_splits"])
def _combine_kernel(
    partial_out,
    partial_lse,
    slots,
    seq_lens,
    live_rows,
    out,
    out_stride_row,
    out_stride_head,
    fill,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(0)
    fill, num_splits, num_live = _shared_out(fill, num_splits, live_rows, num_heads // GROUP, LIVE)
    slot = tl.load(slots + row)
    seq_len = tl.where(slot < 0, 0, tl.load(seq_lens + row))
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if LIVE:  # noqa: SIM102 (known when compiled, the other is not)
        if row >= num_live:
            return
    dims = tl.arange(0, HEAD_DIM)
    target = out + row * out_stride_row + head * out_stride_head + dims
    # A split past the row's end left nothing; in a padding row all are.
    span = _tokens_per_split(seq_len, fill, num_splits, BLOCK_N)
    used = tl.cdiv(seq_len, tl.maximum(span, 1))
    partial = (row * num_heads + head) * num_splits
    splits = tl.arange(0, _MAX_SPLITS)
    peak = tl.max(tl.load(partial_lse + partial + splits, mask=splits < used, other=float("-inf")), 0)
    total = 0.0
    result = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(0, used, _COMBINED_AT_ONCE):
        split = first + tl.arange(0, _COMBINED_AT_ONCE)
        live = split < used
        weights = tl.exp2(tl.load(partial_lse + partial + split, mask=live, other=float("-inf")) - peak)
        offsets = (partial + split)[:, None] * HEAD_DIM + dims[None, :]
        means = tl.load(partial_out + offsets, mask=live[:, None], other=0.0)
        total += tl.sum(weights, 0)
        result += tl.sum(means * weights[:, None], 0)
    result = result / tl.where(total > 0, total, 1.0)
    tl.store(target, result.to(out.dtype.element_ty))


def splits_to_fill(rows: int, num_kv_heads: int, sms: int) -> int:
    """Splits per row and KV head that keep the device busy."""
    return max(1, min(round(_PROGRAMS_PER_SM * sms / max(rows * num_kv_heads, 1)), _MAX_SPLITS.value))


def choose_num_splits(fill: int, max_seq_len: int, items: int) -> int:
    """Splits of the grid, for `items` = rows times KV heads: as many as fill the device, and enough that a row of
    max_seq_len tokens does not outlast the others by much, as long as programs without work cost little."""
    wanted = max(fill, min(cdiv(max_seq_len, _MAX_SPLIT_TOKENS.value), _MAX_PROGRAMS // max(items, 1)))
    return max(1, min(wanted, cdiv(max_seq_len, _MIN_SPLIT_TOKENS.value), _MAX_SPLITS.value))


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    *,
    live_rows: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    out = torch.empty((rows, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    row_bytes = head_dim * q.element_size()
    block_n = max(_MIN_DOT_ROWS, _TILE_BYTES // row_bytes)
    is_live = live_rows is not None
    if is_live:
        num_splits = max(_LIVE_PROGRAMS, rows * num_kv_heads)
        fill = _PROGRAMS_PER_SM * num_sms(q.device)
        grid, num_partials = (num_splits,), num_splits * group
    else:
        fill = splits_to_fill(rows, num_kv_heads, num_sms(q.device)) if num_splits is None else num_splits
        if num_splits is None:
            num_splits = choose_num_splits(fill, max_seq_len, rows * num_kv_heads)
        grid = (num_kv_heads, rows, num_splits)
        num_partials = rows * num_heads * num_splits if num_splits > 1 else 0
    partial_out = torch.empty(num_partials, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(num_partials, dtype=torch.float32, device=q.device)
    _split_kernel[grid](
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        seq_lens,
        live_rows if is_live else slots,
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
        fill,
        num_splits,
        num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(_MIN_DOT_ROWS, next_power_of_2(group)),
        BLOCK_N=block_n,
        ONE_SPLIT=num_splits == 1,
        LIVE=is_live,
        DOT_DTYPE=dot_dtype(q.dtype),
        WIDE=needs_wide_offsets(k_cache),
        num_warps=max(1, row_bytes // 256),
        num_stages=6,
        **pdl_options(q.device),
    )
    if num_splits > 1:
        _combine_kernel[(num_heads, rows)](
            partial_out,
            partial_lse,
            slots,
            seq_lens,
            live_rows if is_live else slots,
            out,
            out.stride(0),
            out.stride(1),
            fill,
            num_splits,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_N=block_n,
            LIVE=is_live,
            num_warps=4,
            **pdl_options(q.device),
        )
    return out
