"""Split-KV decode attention.

Stage 1: one program per (row, KV head, split) walks its share of the row's pages with all query heads of the KV head in
one dot, by online softmax, and leaves its softmax-weighted mean of V and the base-2 logarithm of its softmax
denominator. Stage 2 weighs the partials of a (row, head) by those logarithms. The lengths are read on the device, which
decides how many splits of the grid a row uses; the grid follows from the number of rows and the host's bound of the
lengths alone, so that one captured call serves every length below the bound, and with `live_rows` every number of rows.
"""

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import (
    LOG2_E,
    cache_rows,
    dot_dtype,
    let_next_start,
    needs_wide_offsets,
    num_sms,
    pdl_options,
    wait_for_inputs,
)

_MIN_DOT_ROWS = 16  # smallest side of a tl.dot
# Many small programs keep more loads in flight than few large ones and even out rows of different lengths: one warp
# and tiles of 4 KB (a 16-token page of head size 128 in bf16) of K and of V.
_TILE_BYTES = 4096
_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 128
_MAX_PROGRAMS = 16384
_MAX_SPARE_PROGRAMS = 4096  # grid of a call in which few rows may be live
_SPARE_SPLIT_TOKENS = 512
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
def _fill_of(fill, live_rows, LIVE: tl.constexpr):
    """Splits per row that keep the device busy. With LIVE, `fill` is those that all live rows share."""
    if LIVE:
        fill = tl.maximum(fill // tl.maximum(tl.load(live_rows), 1), 1)
    return fill


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
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    seq_len = tl.where(slot < 0, 0, seq_len)
    fill = _fill_of(fill, live_rows, LIVE)
    wait_for_inputs(PDL)
    span = _tokens_per_split(seq_len, fill, num_splits, BLOCK_N)
    start = split * span
    end = tl.minimum(start + span, seq_len)

    member = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + member
    in_group = member < GROUP
    num_heads = tl.num_programs(1) * GROUP
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
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    partial = (row * tl.num_programs(0) + head) * num_splits + splits
    seq_len = tl.where(tl.load(slots + row) < 0, 0, tl.load(seq_lens + row))
    fill = _fill_of(fill, live_rows, LIVE)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    # A split past the row's end left nothing; in a padding row all are, the sums are 0 and so is the result.
    used = splits * _tokens_per_split(seq_len, fill, num_splits, BLOCK_N) < seq_len
    lse = tl.load(partial_lse + partial, mask=used, other=float("-inf"))
    weights = tl.exp2(lse - tl.maximum(tl.max(lse, 0), -1e30))
    means = tl.load(partial_out + partial[:, None] * HEAD_DIM + dims[None, :], mask=used[:, None], other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(means * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_stride_row + head * out_stride_head + dims, result.to(out.dtype.element_ty))


def splits_to_fill(rows: int, num_kv_heads: int, sms: int) -> int:
    """Splits per row and KV head that keep the device busy."""
    return max(1, min(round(_PROGRAMS_PER_SM * sms / max(rows * num_kv_heads, 1)), _MAX_SPLITS))


def choose_num_splits(fill: int, max_seq_len: int, items: int, *, few_may_live: bool = False) -> int:
    """Splits of the grid, for `items` = rows times KV heads: as many as fill the device, and enough that a row of
    max_seq_len tokens does not outlast the others by much, as long as programs without work cost little."""
    items = max(items, 1)
    wanted = max(fill, min(triton.cdiv(max_seq_len, _MAX_SPLIT_TOKENS.value), _MAX_PROGRAMS // items))
    if few_may_live:
        wanted = max(wanted, min(triton.cdiv(max_seq_len, _SPARE_SPLIT_TOKENS), _MAX_SPARE_PROGRAMS // items))
    return max(1, min(wanted, triton.cdiv(max_seq_len, _MIN_SPLIT_TOKENS.value), _MAX_SPLITS))


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
    fill = splits_to_fill(rows, num_kv_heads, num_sms(q.device)) if num_splits is None else num_splits
    if num_splits is None:
        num_splits = choose_num_splits(fill, max_seq_len, rows * num_kv_heads, few_may_live=is_live)
    if is_live:
        fill = splits_to_fill(1, num_kv_heads, num_sms(q.device))
    partial_shape = (rows, num_heads, num_splits if num_splits > 1 else 0)
    partial_out = torch.empty((*partial_shape, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(partial_shape, dtype=torch.float32, device=q.device)
    _split_kernel[(num_splits, num_kv_heads, rows)](
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
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
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
            HEAD_DIM=head_dim,
            SPLITS=triton.next_power_of_2(num_splits),
            BLOCK_N=block_n,
            LIVE=is_live,
            num_warps=4,
            **pdl_options(q.device),
        )
    return out
