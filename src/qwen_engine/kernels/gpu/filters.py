"""What sampling does to a row of logits before the draw: penalties, and the limit of top-k, top-p and min-p.

The limit is searched for, not sorted for. A logit's distance below the row's largest one is a float of at least zero,
so its bits, read as an integer, grow with it; bounds are such bits. Rows are cut into chunks, and a few launches, whose
number depends on nothing, close in on the limit:

    survey    largest logits of every chunk
    propose   per row: the peak, and the first bounds
    measure   per chunk: how many logits are nearer to the peak than each bound, and their mass; _PASSES times, each
              between the two bounds of the pass before that enclose the limit
    collect   the logits between these two bounds: the candidates
    finish    per row: the search among the candidates, or in the whole row when they are too many

Where the candidates of a row are few already, later passes only hand its numbers on. Every sum is taken in a fixed
order, so that equal rows have equal results, alone and in any batch.
"""

import torch
import triton
import triton.language as tl

from qwen_engine.request import GREEDY_TEMPERATURE

_PENALTY_CHUNK = 2048
# A row is cut into chunks, one program each. Their size must not depend on the batch: it sets the order of the sums.
_CHUNK = 4096
_GROUPS = 32  # a chunk's logits fall into this many groups, whose maxima bound the k-th largest logit
_BOUNDS = 8
_PASSES = 3  # 7 parts each: the worst of usual rows, flat ones with top-p, end with about V / 343 candidates
_CANDIDATES = 4096
_TILE = 1024  # what the one program of a row takes at a time
_PARAMETERS = ["temperature", "top_k", "top_p", "min_p"]  # rows of tables, aligned or not as the batch will have it
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
    once, each, factor = tl.load(presence + row), tl.load(frequency + row), tl.load(repetition + row)
    # Neutral factors, those of most rows, save their work: all of it, or the look at the prompt and the division.
    if (once == 0) & (each == 0) & (factor == 1):
        return
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab_size
    count = tl.load(output_counts + slot * table_stride + column, mask=inside, other=0)
    seen = count > 0
    if factor != 1:
        seen |= tl.load(in_prompt + slot * table_stride + column, mask=inside, other=0) != 0
    if tl.max(seen.to(tl.int32), 0) > 0:
        x = tl.load(logits + row * logits_stride + column, mask=seen, other=0.0)
        if factor != 1:
            x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
        x -= each * count.to(tl.float32) + tl.where(count > 0, once, 0.0)
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
        in_prompt.view(torch.uint8),
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
def _load_span(span):
    return tl.load(span), tl.load(span + 1), tl.load(span + 2)


@triton.jit
def _store_span(span, low, reach, high):
    tl.store(span, low)
    tl.store(span + 1, reach)
    tl.store(span + 2, high)


@triton.jit
def _bound(low, reach, high, index, BOUNDS: tl.constexpr):
    """Bound number `index` of a span: the first is low, the last high, those between share out [low, reach) evenly."""
    near = low.to(tl.float32, bitcast=True)
    inner = (near + (reach.to(tl.float32, bitcast=True) - near) * (index / (BOUNDS - 1))).to(tl.int32, bitcast=True)
    inner = tl.minimum(tl.maximum(inner, low), high)
    return tl.where(index == 0, low, tl.where(index == BOUNDS - 1, high, inner))


@triton.jit
def _pick(values, lane, index):
    return tl.sum(tl.where(lane == index, values, 0), 0)


@triton.jit
def _enclosing(
    spans,
    counts,
    masses,
    first_counts,
    first_masses,
    top_k,
    top_p,
    row,
    chunks,
    vocab_size,
    BOUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """What a pass found out about its row.

    Indices (lower, upper) of the bounds around the candidates, these bounds, count and mass below the lower one, count
    of the candidates, and what the search is for: the rank, or the mass in rows with top-p alone.
    """
    lane = tl.arange(0, BOUNDS)
    chunk = tl.arange(0, CHUNKS)
    cell = row * chunks + chunk
    table = cell[:, None] * BOUNDS + lane[None, :]
    count = tl.sum(tl.load(counts + table, mask=(chunk < chunks)[:, None], other=0), 0)
    mass = tl.sum(tl.load(masses + table, mask=(chunk < chunks)[:, None], other=0.0), 0)
    # The last bound of the first pass is where min_p ends, or a distance within which there are k logits.
    last = cell * BOUNDS + BOUNDS - 1
    whole_count = tl.sum(tl.load(first_counts + last, mask=chunk < chunks, other=0), 0)
    whole_mass = tl.sum(tl.load(first_masses + last, mask=chunk < chunks, other=0.0), 0)

    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if (k >= vocab_size) & (p < 1):
        target = p * whole_mass
        values = mass
    else:
        target = tl.minimum(k, whole_count).to(tl.float32)
        values = count.to(tl.float32)
    short = (values < target) & (lane < BOUNDS - 1)
    lower = tl.max(tl.where(short, lane, 0), 0)
    upper = lower + 1
    # top_p after top_k is a share of all that top_k leaves.
    lower = tl.where((k < vocab_size) & (p < 1), 0, lower)
    low, reach, high = _load_span(spans + row * 4)
    bounds = _bound(low, reach, high, lane, BOUNDS)
    count_before = _pick(count, lane, lower)
    candidates = _pick(count, lane, upper) - count_before
    low, high = _pick(bounds, lane, lower), _pick(bounds, lane, upper)
    return lower, upper, low, high, count_before, _pick(mass, lane, lower), candidates, target


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


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _propose_kernel(
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    peaks,
    spans,
    lowest,
    groups,
    vocab_size,
    GREEDY_TEMPERATURE: tl.constexpr,
    TILE: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """Peak and first span of each row; the peak is -inf where everything stays."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(lowest + row, float("-inf"))
    if not _is_limited(temperature, top_k, top_p, min_p, row, vocab_size, GREEDY_TEMPERATURE):
        tl.store(peaks + row, float("-inf"))
        return
    maxima_row = maxima + row * groups
    largest = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, groups, TILE):
        largest = tl.maximum(largest, _scaled(maxima_row, first, groups, 1.0, TILE))
    peak = tl.max(largest, 0)
    tl.store(peaks + row, peak)

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
    _store_span(spans + row * 4, low, reach.to(tl.int32, bitcast=True), high)


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _measure_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    peaks,
    maxima,
    old_spans,
    old_counts,
    old_masses,
    first_counts,
    first_masses,
    spans,
    counts,
    masses,
    logits_stride,
    vocab_size,
    FIRST: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    BOUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    peak = tl.load(peaks + row)
    if peak == float("-inf"):
        return
    lane = tl.arange(0, BOUNDS)
    cell = (row * chunks + chunk) * BOUNDS
    low, reach, high = _load_span(old_spans + row * 4)
    if not FIRST:
        _, _, new_low, new_high, _, _, candidates, _ = _enclosing(
            old_spans,
            old_counts,
            old_masses,
            first_counts,
            first_masses,
            top_k,
            top_p,
            row,
            chunks,
            vocab_size,
            BOUNDS,
            CHUNKS,
        )
        if candidates > CANDIDATES:
            low, reach, high = new_low, new_high, new_high
            if high == _INFINITY_BITS:
                reach = (2 * low.to(tl.float32, bitcast=True) + 1).to(tl.int32, bitcast=True)
        if chunk == 0:
            _store_span(spans + row * 4, low, reach, high)
        if candidates <= CANDIDATES:
            tl.store(counts + cell + lane, tl.load(old_counts + cell + lane))
            tl.store(masses + cell + lane, tl.load(old_masses + cell + lane))
            return
    nearest = peak - tl.max(tl.load(maxima + (row * chunks + chunk) * GROUPS + tl.arange(0, GROUPS)), 0)
    if nearest.to(tl.int32, bitcast=True) < high:
        factor = tl.div_rn(1.0, tl.load(temperature + row))
        distance = peak - _scaled(logits + row * logits_stride, chunk * CHUNK, vocab_size, factor, CHUNK)
        weight = tl.exp(-distance)
        for index in tl.static_range(BOUNDS):
            bound = _bound(low, reach, high, index, BOUNDS).to(tl.float32, bitcast=True)
            nearer = tl.where(distance < bound, 1.0, 0.0)
            tl.store(counts + cell + index, tl.sum(nearer, 0).to(tl.int32))
            tl.store(masses + cell + index, tl.sum(nearer * weight, 0))
    else:
        tl.store(counts + cell + lane, tl.zeros([BOUNDS], tl.int32))
        tl.store(masses + cell + lane, tl.zeros([BOUNDS], tl.float32))


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _collect_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    peaks,
    spans,
    counts,
    masses,
    first_counts,
    first_masses,
    candidates,
    logits_stride,
    vocab_size,
    CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
    BOUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    peak = tl.load(peaks + row)
    if peak == float("-inf"):
        return
    lower, upper, low, high, _, _, size, _ = _enclosing(
        spans, counts, masses, first_counts, first_masses, top_k, top_p, row, chunks, vocab_size, BOUNDS, CHUNKS
    )
    if size > CANDIDATES:
        return
    others = tl.arange(0, CHUNKS)
    cell = (row * chunks + others) * BOUNDS
    inside = others <= chunk
    found = tl.load(counts + cell + upper, mask=inside, other=0) - tl.load(counts + cell + lower, mask=inside, other=0)
    if tl.sum(tl.where(others == chunk, found, 0), 0) == 0:
        return
    start = tl.sum(tl.where(others < chunk, found, 0), 0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * logits_stride + column, mask=column < vocab_size, other=float("-inf"))
    bits = (peak - _scale(values, tl.div_rn(1.0, tl.load(temperature + row)))).to(tl.int32, bitcast=True)
    chosen = (bits >= low) & (bits < high)
    place = start + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(candidates + row * CANDIDATES + place, values, mask=chosen)


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _finish_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    peaks,
    spans,
    counts,
    masses,
    first_counts,
    first_masses,
    candidates,
    lowest,
    logits_stride,
    chunks,
    vocab_size,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    BOUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(peaks + row)
    if peak == float("-inf"):
        return
    _, _, low, high, count_before, mass_before, size, target = _enclosing(
        spans, counts, masses, first_counts, first_masses, top_k, top_p, row, chunks, vocab_size, BOUNDS, CHUNKS
    )
    count_before = count_before.to(tl.float32)
    source = candidates + row * CANDIDATES
    if size > CANDIDATES:
        source = logits + row * logits_stride
        size = vocab_size
        count_before = 0.0
        mass_before = 0.0
    factor = tl.div_rn(1.0, tl.load(temperature + row))
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if (k < vocab_size) | (p >= 1):
        low, high = _search(source, size, factor, peak, low, high, count_before, target, False, TILE, BOUNDS)
        if p < 1:
            count, mass = _nearer(source, size, factor, peak, high, TILE)
            # Equal logits share the last ranks: all of them are kept, but only k count for top_p.
            mass -= (count - target) * tl.exp(-low.to(tl.float32, bitcast=True))
            target = p * mass
            low = tl.zeros([], tl.int32)
    if p < 1:
        low, high = _search(source, size, factor, peak, low, high, mass_before, target, True, TILE, BOUNDS)
    kept = tl.full([TILE], float("inf"), tl.float32)
    for first in range(0, size, TILE):
        x = _scaled(source, first, size, factor, TILE)
        kept = tl.minimum(kept, tl.where((peak - x).to(tl.int32, bitcast=True) < high, x, float("inf")))
    tl.store(lowest + row, tl.min(kept, 0))


def lowest_kept(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    rows, vocab_size = logits.shape
    chunk_size = min(_CHUNK, triton.next_power_of_2(vocab_size))
    chunks = triton.cdiv(vocab_size, chunk_size)
    groups = min(_GROUPS, chunk_size)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    lowest, peaks, maxima = empty(rows), empty(rows), empty(rows, chunks * groups)
    spans = empty(_PASSES, rows, 4, dtype=torch.int32)  # low, reach and high of `_bound`; 16 bytes keep rows aligned
    counts = empty(_PASSES, rows, chunks, _BOUNDS, dtype=torch.int32)
    masses = empty(_PASSES, rows, chunks, _BOUNDS)
    candidates = empty(rows, _CANDIDATES, dtype=logits.dtype)
    filters = (temperature, top_k, top_p, min_p)
    sizes = {"BOUNDS": _BOUNDS, "CHUNKS": triton.next_power_of_2(chunks), "CANDIDATES": _CANDIDATES}

    _survey_kernel[(rows, chunks)](
        logits,
        *filters,
        maxima,
        logits.stride(0),
        vocab_size,
        GREEDY_TEMPERATURE=GREEDY_TEMPERATURE,
        CHUNK=chunk_size,
        GROUPS=groups,
        num_warps=4,
    )
    _propose_kernel[(rows,)](
        *filters,
        maxima,
        peaks,
        spans[0],
        lowest,
        chunks * groups,
        vocab_size,
        GREEDY_TEMPERATURE=GREEDY_TEMPERATURE,
        TILE=_TILE,
        BOUNDS=_BOUNDS,
        num_warps=8,
    )
    for index in range(_PASSES):
        before = max(index - 1, 0)
        _measure_kernel[(rows, chunks)](
            logits,
            temperature,
            top_k,
            top_p,
            peaks,
            maxima,
            spans[before],
            counts[before],
            masses[before],
            counts[0],
            masses[0],
            spans[index],
            counts[index],
            masses[index],
            logits.stride(0),
            vocab_size,
            FIRST=index == 0,
            CHUNK=chunk_size,
            GROUPS=groups,
            num_warps=4,
            **sizes,
        )
    found = (peaks, spans[-1], counts[-1], masses[-1], counts[0], masses[0], candidates)
    _collect_kernel[(rows, chunks)](
        logits, temperature, top_k, top_p, *found, logits.stride(0), vocab_size, CHUNK=chunk_size, num_warps=4, **sizes
    )
    _finish_kernel[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        *found,
        lowest,
        logits.stride(0),
        chunks,
        vocab_size,
        TILE=_TILE,
        num_warps=8,
        **sizes,
    )
    return lowest
