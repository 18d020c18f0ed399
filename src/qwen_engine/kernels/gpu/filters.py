"""What sampling does to a row of logits before the draw: penalties, and the limit of top-k, top-p and min-p.

The limit is searched for, not sorted for. A logit's distance below the row's largest one is a float of at least zero,
so its bits grow with it; each pass over the row cuts the range of bits that holds the limit into _BOUNDS parts. The
search ends when one logit is left between the bounds, at the latest after 31 / log2(_BOUNDS) passes.
"""

import torch
import triton
import triton.language as tl

from qwen_engine.request import GREEDY_TEMPERATURE

_PENALTY_CHUNK = 2048
_LIMIT_CHUNK = 2048
_BOUNDS = 8
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _penalise_kernel(
    logits,
    slots,
    output_counts,
    in_prompt,
    presence,
    frequency,
    repetition,
    logits_stride,
    table_stride,
    vocab_size,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab_size
    count = tl.load(output_counts + slot * table_stride + column, mask=inside, other=0)
    prompt = tl.load(in_prompt + slot * table_stride + column, mask=inside, other=0)
    seen = (count > 0) | (prompt.to(tl.int32) > 0)
    if tl.max(seen.to(tl.int32), 0) > 0:
        factor = tl.load(repetition + row)
        x = tl.load(logits + row * logits_stride + column, mask=seen, other=0.0)
        x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
        x -= tl.load(frequency + row) * count.to(tl.float32) + tl.where(count > 0, tl.load(presence + row), 0.0)
        tl.store(logits + row * logits_stride + column, x, mask=seen)


def penalise(
    logits: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    rows, vocab_size = logits.shape
    _penalise_kernel[(rows, triton.cdiv(vocab_size, _PENALTY_CHUNK))](
        logits,
        slots,
        output_counts,
        in_prompt,
        presence,
        frequency,
        repetition,
        logits.stride(0),
        output_counts.stride(0),
        vocab_size,
        CHUNK=_PENALTY_CHUNK,
        num_warps=4,
    )


@triton.jit
def _scaled(logits_row, first, vocab_size, factor, CHUNK: tl.constexpr):
    column = first + tl.arange(0, CHUNK)
    x = tl.load(logits_row + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32) * factor
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _measure(logits_row, vocab_size, factor, peak, bounds, CHUNK: tl.constexpr, BOUNDS: tl.constexpr):
    """How many logits lie less than each bound (in bits of the distance) below the peak, and the sum of their
    exponentials relative to the peak; fp32 [BOUNDS] each."""
    counts = tl.zeros([CHUNK, BOUNDS], tl.float32)
    masses = tl.zeros([CHUNK, BOUNDS], tl.float32)
    for first in range(0, vocab_size, CHUNK):
        distance = peak - _scaled(logits_row, first, vocab_size, factor, CHUNK)
        below = distance.to(tl.int32, bitcast=True)[:, None] < bounds[None, :]
        counts += tl.where(below, 1.0, 0.0)
        masses += tl.where(below, tl.exp(-distance)[:, None], 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _lowest_kept_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    lowest,
    logits_stride,
    vocab_size,
    GREEDY_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * logits_stride
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row).to(tl.float32)
    p = tl.load(top_p + row)
    share = tl.load(min_p + row)
    if (heat <= GREEDY_TEMPERATURE) | ((k >= vocab_size) & (p >= 1) & (share <= 0)):
        tl.store(lowest + row, float("-inf"))
        return
    factor = tl.div_rn(1.0, heat)
    peaks = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(0, vocab_size, CHUNK):
        peaks = tl.maximum(peaks, _scaled(logits_row, first, vocab_size, factor, CHUNK))
    peak = tl.max(peaks, 0)
    if peak == float("-inf"):
        tl.store(lowest + row, float("-inf"))
        return

    index = tl.arange(0, BOUNDS)
    # Kept is what has fewer bits than `high`; min_p is a distance already.
    high = tl.full([], _INFINITY_BITS, tl.int32)
    if share > 0:
        high = tl.minimum(high, (0.0 - tl.log(share)).to(tl.int32, bitcast=True) + 1)
    counts, masses = _measure(logits_row, vocab_size, factor, peak, tl.zeros([BOUNDS], tl.int32) + high, CHUNK, BOUNDS)
    count, mass = tl.max(counts, 0), tl.max(masses, 0)
    for stage in tl.static_range(2):  # first top_k in logits, then top_p in probability mass of what top_k left
        target = k if stage == 0 else p * mass
        active = k < count if stage == 0 else p < 1
        if active:
            low = tl.zeros([], tl.int32)
            count_low = tl.zeros([], tl.float32)
            while (high - low > 1) & (count - count_low > 1):
                step = (high - low + BOUNDS - 1) // BOUNDS
                bounds = tl.minimum(low + (index + 1) * step, high)
                counts, masses = _measure(logits_row, vocab_size, factor, peak, bounds, CHUNK, BOUNDS)
                values = counts if stage == 0 else masses
                short = (values < target) & (bounds < high)
                new_low = tl.max(tl.where(short, bounds, low), 0)
                new_high = tl.min(tl.where(short, high, bounds), 0)
                count_low = tl.maximum(count_low, tl.max(tl.where(short, counts, 0.0), 0))
                is_high = bounds == new_high
                count = tl.max(tl.where(is_high, counts, 0.0), 0)
                mass_high = tl.max(tl.where(is_high, masses, 0.0), 0)
                if stage == 0:
                    mass = mass_high
                low, high = new_low, new_high
            if stage == 0:
                # Equal logits share the last ranks: all of them are kept, but only k count for top_p.
                mass -= (count - k) * tl.exp(-low.to(tl.float32, bitcast=True))
    kept = tl.full([CHUNK], float("inf"), tl.float32)
    for first in range(0, vocab_size, CHUNK):
        x = _scaled(logits_row, first, vocab_size, factor, CHUNK)
        kept = tl.minimum(kept, tl.where((peak - x).to(tl.int32, bitcast=True) < high, x, float("inf")))
    tl.store(lowest + row, tl.min(kept, 0))


def lowest_kept(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    rows, vocab_size = logits.shape
    lowest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _lowest_kept_kernel[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        lowest,
        logits.stride(0),
        vocab_size,
        GREEDY_TEMPERATURE=GREEDY_TEMPERATURE,
        CHUNK=min(_LIMIT_CHUNK, triton.next_power_of_2(vocab_size)),
        BOUNDS=_BOUNDS,
        num_warps=16,
    )
    return lowest
