"""What sampling does to a row of logits before the draw: masks, bias, penalties, and the limit of top-k, top-p, min-p.

The limit is searched for, not sorted for. A logit's distance below the row's largest one is a float of at least zero,
so its bits, read as an integer, grow with it; bounds are such bits. Rows are cut into chunks, and a few launches, whose
number depends on nothing, close in on the limit:

    survey    per chunk: the largest logits
    propose   per row: the peak and the first bounds
    measure   per chunk: how many logits are nearer to the peak than each bound, and their mass
    narrow    per row: the two bounds that enclose the limit, between which the next measure goes on
    collect   per chunk: the logits between the last two bounds, the candidates
    finish    per row: the search among the candidates, or in the whole row when they are too many

Measure and narrow come _PASSES times, and have nothing to do in rows whose candidates are few already. Every sum is
taken in a fixed order, so that a row has the same result in any batch.
"""

import torch
import triton
import triton.language as tl

from qwen_engine.kernels.gpu.common import cdiv, next_power_of_2
from qwen_engine.kernels.gpu.launching import Kernel
from qwen_engine.request import GREEDY_TEMPERATURE

_ADJUST_CHUNK = 1024
# A row is cut into chunks, one program each. Their size must not depend on the batch: it sets the order of the sums.
_CHUNK = 4096
_GROUPS = 32  # a chunk's logits fall into this many groups, whose maxima bound the k-th largest logit
_BOUNDS = 8
_PASSES = 3  # 7 parts each: the worst of usual rows, flat ones with top-p, end with about V / 343 candidates
_CANDIDATES = 4096
# What is known of a row's limit, explained at `_narrow_kernel`: int32 words, floats as their bits.
_STATE = 16
_LOW, _HIGH, _LOWER, _UPPER = (tl.constexpr(word) for word in range(4))
_SIZE, _BEFORE, _TARGET = (tl.constexpr(word) for word in range(4, 7))
_SPAN = tl.constexpr(8)  # and as many words as there are bounds
_UNKNOWN = tl.constexpr(2**31 - 1)  # number of candidates before the first pass
_TILE = 1024  # what the one program of a row takes at a time
# Rows of tables, aligned or not as the batch will have it.
_PARAMETERS = ["temperature", "top_k", "top_p", "min_p"]
_INFINITY_BITS = tl.constexpr(0x7F800000)


@Kernel
@triton.jit(
    do_not_specialize=["has_masks", "has_biases", "has_penalties", "mask_stride", "factor_stride"],
    do_not_specialize_on_alignment=["mask_of_slot", "mask_bits", "has_bias", "factors"],
)
def _adjust_kernel(
    logits,
    slots,
    mask_of_slot,
    mask_bits,
    has_bias,
    bias,
    output_counts,
    in_prompt,
    factors,
    out,
    logits_stride,
    mask_stride,
    factor_stride,
    vocab_size,
    has_masks,
    has_biases,
    has_penalties,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab_size
    slot = tl.load(slots + row)
    live = slot >= 0
    mask = tl.load(mask_of_slot + slot, mask=live & (has_masks != 0), other=-1)
    biased = tl.load(has_bias + slot, mask=live & (has_biases != 0), other=0) != 0
    penalised = live & (has_penalties != 0)
    once = tl.load(factors + slot, mask=penalised, other=0.0)
    each = tl.load(factors + factor_stride + slot, mask=penalised, other=0.0)
    factor = tl.load(factors + 2 * factor_stride + slot, mask=penalised, other=1.0)
    # Of a table that a row does not need it reads no column. All loads come before the first use, so that they overlap.
    table = slot * vocab_size + column
    x = tl.load(logits + row * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
    words = tl.load(
        mask_bits + mask.to(tl.int64) * mask_stride + column // 32,
        mask=column < tl.where(mask >= 0, vocab_size, 0),
        other=-1,
    )
    shift = tl.load(bias + table, mask=column < tl.where(biased, vocab_size, 0), other=0.0)
    counted = (once != 0) | (each != 0) | (factor != 1)
    count = tl.load(output_counts + table, mask=column < tl.where(counted, vocab_size, 0), other=0)
    prompt = tl.load(in_prompt + table, mask=column < tl.where(factor != 1, vocab_size, 0), other=0)

    x = tl.where(((words >> (column % 32)) & 1) != 0, x, float("-inf"))
    x = tl.where(biased, x + shift, x)  # adding 0.0 to -0.0 would change it
    if factor != 1:
        seen = (count > 0) | (prompt != 0)
        if tl.max(seen.to(tl.int32), 0) > 0:
            x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor), x)
    x -= each * count.to(tl.float32) + tl.where(count > 0, once, 0.0)
    tl.store(out + row * vocab_size + column, x, mask=inside)


def adjust_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    *,
    masks: tuple[torch.Tensor, torch.Tensor] | None = None,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty((rows, vocab_size), dtype=torch.float32, device=logits.device)
    # What is not there is not read: any tensor of the dtype stands for it, and one kernel serves all.
    words, flags = slots.view(torch.int32), slots.view(torch.uint8)
    mask_of_slot, mask_bits = masks or (words, words)
    has_bias, bias = biases or (slots, out)
    output_counts, in_prompt, factors = penalties or (words, flags, out)
    _adjust_kernel[(rows, cdiv(vocab_size, _ADJUST_CHUNK))](
        logits,
        slots,
        mask_of_slot,
        mask_bits,
        has_bias,
        bias,
        output_counts,
        in_prompt.view(torch.uint8),
        factors,
        out,
        logits.stride(0),
        mask_bits.stride(0),
        factors.stride(0),
        vocab_size,
        int(masks is not None),
        int(biases is not None),
        int(penalties is not None),
        CHUNK=_ADJUST_CHUNK,
        num_warps=4,
    )
    return out


@triton.jit
def _is_limited(temperature, top_k, top_p, min_p, row, vocab_size, GREEDY_TEMPERATURE: tl.constexpr):
    limited = (tl.load(top_k + row) < vocab_size) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)
    return limited & (tl.load(temperature + row) > GREEDY_TEMPERATURE)


@triton.jit
def _scale(logits, factor):
    x = logits.to(tl.float32) * factor
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _scaled(source, first, size, factor, TILE: tl.constexpr):
    """Scaled logits [TILE] from `first` on, -inf past `size`."""
    column = first + tl.arange(0, TILE)
    return _scale(tl.load(source + column, mask=column < size, other=float("-inf")), factor)


@triton.jit
def _distances(source, first, size, factor, peak, TILE: tl.constexpr):
    """Distances below the peak and their bits, [TILE] each."""
    distance = peak - _scaled(source, first, size, factor, TILE)
    return distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _nearer(source, size, factor, peak, bound, TILE: tl.constexpr):
    """How many of the `size` logits are nearer to the peak than the bound, and their mass: sum of exp(-distance)."""
    counts = tl.zeros([TILE], tl.float32)
    masses = tl.zeros([TILE], tl.float32)
    for first in range(0, size, TILE):
        distance, bits = _distances(source, first, size, factor, peak, TILE)
        counts += tl.where(bits < bound, 1.0, 0.0)
        masses += tl.where(bits < bound, tl.exp(-distance), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _tightened(source, size, factor, peak, low, high, TILE: tl.constexpr):
    """[low, high) cut down to the logits in it; high <= low when there are none, with what is below high unchanged."""
    nearest = tl.zeros([TILE], tl.int32) + high
    furthest = tl.full([TILE], -1, tl.int32)
    for first in range(0, size, TILE):
        _, bits = _distances(source, first, size, factor, peak, TILE)
        nearest = tl.minimum(nearest, tl.where(bits >= low, bits, high))
        furthest = tl.maximum(furthest, tl.where(bits < high, bits, -1))
    return tl.min(nearest, 0), tl.max(furthest, 0) + 1


@triton.jit
def _search(
    source,
    size,
    factor,
    peak,
    low,
    high,
    before,
    target,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """Bits [low, low + 1) of the distance with which count or mass reaches the target.

    It is one in [low, high) of the `size` logits, all of which together are known to reach it. `before`: count or mass
    of nearer logits that are not among them.
    """
    lane = tl.arange(0, BOUNDS)
    low, high = _tightened(source, size, factor, peak, low, high, TILE)
    while high - low > 1:
        near, far = low.to(tl.float32, bitcast=True), (high - 1).to(tl.float32, bitcast=True)
        inner = (near + (far - near) * ((lane + 1) / BOUNDS)).to(tl.int32, bitcast=True)
        bounds = tl.where(lane < BOUNDS - 1, tl.minimum(tl.maximum(inner, low + 1), high), high)
        sums = tl.zeros([BOUNDS, TILE], tl.float32)
        for first in range(0, size, TILE):
            distance, bits = _distances(source, first, size, factor, peak, TILE)
            if BY_MASS:
                weight = tl.exp(-distance)
            else:
                weight = tl.full([TILE], 1.0, tl.float32)
            sums += tl.where(bits[None, :] < bounds[:, None], weight[None, :], 0.0)
        short = (before + tl.sum(sums, 1) < target) & (lane < BOUNDS - 1)
        low, high = tl.max(tl.where(short, bounds, low), 0), tl.min(tl.where(short, high, bounds), 0)
        low, high = _tightened(source, size, factor, peak, low, high, TILE)
    return low, high


@triton.jit
def _set_span(state, low, reach, high, BOUNDS: tl.constexpr):
    """Note the bounds of the next pass: the first is low, the last high, those between share out [low, reach) evenly.

    They are computed once and read by all that need them: computed twice they could differ in their last bits.
    """
    lane = tl.arange(0, BOUNDS)
    near = low.to(tl.float32, bitcast=True)
    inner = (near + (reach - near) * (lane / (BOUNDS - 1))).to(tl.int32, bitcast=True)
    inner = tl.minimum(tl.maximum(inner, low), high)
    bounds = tl.where(lane == 0, low, tl.where(lane == BOUNDS - 1, high, inner))
    tl.store(state + _LOW, low)
    tl.store(state + _HIGH, high)
    tl.store(state + _SPAN + lane, bounds)


@triton.jit
def _pick(values, lane, index):
    return tl.sum(tl.where(lane == index, values, 0), 0)


@Kernel
@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _survey_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    logits_stride,
    vocab_size,
    GREEDY_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _is_limited(temperature, top_k, top_p, min_p, row, vocab_size, GREEDY_TEMPERATURE):
        factor = tl.div_rn(1.0, tl.load(temperature + row))
        x = _scaled(logits + row * logits_stride, chunk * CHUNK, vocab_size, factor, CHUNK)
        # Neighbours fall into different groups, for large logits may lie side by side.
        largest = tl.max(tl.reshape(x, [CHUNK // GROUPS, GROUPS]), 0)
        tl.store(maxima + (row * tl.num_programs(1) + chunk) * GROUPS + tl.arange(0, GROUPS), largest)


@Kernel
@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _propose_kernel(
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    peaks,
    states,
    lowest,
    groups,
    vocab_size,
    GREEDY_TEMPERATURE: tl.constexpr,
    TILE: tl.constexpr,
    BOUNDS: tl.constexpr,
    STATE: tl.constexpr,
):
    """Peak and first bounds of each row; -1 candidates where everything stays."""
    row = tl.program_id(0).to(tl.int64)
    state = states + row * STATE
    tl.store(lowest + row, float("-inf"))
    peak = float("-inf")
    maxima_row = maxima + row * groups
    if _is_limited(temperature, top_k, top_p, min_p, row, vocab_size, GREEDY_TEMPERATURE):
        largest = tl.full([TILE], float("-inf"), tl.float32)
        for first in range(0, groups, TILE):
            largest = tl.maximum(largest, _scaled(maxima_row, first, groups, 1.0, TILE))
        peak = tl.max(largest, 0)
    if peak == float("-inf"):
        tl.store(state + _SIZE, -1)
        return

    k, p, share = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    low = tl.zeros([], tl.int32)
    high = tl.full([], _INFINITY_BITS, tl.int32)
    if share > 0:
        high = tl.minimum(high, (0.0 - tl.log(share)).to(tl.int32, bitcast=True) + 1)
    reach = (high - 1).to(tl.float32, bitcast=True)
    if k < vocab_size:
        within, _mass = _nearer(maxima_row, groups, 1.0, peak, high, TILE)
        if within >= k:
            # As many logits as groups, and maybe more, are at least as large as the k-th largest maximum.
            _last, high = _search(maxima_row, groups, 1.0, peak, low, high, 0.0, k.to(tl.float32), False, TILE, BOUNDS)
            reach = (high - 1).to(tl.float32, bitcast=True)
        else:
            _last, end = _tightened(maxima_row, groups, 1.0, peak, low, high, TILE)
            reach = tl.minimum(reach, 2 * (end - 1).to(tl.float32, bitcast=True))
    elif p < 1:
        # The whole mass is at least the peak's own, 1: less than 1 - p of it is further away than this.
        reach = tl.minimum(reach, tl.log(vocab_size / (1 - p)))
    tl.store(peaks + row, peak)
    _set_span(state, low, reach, high, BOUNDS)
    tl.store(state + _SIZE, _UNKNOWN)


@Kernel
@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _measure_kernel(
    logits,
    temperature,
    peaks,
    maxima,
    states,
    counts,
    masses,
    logits_stride,
    vocab_size,
    CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    BOUNDS: tl.constexpr,
    STATE: tl.constexpr,
):
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    state = states + row * STATE
    if tl.load(state + _SIZE) <= CANDIDATES:
        return
    high = tl.load(state + _HIGH)
    peak = tl.load(peaks + row)
    cell = (row * chunks + chunk) * BOUNDS
    nearest = peak - tl.max(tl.load(maxima + (row * chunks + chunk) * GROUPS + tl.arange(0, GROUPS)), 0)
    if nearest.to(tl.int32, bitcast=True) < high:
        factor = tl.div_rn(1.0, tl.load(temperature + row))
        distance = peak - _scaled(logits + row * logits_stride, chunk * CHUNK, vocab_size, factor, CHUNK)
        weight = tl.exp(-distance)
        for index in tl.static_range(BOUNDS):
            bound = tl.load(state + _SPAN + index).to(tl.float32, bitcast=True)
            nearer = tl.where(distance < bound, 1.0, 0.0)
            tl.store(counts + cell + index, tl.sum(nearer, 0).to(tl.int32))
            tl.store(masses + cell + index, tl.sum(nearer * weight, 0))
    else:
        lane = tl.arange(0, BOUNDS)
        tl.store(counts + cell + lane, tl.zeros([BOUNDS], tl.int32))
        tl.store(masses + cell + lane, tl.zeros([BOUNDS], tl.float32))


@Kernel
@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _narrow_kernel(
    top_k,
    top_p,
    states,
    counts,
    masses,
    chunks,
    vocab_size,
    FIRST: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BOUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STATE: tl.constexpr,
):
    """Replace the state of each row by what the pass has found.

    low, high, span    bounds around the candidates, and those of the next pass, see `_set_span`
    lower, upper       which of the pass's bounds low and high were
    size               number of candidates
    before             count, or mass in rows with top-p alone, of the logits nearer than low
    target             rank, or such mass, that the search is for; set by the first pass
    """
    row = tl.program_id(0).to(tl.int64)
    state = states + row * STATE
    if tl.load(state + _SIZE) <= CANDIDATES:
        return
    lane = tl.arange(0, BOUNDS)
    chunk = tl.arange(0, CHUNKS)
    table = (row * chunks + chunk)[:, None] * BOUNDS + lane[None, :]
    inside = (chunk < chunks)[:, None]
    count = tl.sum(tl.load(counts + table, mask=inside, other=0), 0)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    values = count.to(tl.float32)
    if (k >= vocab_size) & (p < 1):
        values = tl.sum(tl.load(masses + table, mask=inside, other=0.0), 0)
    if FIRST:
        # The last bound is where min_p ends, or a distance within which there are k logits.
        whole = _pick(values, lane, BOUNDS - 1)
        target = tl.where(k < vocab_size, tl.minimum(k.to(tl.float32), whole), whole)
        if (k >= vocab_size) & (p < 1):
            target = p * whole
        tl.store(state + _TARGET, target.to(tl.int32, bitcast=True))
    else:
        target = tl.load(state + _TARGET).to(tl.float32, bitcast=True)
    lower = tl.max(tl.where((values < target) & (lane < BOUNDS - 1), lane, 0), 0)
    upper = lower + 1
    if (k < vocab_size) & (p < 1):
        lower = tl.zeros([], tl.int32)  # top_p will be a share of all that top_k leaves
    bounds = tl.load(state + _SPAN + lane)
    low, high = _pick(bounds, lane, lower), _pick(bounds, lane, upper)
    reach = high.to(tl.float32, bitcast=True)
    if high == _INFINITY_BITS:
        # The first pass kept the last seventh of its reach, and what is beyond, for the last bound.
        reach = 1.25 * low.to(tl.float32, bitcast=True) + 1
    _set_span(state, low, reach, high, BOUNDS)
    tl.store(state + _LOWER, lower)
    tl.store(state + _UPPER, upper)
    tl.store(state + _SIZE, _pick(count, lane, upper) - _pick(count, lane, lower))
    tl.store(state + _BEFORE, _pick(values, lane, lower).to(tl.int32, bitcast=True))


@Kernel
@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _collect_kernel(
    logits,
    temperature,
    peaks,
    states,
    counts,
    candidates,
    logits_stride,
    vocab_size,
    CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
    BOUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STATE: tl.constexpr,
):
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    state = states + row * STATE
    size = tl.load(state + _SIZE)
    if (size <= 0) | (size > CANDIDATES):
        return
    lower, upper = tl.load(state + _LOWER), tl.load(state + _UPPER)
    others = tl.arange(0, CHUNKS)
    cell = (row * chunks + others) * BOUNDS
    inside = others <= chunk
    found = tl.load(counts + cell + upper, mask=inside, other=0) - tl.load(counts + cell + lower, mask=inside, other=0)
    if tl.sum(tl.where(others == chunk, found, 0), 0) == 0:
        return
    start = tl.sum(tl.where(others < chunk, found, 0), 0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * logits_stride + column, mask=column < vocab_size, other=float("-inf"))
    distance = tl.load(peaks + row) - _scale(values, tl.div_rn(1.0, tl.load(temperature + row)))
    bits = distance.to(tl.int32, bitcast=True)
    chosen = (bits >= tl.load(state + _LOW)) & (bits < tl.load(state + _HIGH))
    place = start + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(candidates + row * CANDIDATES + place, values, mask=chosen)


@Kernel
@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _finish_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    peaks,
    states,
    candidates,
    lowest,
    logits_stride,
    vocab_size,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    BOUNDS: tl.constexpr,
    STATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    state = states + row * STATE
    size = tl.load(state + _SIZE)
    if size < 0:
        return
    low, high = tl.load(state + _LOW), tl.load(state + _HIGH)
    before, target = (
        tl.load(state + _BEFORE).to(tl.float32, bitcast=True),
        tl.load(state + _TARGET).to(tl.float32, bitcast=True),
    )
    source = candidates + row * CANDIDATES
    if size > CANDIDATES:
        source = logits + row * logits_stride
        size = vocab_size
        before = 0.0
    peak = tl.load(peaks + row)
    factor = tl.div_rn(1.0, tl.load(temperature + row))
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if (k < vocab_size) | (p >= 1):
        low, high = _search(source, size, factor, peak, low, high, before, target, False, TILE, BOUNDS)
        if p < 1:
            count, mass = _nearer(source, size, factor, peak, high, TILE)
            # Equal logits share the last ranks: all of them are kept, but only k count for top_p.
            mass -= (count - target) * tl.exp(-low.to(tl.float32, bitcast=True))
            target = p * mass
            low = tl.zeros([], tl.int32)
    if p < 1:
        low, high = _search(source, size, factor, peak, low, high, before, target, True, TILE, BOUNDS)
    kept = tl.full([TILE], float("inf"), tl.float32)
    for first in range(0, size, TILE):
        x = _scaled(source, first, size, factor, TILE)
        kept = tl.minimum(kept, tl.where((peak - x).to(tl.int32, bitcast=True) < high, x, float("inf")))
    tl.store(lowest + row, tl.min(kept, 0))


def lowest_kept(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    rows, vocab_size = logits.shape
    chunk_size = min(_CHUNK, next_power_of_2(vocab_size))
    chunks = cdiv(vocab_size, chunk_size)
    groups = min(_GROUPS, chunk_size)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    lowest, peaks, maxima = empty(rows), empty(rows), empty(rows, chunks * groups)
    states = empty(rows, _STATE, dtype=torch.int32)
    counts, masses = empty(rows, chunks, _BOUNDS, dtype=torch.int32), empty(rows, chunks, _BOUNDS)
    candidates = empty(rows, _CANDIDATES, dtype=logits.dtype)
    shape = (logits.stride(0), vocab_size)
    per_chunk = {"CHUNK": chunk_size, "num_warps": 4}
    per_row = {"TILE": _TILE, "num_warps": 8}
    search = {"BOUNDS": _BOUNDS, "STATE": _STATE}
    until = {"CANDIDATES": _CANDIDATES, **search}
    across = next_power_of_2(chunks)

    _survey_kernel[(rows, chunks)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        maxima,
        *shape,
        GREEDY_TEMPERATURE=GREEDY_TEMPERATURE,
        GROUPS=groups,
        **per_chunk,
    )
    _propose_kernel[(rows,)](
        temperature,
        top_k,
        top_p,
        min_p,
        maxima,
        peaks,
        states,
        lowest,
        chunks * groups,
        vocab_size,
        GREEDY_TEMPERATURE=GREEDY_TEMPERATURE,
        **per_row,
        **search,
    )
    for index in range(_PASSES):
        _measure_kernel[(rows, chunks)](
            logits, temperature, peaks, maxima, states, counts, masses, *shape, GROUPS=groups, **per_chunk, **until
        )
        # One warp, for with more of them one could load a state that another has replaced already.
        _narrow_kernel[(rows,)](
            top_k,
            top_p,
            states,
            counts,
            masses,
            chunks,
            vocab_size,
            FIRST=index == 0,
            CHUNKS=across,
            num_warps=1,
            **until,
        )
    _collect_kernel[(rows, chunks)](
        logits, temperature, peaks, states, counts, candidates, *shape, CHUNKS=across, **per_chunk, **until
    )
    _finish_kernel[(rows,)](
        logits, temperature, top_k, top_p, peaks, states, candidates, lowest, *shape, **per_row, **until
    )
    return lowest
