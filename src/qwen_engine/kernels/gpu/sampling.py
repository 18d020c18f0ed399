"""Gumbel-argmax sampling, the log-probability of the sampled token, and the ids of the best logits.

All of them cut a row of logits into chunks, one program each, and merge the chunks' results in a second, small kernel;
logits are read once.
"""

import torch
import triton
import triton.language as tl

from qwen_engine.kernels import reference
from qwen_engine.kernels.gpu.common import cdiv, next_power_of_2
from qwen_engine.kernels.gpu.launching import Kernel
from qwen_engine.request import GREEDY_TEMPERATURE

_LOGPROB_CHUNK = 4096
_ARGMAX_CHUNK = 1024
_BEST_CHUNK = 2048
_MOST_BEST = 64  # of more, each of which takes a round, torch's sort comes faster
_NO_TOKEN = tl.constexpr(2**31 - 1)  # loses every comparison for the lowest id
_NO_KEY = tl.constexpr(-(2**63))  # below the key of any logit


@triton.jit
def noise_bits(seed, position, first_id, COUNT: tl.constexpr):
    """Random bits of the token ids [first_id, first_id + COUNT), uint32 [COUNT]; first_id is a multiple of 4."""
    groups = ((first_id >> 2) + tl.arange(0, COUNT // 4)).to(tl.uint32)
    key_low, key_high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros([COUNT // 4], tl.uint32)
    position_low = zeros + (position & 0xFFFFFFFF).to(tl.uint32)
    position_high = zeros + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    lane0, lane1, lane2, lane3 = tl.philox_impl(groups, position_low, position_high, zeros, key_low, key_high)
    # Each join adds a last dimension, so the flattened order is lane 0, 1, 2, 3 of one group after another.
    return tl.reshape(tl.join(tl.join(lane0, lane2), tl.join(lane1, lane3)), [COUNT])


@triton.jit
def gumbel(bits):
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _best(scores, ids):
    """The largest score and the lowest id that has it."""
    peak = tl.max(scores, 0)
    return peak, tl.min(tl.where((scores == peak) & (ids >= 0), ids, _NO_TOKEN), 0)


@triton.jit
def _key(score, id):
    """int64 ordered by score and then by lower id: the score's bits as an ordered integer, and ~id below them."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 equals 0.0 but has other bits
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (~id.to(tl.int64) & 0xFFFFFFFF)


@Kernel
@triton.jit(do_not_specialize=["vocab_start"])
def _argmax_chunk_kernel(
    logits,
    temperature,
    seeds,
    positions,
    lowest,
    best_score,
    best_id,
    logits_stride,
    vocab_size,
    vocab_start,
    slots,
    GREEDY_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    request = row  # where the request's parameters lie
    if slots is not None:
        request = tl.load(slots + row).to(tl.int64)
        if request < 0:
            return
    # Chunks begin at multiples of 4 so that a noise group is never cut; a shard may begin inside its first group.
    first_id = vocab_start // 4 * 4 + chunk * CHUNK
    ids = first_id + tl.arange(0, CHUNK)
    column = ids - vocab_start
    inside = (column >= 0) & (column < vocab_size)
    scores = tl.load(logits + row * logits_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    heat = tl.load(temperature + request)
    if heat > GREEDY_TEMPERATURE:
        scores *= tl.div_rn(1.0, heat)
        scores = tl.where(scores == scores, scores, float("-inf"))
        if lowest is not None:
            scores = tl.where(scores >= tl.load(lowest + row), scores, float("-inf"))
    # Top-k and top-p leave most chunks with nothing but -inf, and those need no noise.
    if (heat > GREEDY_TEMPERATURE) & (tl.max(scores, 0) > float("-inf")):
        bits = noise_bits(tl.load(seeds + request), tl.load(positions + request).to(tl.int64), first_id, CHUNK)
        scores += gumbel(bits)
    peak, winner = _best(scores, tl.where(inside, ids, -1))
    tl.store(best_score + row * tl.num_programs(1) + chunk, peak)
    tl.store(best_id + row * tl.num_programs(1) + chunk, winner)


@Kernel
@triton.jit
def _argmax_merge_kernel(best_score, best_id, out, chunks, slots, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if slots is not None:
        slot = tl.load(slots + row)
        if slot < 0:
            tl.store(out + row, 0)
            return
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    scores = tl.load(best_score + row * chunks + chunk, mask=inside, other=float("-inf"))
    ids = tl.load(best_id + row * chunks + chunk, mask=inside, other=-1)
    peak, winner = _best(scores, ids)
    result = winner.to(tl.int64)
    if slots is not None:
        result = _key(peak, winner)
    tl.store(out + row, result)


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int = 0,
    lowest: torch.Tensor | None = None,
) -> torch.Tensor:
    return _launch_argmax(logits, temperature, seeds, positions, vocab_start, lowest, None)


def slot_argmax(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    vocab_start: int,
) -> torch.Tensor:
    return _launch_argmax(logits, temperature, seeds, num_tokens, vocab_start, None, slots)


def _launch_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int,
    lowest: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """Token ids, or with `slots` the keys of the winners; then the other tensors are by slot instead of by row."""
    rows, vocab_size = logits.shape
    chunks = max(1, cdiv(vocab_size + vocab_start % 4, _ARGMAX_CHUNK))
    best_score = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _argmax_chunk_kernel[(rows, chunks)](
        logits,
        temperature,
        seeds,
        positions,
        lowest,
        best_score,
        best_id,
        logits.stride(0),
        vocab_size,
        vocab_start,
        slots,
        GREEDY_TEMPERATURE=GREEDY_TEMPERATURE,
        CHUNK=_ARGMAX_CHUNK,
        num_warps=4,
    )
    _argmax_merge_kernel[(rows,)](best_score, best_id, out, chunks, slots, CHUNKS=next_power_of_2(chunks))
    return out


@Kernel
@triton.jit
def _logprob_chunk_kernel(logits, token_ids, peaks, totals, ranks, logits_stride, vocab_size, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab_size
    logits_row = logits + row * logits_stride
    values = tl.load(logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    chosen = tl.load(logits_row + tl.load(token_ids + row)).to(tl.float32)
    peak = tl.max(values, 0)
    # A chunk of -inf alone has no finite peak to subtract; its total is 0.
    total = tl.sum(tl.exp(values - tl.where(peak > float("-inf"), peak, 0.0)), 0)
    target = row * tl.num_programs(1) + chunk
    tl.store(peaks + target, peak)
    tl.store(totals + target, total)
    tl.store(ranks + target, tl.sum((values > chosen).to(tl.int32), 0))


@Kernel
@triton.jit
def _logprob_merge_kernel(
    logits, token_ids, peaks, totals, ranks, logprobs, rank, normalisers, logits_stride, chunks, CHUNKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    peak = tl.load(peaks + row * chunks + chunk, mask=inside, other=float("-inf"))
    total = tl.load(totals + row * chunks + chunk, mask=inside, other=0.0)
    greater = tl.load(ranks + row * chunks + chunk, mask=inside, other=0)
    top = tl.max(peak, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    chosen = tl.load(logits + row * logits_stride + tl.load(token_ids + row)).to(tl.float32)
    tl.store(logprobs + row, chosen - log_total)
    tl.store(normalisers + row, log_total)
    tl.store(rank + row, tl.sum(greater, 0).to(tl.int64) + 1)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, vocab_size = logits.shape
    chunks = cdiv(vocab_size, _LOGPROB_CHUNK)
    peaks = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    totals = torch.empty_like(peaks)
    ranks = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    logprobs, normalisers = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _logprob_chunk_kernel[(rows, chunks)](
        logits, token_ids, peaks, totals, ranks, logits.stride(0), vocab_size, CHUNK=_LOGPROB_CHUNK, num_warps=8
    )
    _logprob_merge_kernel[(rows,)](
        logits,
        token_ids,
        peaks,
        totals,
        ranks,
        logprobs,
        rank,
        normalisers,
        logits.stride(0),
        chunks,
        CHUNKS=next_power_of_2(chunks),
    )
    return logprobs, rank, normalisers


@triton.jit
def _load_chunk(logits_row, chunk, vocab_size, CHUNK: tl.constexpr):
    """Logits of a chunk, fp32 with -inf for NaN, and their ids, -1 past the vocabulary."""
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab_size
    scores = tl.load(logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(scores == scores, scores, float("-inf")), tl.where(inside, column, -1)


@Kernel
@triton.jit
def _best_of_chunk_kernel(logits, best, logits_stride, vocab_size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores, ids = _load_chunk(logits + row * logits_stride, chunk, vocab_size, CHUNK)
    peak, winner = _best(scores, ids)
    tl.store(best + row * tl.num_programs(1) + chunk, _key(peak, winner))


@Kernel
@triton.jit(do_not_specialize=["count"])
def _best_of_row_kernel(
    logits, best, out, logits_stride, vocab_size, chunks, count, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Takes the best of the chunks' best keys `count` times; the chunk that had it then offers its next one."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNKS)
    keys = tl.load(best + row * chunks + lane, mask=lane < chunks, other=_NO_KEY)
    for rank in range(count):
        key = tl.max(keys, 0)
        winner = ~key & 0xFFFFFFFF
        tl.store(out + row * count + rank, winner)
        chunk = (winner // CHUNK).to(tl.int32)
        scores, ids = _load_chunk(logits + row * logits_stride, chunk, vocab_size, CHUNK)
        # No two keys are equal, so what is below the key is what the chunk has not offered yet.
        offers = _key(scores, ids)
        offers = tl.where((ids >= 0) & (offers < key), offers, _NO_KEY)
        keys = tl.where(lane == chunk, tl.max(offers, 0), keys)


def best_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    rows, vocab_size = logits.shape
    count = min(count, vocab_size)
    if count > _MOST_BEST:
        return reference.best_ids(logits, count)
    chunks = cdiv(vocab_size, _BEST_CHUNK)
    best = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device)
    out = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    shape = (logits.stride(0), vocab_size)
    if count:
        _best_of_chunk_kernel[(rows, chunks)](logits, best, *shape, CHUNK=_BEST_CHUNK, num_warps=4)
        _best_of_row_kernel[(rows,)](
            logits, best, out, *shape, chunks, count, CHUNK=_BEST_CHUNK, CHUNKS=next_power_of_2(chunks), num_warps=4
        )
    return out
