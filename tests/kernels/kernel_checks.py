"""Checks of one implementation of the kernels against fp64 formulas written here from their definitions.

`impl` is `reference` or `gpu`; the grids at the bottom of this file are shared by the three test modules. Outputs are
poisoned before every call, and every cache row and table entry that must not be read holds or leads to NaN.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from qwen_engine.kernels import reference

# Relative Frobenius error allowed. bf16 and fp16: one rounding of the output and, in attention, one of the weights.
# fp32: sums of up to 40K terms, which reach 4e-6; a tf32 dot would give 3e-4.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3}
# Triton's interpreter cuts fp32 off to bf16 instead of rounding: errors twice as large, and all toward zero.
INTERPRETER_BF16_TOLERANCE = 1.2e-2
NAN = float("nan")


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Every torch.empty inside is filled with NaN (integers: the largest value), so an unwritten element shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected` (fp64); NaN if anything is NaN."""
    assert actual.shape == expected.shape
    norm = expected.norm()
    return ((actual.double() - expected).norm() / (norm if norm > 0 else 1.0)).item()


def assert_close(impl: ModuleType, actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    if actual.dtype == torch.bfloat16 and actual.device.type == "cpu" and impl is not reference:
        tolerance = INTERPRETER_BF16_TOLERANCE
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e}"


def generator(device: str, *numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = (seed * 1000003 + number) % 2**31
    return torch.Generator(device).manual_seed(seed)


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=rng, device=rng.device, dtype=torch.float32).to(dtype)


def naive_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight.double()


def check_rms_norm(impl: ModuleType, device: str, dtype: torch.dtype, tokens: int, hidden: int) -> None:
    rng = generator(device, tokens, hidden)
    wide = normal(rng, tokens, hidden + 16, dtype=dtype) * 3
    weight = normal(rng, hidden, dtype=dtype)
    x = wide[:, :hidden]
    with poisoned_allocations():
        out = impl.rms_norm(x, weight, 1e-6)
    assert_close(impl, out, naive_rms_norm(x.double(), weight, 1e-6))


def check_add_rms_norm(impl: ModuleType, device: str, dtype: torch.dtype, tokens: int, hidden: int) -> None:
    rng = generator(device, tokens, hidden)
    weight = normal(rng, hidden, dtype=dtype)
    for num_parts in (1, 2, 4):
        parts = normal(rng, num_parts, tokens, hidden, dtype=dtype if num_parts == 1 else torch.float32)
        residual = normal(rng, tokens, hidden, dtype=dtype)
        total = parts.double().sum(dim=0) + residual.double()
        with poisoned_allocations():
            out = impl.add_rms_norm(parts, residual, weight, 1e-6)
        assert out.dtype == dtype
        assert_close(impl, out, naive_rms_norm(total, weight, 1e-6))
        assert_close(impl, residual, total)


def check_norm_uses_the_sum_before_rounding(impl: ModuleType, device: str) -> None:
    """In bf16 256 + 0.5 rounds to 256; the norm must still see the half."""
    residual = torch.full((1, 64), 256.0, dtype=torch.bfloat16, device=device)
    residual[0, 0] = 0.0
    x = torch.full((1, 64), 0.5, dtype=torch.bfloat16, device=device)
    weight = torch.ones(64, device=device)
    expected = naive_rms_norm(x.double() + residual.double(), weight, 0.0)
    x32 = x.float()
    out = impl.add_rms_norm(x32[None], residual, weight, 0.0)
    assert_close(impl, out, expected)
    assert residual[0, 1] == 256.0
    assert residual[0, 0] == 0.5


def check_silu_mul(impl: ModuleType, device: str, dtype: torch.dtype, tokens: int, inter: int) -> None:
    gate_up = normal(generator(device, tokens, inter), tokens, 2 * inter, dtype=dtype) * 4
    with poisoned_allocations():
        out = impl.silu_mul(gate_up)
    gate, up = gate_up.double()[:, :inter], gate_up.double()[:, inter:]
    assert_close(impl, out, gate * torch.sigmoid(gate) * up)


def check_embed_tokens(impl: ModuleType, device: str, dtype: torch.dtype, tokens: int, hidden: int) -> None:
    """Two shards of 13 and 10 rows; some tokens in neither, some slots padding."""
    rng = generator(device, tokens, hidden)
    table = torch.randint(0, 30, (6, 9), generator=rng, device=device, dtype=torch.int32)
    slots = torch.randint(-1, 6, (tokens,), generator=rng, device=device, dtype=torch.int32)
    positions = torch.randint(0, 9, (tokens,), generator=rng, device=device, dtype=torch.int32)
    positions[slots < 0] = 2**30
    weight = normal(rng, 23, hidden, dtype=dtype)
    expected = torch.zeros(tokens, hidden, dtype=dtype, device=device)
    for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
        if slot >= 0 and table[slot, position] < 23:
            expected[i] = weight[int(table[slot, position])]
    with poisoned_allocations():
        parts = [impl.embed_tokens(table, slots, positions, weight[:13].clone(), 0)]
        parts.append(impl.embed_tokens(table, slots, positions, weight[13:].clone(), 13))
    assert torch.equal(parts[0] + parts[1], expected)


@dataclass(frozen=True, slots=True)
class Pages:
    """A shuffled block table and NaN-filled caches for rows of the given lengths."""

    block_tables: torch.Tensor  # int32 [max_num_seqs, max_blocks]; unused entries lead to a block of NaN
    slots: torch.Tensor  # int32 [rows]
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def make_pages(
    rng: torch.Generator, lengths: list[int], *, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> Pages:
    """Rows of length 0 become padding (slot -1)."""
    device = rng.device
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=rng, device=device).int()
    poison, order = order[0], order[1:]
    block_tables = torch.zeros(len(lengths) + 2, max(needed) + 2, dtype=torch.int32, device=device) + poison
    slots = torch.randperm(len(lengths) + 2, generator=rng, device=device)[: len(lengths)].int()
    taken = 0
    for row, (slot, count) in enumerate(zip(slots.tolist(), needed)):
        block_tables[slot, :count] = order[taken : taken + count]
        taken += count
        if count == 0:
            slots[row] = -1
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.full(shape, NAN, dtype=dtype, device=device) for _ in range(2))
    return Pages(block_tables, slots, k_cache, v_cache)


def cache_rows(pages: Pages, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block ids and rows inside them of the first `length` tokens of a row of the batch."""
    block_size = pages.k_cache.shape[2]
    position = torch.arange(length, device=pages.slots.device)
    return pages.block_tables[pages.slots[row].long()][position // block_size].long(), position % block_size


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """fp64 q [queries, num_heads, head_dim] against k, v [length, num_kv_heads, head_dim], causal from the end."""
    queries, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    out = torch.empty_like(q)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        scores = q[:, head] @ k[:, kv_head].T * scale
        future = (
            torch.arange(length, device=q.device)[None]
            > torch.arange(length - queries, length, device=q.device)[:, None]
        )
        weights = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
        out[:, head] = weights @ v[:, kv_head]
    return out


def split_decodes(
    impl: ModuleType,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    live_rows: torch.Tensor | None = None,
    programs: int | None = None,
) -> tuple[Any, ...]:
    """For a `decode_attention` that comes next: as if launches lay in between."""
    splits = impl.split_decodes(k_cache, block_tables, slots, seq_lens, max_seq_len, live_rows, programs)
    if k_cache.is_cuda:
        torch.cuda.synchronize()
    return splits


def check_attention(
    impl: ModuleType,
    device: str,
    dtype: torch.dtype,
    *,
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    programs: int | None = None,
    max_seq_len: int | None = None,
    decode: bool = False,
    live_rows: bool = False,
    strangers: tuple[int, int] = (0, 0),
) -> None:
    """Attention over pages for (query_lens[r], seq_lens[r]); decode calls decode_attention, else prefill_attention.

    strangers: queries in front of the rows and behind them that belong to none.
    """
    num_heads, num_kv_heads = heads
    rng = generator(device, *query_lens, *seq_lens, *heads, head_dim, block_size)
    scale = head_dim**-0.5
    pages = make_pages(rng, seq_lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    front, behind = strangers
    tokens = front + sum(query_lens) + behind
    # A view into wider rows, as the engine has it: q inside qkv.
    q = normal(rng, tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)[:, :num_heads] * 2
    out = torch.full((tokens, num_heads, head_dim), NAN, dtype=dtype, device=device)
    dense = []
    for row, length in enumerate(seq_lens):
        k, v = (normal(rng, length, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
        dense.append((k.double(), v.double()))
        if length:
            blocks, rows = cache_rows(pages, row, length)
            pages.k_cache[blocks, :, rows] = k
            pages.v_cache[blocks, :, rows] = v
    starts = [front + sum(query_lens[:row]) for row in range(len(query_lens) + 1)]
    query_start = torch.tensor(starts, dtype=torch.int32, device=device)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    num_live = torch.tensor([sum(length > 0 for length in seq_lens)], dtype=torch.int32, device=device)
    caches = (pages.k_cache, pages.v_cache, pages.block_tables, pages.slots)
    with poisoned_allocations():
        if decode:
            bound = max_seq_len or max(seq_lens)
            live = num_live if live_rows else None
            splits = split_decodes(impl, *caches, lengths, bound, live, programs)
            result = impl.decode_attention(q, *caches, lengths, scale, splits, out)
        else:
            result = impl.prefill_attention(
                q, *caches, query_start, lengths, scale, max(query_lens), max(seq_lens), out
            )
    assert result is out
    assert out[:front].isnan().all()
    assert out[tokens - behind :].isnan().all()
    if live_rows:  # outputs of padding are arbitrary
        seq_lens = seq_lens[: int(num_live)]
    assert not out[front : starts[len(seq_lens)]].isnan().any()
    for row, length in enumerate(seq_lens):
        actual = out[starts[row] : starts[row + 1]]
        if length == 0:
            assert (actual == 0).all()
        else:
            assert_close(impl, actual, naive_attention(q[starts[row] : starts[row + 1]].double(), *dense[row], scale))


def check_decode(
    impl: ModuleType,
    device: str,
    dtype: torch.dtype,
    seq_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    programs: int | None = None,
    max_seq_len: int | None = None,
    live_rows: bool = False,
) -> None:
    check_attention(
        impl,
        device,
        dtype,
        query_lens=[1] * len(seq_lens),
        seq_lens=seq_lens,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        programs=programs,
        max_seq_len=max_seq_len,
        decode=True,
        live_rows=live_rows,
    )


def check_prefill(
    impl: ModuleType,
    device: str,
    dtype: torch.dtype,
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    strangers: tuple[int, int] = (0, 0),
) -> None:
    """spans: (query_len, seq_len) of each row."""
    check_attention(
        impl,
        device,
        dtype,
        query_lens=[query_len for query_len, _ in spans],
        seq_lens=[seq_len for _, seq_len in spans],
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        strangers=strangers,
    )


def check_qk_norm_rope_kv_write(
    impl: ModuleType,
    device: str,
    dtype: torch.dtype,
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
) -> None:
    """Tokens at random positions of three slots, every fourth one padding; everything unwritten must keep its bits."""
    num_heads, num_kv_heads = heads
    rng = generator(device, tokens, *heads, head_dim, block_size)
    length = tokens + 5
    pages = make_pages(
        rng, [length] * 3, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    qkv = normal(rng, tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q_weight, k_weight = normal(rng, head_dim, dtype=dtype), normal(rng, head_dim, dtype=dtype)
    angles = torch.rand(length, head_dim // 2, generator=rng, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randperm(length, generator=rng, device=device)[:tokens].int()
    slots = pages.slots[torch.arange(tokens, device=device) % 3].clone()
    slots[3::4] = -1
    live = slots >= 0

    before = qkv.clone()
    split = before.view(tokens, -1, head_dim).double()
    q, k = split[:, :num_heads], split[:, num_heads : num_heads + num_kv_heads]
    rotation = torch.complex(cos_sin[:, : head_dim // 2].double(), cos_sin[:, head_dim // 2 :].double())
    rotation = rotation[positions.long()][:, None]

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = naive_rms_norm(x, weight, 1e-6)
        turned = torch.complex(x[..., : head_dim // 2], x[..., head_dim // 2 :]) * rotation
        return torch.cat((turned.real, turned.imag), dim=-1)

    with poisoned_allocations():
        result = impl.qk_norm_rope_kv_write(
            qkv,
            q_weight,
            k_weight,
            1e-6,
            cos_sin,
            slots,
            positions,
            pages.block_tables,
            pages.k_cache,
            pages.v_cache,
            num_heads,
        )
    assert result.data_ptr() == qkv.data_ptr()
    assert_close(impl, result[live], rotated(q, q_weight)[live])
    assert torch.equal(result[~live], before.view(tokens, -1, head_dim)[~live][:, :num_heads])
    assert torch.equal(qkv[:, num_heads * head_dim :], before[:, num_heads * head_dim :])
    blocks = pages.block_tables[slots.clamp(min=0).long(), positions.long() // block_size].long()[live]
    rows = (positions.long() % block_size)[live]
    assert_close(impl, pages.k_cache[blocks, :, rows], rotated(k, k_weight)[live])
    v = before.view(tokens, -1, head_dim)[:, num_heads + num_kv_heads :]
    assert torch.equal(pages.v_cache[blocks, :, rows], v[live])
    for cache in (pages.k_cache, pages.v_cache):
        cache[blocks, :, rows] = NAN
        assert cache.isnan().all()


def check_gumbel_argmax(
    impl: ModuleType, device: str, dtype: torch.dtype, rows: int, vocab_size: int, vocab_start: int
) -> None:
    """Greedy and random rows in one batch against noise worked out with Python integers."""
    rng = generator(device, rows, vocab_size, vocab_start)
    logits = normal(rng, rows, vocab_size, dtype=dtype) * 3
    logits[:, ::5] = -math.inf
    temperature = torch.tensor([[0.0, 0.7, 0.01, 1.0, 5.0][row % 5] for row in range(rows)], device=device)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=rng, device=device)
    positions = torch.randint(0, 2**40, (rows,), generator=rng, device=device)
    with poisoned_allocations():
        chosen = impl.gumbel_argmax(logits, temperature, seeds, positions, vocab_start)
    assert chosen.dtype == torch.int64
    for row in range(rows):
        scores = logits[row].double().cpu()
        if temperature[row] > 0.01:
            noise = naive_gumbel(int(seeds[row]), int(positions[row]), vocab_start, vocab_size)
            scores = scores / float(temperature[row]) + noise
            # fp32 may order two scores that agree to 1e-5 the other way.
            assert scores.max() - scores[int(chosen[row]) - vocab_start] < 1e-5
        else:
            assert int(chosen[row]) == int(scores.argmax()) + vocab_start


def naive_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox-4x32-10 of Salmon et al. (2011), figure by figure."""
    word = 2**32
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (right // word) ^ x1 ^ k0, right % word, (left // word) ^ x3 ^ k1, left % word
        k0, k1 = (k0 + 0x9E3779B9) % word, (k1 + 0xBB67AE85) % word
    return [x0, x1, x2, x3]


def naive_noise_bits(seed: int, position: int, vocab_start: int, vocab_size: int) -> list[int]:
    seed %= 2**64
    bits = []
    for token_id in range(vocab_start, vocab_start + vocab_size):
        counter = (token_id // 4, position % 2**32, position // 2**32, 0)
        bits.append(naive_philox(counter, (seed % 2**32, seed // 2**32))[token_id % 4])
    return bits


def naive_gumbel(seed: int, position: int, vocab_start: int, vocab_size: int) -> torch.Tensor:
    bits = torch.tensor(naive_noise_bits(seed, position, vocab_start, vocab_size))
    return -torch.log(-torch.log(((bits // 512).double() + 0.5) / 2**23))


def check_greedy_ties_and_masks(impl: ModuleType, device: str) -> None:
    """smp-08: greedy takes the lowest of equal maxima, alone or beside a random row; NaN and -inf never win."""
    logits = torch.full((5, 5000), -math.inf, device=device)
    logits[0, [4321, 77, 4999]] = 2.0
    logits[1, 4999] = -1e30
    logits[2, 10] = NAN
    logits[2, 4500] = -5.0
    logits[3, 3] = 1.0
    logits[4] = -math.inf
    temperature = torch.tensor([0.0, 2.0, 0.0, 0.01, 0.0], device=device)
    zeros = torch.zeros(5, dtype=torch.int64, device=device)
    together = impl.gumbel_argmax(logits, temperature, zeros, zeros)
    assert together.tolist() == [77, 4999, 4500, 3, 0]
    assert impl.gumbel_argmax(logits[:1], temperature[:1], zeros[:1], zeros[:1]).tolist() == [77]


def check_noise_ignores_the_batch(impl: ModuleType, device: str) -> None:
    """smp-04: a seeded row draws the same token alone, in another row and beside others, whole or from its shard."""
    rng = generator(device, 4)
    logits = normal(rng, 1, 1500, dtype=torch.float32)
    others = normal(rng, 3, 1500, dtype=torch.float32)
    seeds = torch.tensor([5, -1, 7, 99], device=device)
    positions = torch.tensor([0, 3, 2**33, 17], device=device)
    heat = torch.ones(4, device=device)
    alone = impl.gumbel_argmax(logits, heat[:1], seeds[3:], positions[3:])
    together = impl.gumbel_argmax(torch.cat((others, logits)), heat, seeds, positions)
    assert int(together[3]) == int(alone)
    shards = [impl.gumbel_argmax(logits[:, :701], heat[:1], seeds[3:], positions[3:])]
    shards.append(impl.gumbel_argmax(logits[:, 701:], heat[:1], seeds[3:], positions[3:], 701))
    assert int(alone) in [int(shard) for shard in shards]
    many = [column.repeat(16) for column in (heat[:1], seeds[3:])]
    elsewhere = impl.gumbel_argmax(logits.expand(16, -1), *many, torch.arange(16, device=device))
    assert len(set(elsewhere.tolist())) > 8


# temperature, top_k, top_p, min_p; 0 < top_k < vocabulary or 2**31 for off.
FILTERS = (
    (1.0, 2**31, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5),
    (1.0, 1, 1.0, 0.0),
    (0.7, 4, 1.0, 0.0),
    (1.5, 2**31, 0.9, 0.0),
    (1.0, 2**31, 1e-6, 0.0),
    (0.3, 2**31, 0.9999, 0.0),
    (1.0, 2**31, 1.0, 0.05),
    (1.0, 2**31, 1.0, 1.0),
    (2.0, 50, 0.8, 0.0),
    (0.9, 50, 0.95, 0.01),
    (1.0, 20, 0.3, 0.2),
)


def naive_distances_kept(distances: list[float], top_k: int, top_p: float, min_p: float) -> float:
    """The largest distance below the best logit that stays, worked out rank by rank."""
    limit = -math.log(min_p) if min_p else math.inf
    ranked = [d for d in sorted(distances) if d <= limit and d < math.inf][:top_k]
    total = sum(math.exp(-d) for d in ranked)
    largest, before = 0.0, 0.0
    for distance in ranked:
        if before >= top_p * total and top_p < 1:
            break
        largest, before = distance, before + math.exp(-distance)
    return largest


def check_lowest_kept(
    impl: ModuleType, device: str, dtype: torch.dtype, vocab_size: int, spread: float, *, ties: bool
) -> None:
    """Every combination of filters. With `ties` the logits are whole numbers."""
    rng = generator(device, vocab_size)
    logits = normal(rng, len(FILTERS), vocab_size, dtype=torch.float32) * spread
    if ties:
        logits = logits.round()
    logits[:, 3::7] = -math.inf
    logits[1::3, 2::11] = NAN
    logits = logits.to(dtype)
    columns = [torch.tensor(column, device=device) for column in zip(*FILTERS)]
    with poisoned_allocations():
        lowest = impl.lowest_kept(logits, *columns)
    assert lowest.dtype == torch.float32
    for row, filters in enumerate(FILTERS):
        assert_limit(logits[row], lowest[row], columns[0][row], *filters[1:])


def assert_limit(
    logits: torch.Tensor, lowest: torch.Tensor, temperature: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> None:
    """Whether `lowest` is what the filters leave of one row of logits."""
    if temperature <= 0.01 or (top_k >= len(logits) and top_p >= 1 and min_p <= 0):
        assert lowest == -math.inf
        return
    scaled = logits.float() * temperature.reciprocal()
    scaled = scaled.masked_fill(scaled.isnan(), -math.inf)
    distances = scaled.max() - scaled
    kept = distances[(scaled >= lowest) & (scaled > -math.inf)].max().item()
    # fp32 sums may end top_p one logit earlier or later where a sum meets it.
    bounds = [
        naive_distances_kept(distances.tolist(), top_k, top_p * (1 + sign * 1e-5), min_p * (1 - sign * 1e-6))
        for sign in (-1, 1)
    ]
    assert bounds[0] <= kept <= bounds[1]
    assert lowest in scaled


def rows_of_logits(rng: torch.Generator, device: str, vocab_size: int) -> torch.Tensor:
    """Rows that take different ways through a search for their limit; fp32 [7, vocab]."""
    flat = normal(rng, vocab_size, dtype=torch.float32)
    peaked = flat.clone()
    peaked[vocab_size // 3 :: vocab_size // 4] += 12
    sloping = torch.linspace(9, -9, vocab_size, device=device)  # the likely ids side by side
    halves = torch.zeros(vocab_size, device=device)
    halves[::2] = 0.5  # ties in every chunk; a top_k beyond the first half splits the other one
    masked = torch.full_like(flat, -math.inf)
    masked[-3:] = flat[-3:]
    return torch.stack([flat, 4 * flat, peaked, sloping, halves, torch.zeros_like(flat), masked])


def check_limits_of_rows(impl: ModuleType, device: str, dtype: torch.dtype, vocab_size: int, top_k: int) -> None:
    """Peaked, flat, equal and masked rows, strided; each has the same bits in any batch."""
    rng = generator(device, vocab_size, top_k)
    off = 2**31
    filters = (
        (1.0, top_k, 1.0, 0.0),
        (1.0, top_k, 0.9, 0.0),
        (0.7, off, 0.5, 0.0),
        (1.0, off, 1e-6, 0.0),
        (1.5, off, 0.999999, 0.0),
        (1.0, off, 0.9, 1e-3),
        (1.0, off, 1.0, 0.02),
    )
    rows = rows_of_logits(rng, device, vocab_size)
    count = len(rows) * len(filters)
    wide = torch.full((count, vocab_size + 16), 50.0, dtype=dtype, device=device)
    logits = wide[:, :vocab_size]
    logits.copy_(rows.repeat_interleave(len(filters), 0))
    columns = [torch.tensor(column * len(rows), device=device) for column in zip(*filters)]
    with poisoned_allocations():
        lowest = impl.lowest_kept(logits, *columns)
    for row in range(count):
        assert_limit(logits[row], lowest[row], columns[0][row], *filters[row % len(filters)][1:])
    few = slice(2, None, 11)
    assert torch.equal(lowest[few], impl.lowest_kept(logits[few], *(column[few].contiguous() for column in columns)))


def check_filtered_argmax(impl: ModuleType, device: str) -> None:
    """A draw with `lowest` is the draw from logits of which the rest was masked."""
    rng = generator(device, 11)
    rows, vocab_size = 20, 70
    logits = normal(rng, rows, vocab_size, dtype=torch.float32) * 2
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.3], device=device).repeat(rows // 4)
    top_k = torch.tensor([1, 5, 20, 2**31, 2], device=device).repeat(rows // 5)
    top_p, min_p = torch.full((rows,), 0.95, device=device), torch.zeros(rows, device=device)
    seeds = torch.arange(rows, device=device)
    lowest = impl.lowest_kept(logits, temperature, top_k, top_p, min_p)
    scaled = logits * temperature.clamp(min=1e-9).reciprocal()[:, None]
    masked = logits.masked_fill((scaled < lowest[:, None]) & (temperature > 0)[:, None], -math.inf)
    chosen = impl.gumbel_argmax(logits, temperature, seeds, seeds, 0, lowest)
    assert torch.equal(chosen, impl.gumbel_argmax(masked, temperature, seeds, seeds))
    assert (chosen != impl.gumbel_argmax(logits, temperature, seeds, seeds)).any()


def check_adjust_logits(impl: ModuleType, device: str, dtype: torch.dtype, rows: int, vocab_size: int) -> None:
    """Rows with a mask, a bias, penalties, some of them, none, and of padding, inside wider rows; a table's rows that
    no row may read would show. Masks and biases are exact."""
    rng = generator(device, rows, vocab_size)
    num_slots = rows + 2
    logits = torch.full((rows, vocab_size + 24), NAN, dtype=dtype, device=device)[:, 8 : 8 + vocab_size]
    logits.copy_(normal(rng, rows, vocab_size, dtype=torch.float32) * 4)
    logits[:, ::6] = -math.inf
    logits[:, 1::7] = -0.0
    slots = torch.randperm(num_slots, generator=rng, device=device)[:rows]
    slots[rows // 2] = -1
    slot_numbers = torch.arange(num_slots, device=device)
    has_bias = (slot_numbers % 3 == 0).long()
    bias = normal(rng, num_slots, vocab_size, dtype=torch.float32) * 5
    bias[:, ::4] = -math.inf
    bias[has_bias == 0] = NAN
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=rng, device=device).int()
    mask_of_slot = torch.randint(-1, 3, (num_slots,), generator=rng, device=device).int()
    counts = torch.randint(-3, 4, (num_slots, vocab_size), generator=rng, device=device, dtype=torch.int32).clamp(min=0)
    in_prompt = torch.rand((num_slots, vocab_size), generator=rng, device=device) < 0.2
    factors = torch.rand(3, num_slots, generator=rng, device=device) * 2
    factors += torch.tensor([[-1.0], [-1.0], [0.3]], device=device)
    factors[0, ::4] = 0.0
    factors[1, 2::4] = 0.0
    factors[2, 1::3] = 1.0  # only the output counts
    factors[:, 3::4] = torch.tensor([[0.0], [0.0], [1.0]], device=device)
    before = logits.clone()
    parts = {
        "masks": (mask_of_slot, bits),
        "biases": (has_bias, bias),
        "penalties": (counts, in_prompt, factors),
    }
    for chosen in range(8):
        options = {name: part for index, (name, part) in enumerate(parts.items()) if chosen >> index & 1}
        expected = before.to(torch.float32, copy=True)
        for row, slot in enumerate(slots.tolist()):
            if "masks" in options and slot >= 0 and mask_of_slot[slot] >= 0:
                words = bits[mask_of_slot[slot]].tolist()
                allowed = [words[column // 32] >> column % 32 & 1 for column in range(vocab_size)]
                expected[row, torch.tensor(allowed, device=device) == 0] = -math.inf
            if "biases" in options and slot >= 0 and has_bias[slot]:
                expected[row] += bias[slot]
        exact = expected.clone()
        if "penalties" in options:
            for row, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    presence, frequency, repetition = factors[:, slot].double().tolist()
                    x, count = expected[row].double(), counts[slot].double()
                    seen = (count > 0) | in_prompt[slot]
                    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
                    expected[row] = x - frequency * count - presence * (count > 0)
        with poisoned_allocations():
            out = impl.adjust_logits(logits, slots, **options)
        assert out.dtype == torch.float32
        assert torch.equal(logits, before)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-6)
        if "penalties" not in options:
            assert torch.equal(out.view(torch.int32)[:, 1::7], exact.view(torch.int32)[:, 1::7])  # -0.0 stays
            assert torch.equal(out, exact)
        else:
            assert impl.adjust_logits(exact, slots, penalties=parts["penalties"], out=exact) is exact
            assert torch.equal(exact, out)


def check_decode_inputs(impl: ModuleType, device: str, rows: int) -> None:
    rng = generator(device, rows)
    num_tokens = torch.randint(1, 40000, (rows + 3,), generator=rng, device=device, dtype=torch.int32)
    slots = torch.randperm(rows + 3, generator=rng, device=device)[:rows].int()
    slots[1::3] = -1
    positions, seq_lens = (torch.full((rows + 2,), 2**30, dtype=torch.int32, device=device) for _ in range(2))
    before = num_tokens.clone()
    impl.decode_inputs(slots, num_tokens, positions[:rows], seq_lens[:rows])
    lengths = [0 if slot < 0 else int(before[slot]) for slot in slots.tolist()]
    assert seq_lens.tolist() == [*lengths, 2**30, 2**30]
    assert positions.tolist() == [*(max(length - 1, 0) for length in lengths), 2**30, 2**30]
    assert torch.equal(num_tokens, before)


def check_advance(impl: ModuleType, device: str, rows: int) -> None:
    """cgr-01: padding rows write nowhere, the last slot above all; nothing but the next token of live slots changes."""
    rng = generator(device, rows)
    width = 50
    table = torch.randint(0, 1000, (rows + 3, width), generator=rng, device=device, dtype=torch.int32)
    num_tokens = torch.randint(1, width, (rows + 3,), generator=rng, device=device, dtype=torch.int32)
    slots = torch.randperm(rows + 2, generator=rng, device=device)[:rows].int()  # never the last one
    slots[2::4] = -1
    token_ids = torch.randint(0, 2**31 - 1, (rows,), generator=rng, device=device)
    expected_table, expected_tokens = table.clone(), num_tokens.clone()
    for slot, token in zip(slots.tolist(), token_ids.tolist()):
        if slot >= 0:
            expected_table[slot, int(num_tokens[slot])] = token
            expected_tokens[slot] += 1
    for keys in (False, True):
        new_table, new_tokens = table.clone(), num_tokens.clone()
        if keys:
            scores = torch.randint(-(2**31), 2**31, (rows,), generator=rng, device=device)
            out = torch.full((rows,), -5, device=device)
            packed = scores * 2**32 + (2**32 - 1 - token_ids)
            impl.advance_to_best(packed, slots, new_table, new_tokens, out)
            assert torch.equal(out, token_ids.masked_fill(slots < 0, 0))
        else:
            impl.advance(token_ids, slots, new_table, new_tokens)
        assert torch.equal(new_table, expected_table)
        assert torch.equal(new_tokens, expected_tokens)


def winners(impl: ModuleType, keys: torch.Tensor) -> list[int]:
    """Token ids that keys of slot_argmax stand for."""
    rows = len(keys)
    slots = torch.arange(rows, dtype=torch.int32, device=keys.device)
    table, num_tokens = (torch.zeros(rows, n, dtype=torch.int32, device=keys.device) for n in (2, 1))
    token_ids = torch.full_like(keys, -1)
    impl.advance_to_best(keys, slots, table, num_tokens.flatten(), token_ids)
    return token_ids.tolist()


def check_slot_argmax(
    impl: ModuleType, device: str, dtype: torch.dtype, rows: int, vocab_size: int, vocab_start: int
) -> None:
    """One shard gives gumbel_argmax's token for the slots' parameters; padding reads nothing and gives key 0."""
    rng = generator(device, rows, vocab_size, vocab_start)
    logits = normal(rng, rows, vocab_size, dtype=dtype) * 3
    logits[:, ::5] = -math.inf
    slots = torch.randperm(rows + 2, generator=rng, device=device)[:rows].int()
    temperature = torch.tensor([[0.0, 0.7, 0.01, 1.0, 5.0][slot % 5] for slot in range(rows + 2)], device=device)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows + 2,), generator=rng, device=device)
    num_tokens = torch.randint(1, 2**31 - 1, (rows + 2,), generator=rng, device=device, dtype=torch.int32)
    request = slots.long()
    expected = impl.gumbel_argmax(
        logits, temperature[request], seeds[request], num_tokens[request].long(), vocab_start
    ).tolist()
    with poisoned_allocations():
        keys = impl.slot_argmax(logits, slots, num_tokens, temperature, seeds, vocab_start)
        padded = slots.clone()
        padded[1::2] = -1
        with_padding = impl.slot_argmax(logits, padded, num_tokens, temperature, seeds, vocab_start)
    assert keys.dtype == torch.int64
    assert winners(impl, keys) == expected
    assert torch.equal(with_padding, keys.masked_fill(padded < 0, 0))


def check_keys_of_shards(impl: ModuleType, device: str, num_shards: int) -> None:
    """The largest key over the shards is the winner of the whole: for noise, for ties across shards, for zeros of both
    signs, for rows of -inf and NaN, and with a shard that has no token at all."""
    rng = generator(device, num_shards)
    vocab_size, rows = 1501, 8
    width = -(-vocab_size // num_shards)
    logits = normal(rng, rows, vocab_size, dtype=torch.float32)
    logits[0] = -1.0
    logits[0, [700, 77, 1490]] = 2.0
    logits[1] = -math.inf
    logits[2] = NAN
    logits[2, 1500] = -1e30
    logits[3] = -5.0
    logits[3, 30], logits[3, 1400] = -0.0, 0.0
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    temperature = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5, 3.0], device=device)
    seeds, num_tokens = torch.arange(rows, device=device) * 7**20, slots * 5 + 3
    expected = impl.gumbel_argmax(logits, temperature, seeds, num_tokens.long()).tolist()
    assert expected[:4] == [77, 0, 1500, 30]
    parts = []
    for shard in range(num_shards + 1):
        start = min(shard * width, vocab_size)
        part = logits[:, start : start + width]
        parts.append(impl.slot_argmax(part, slots, num_tokens, temperature, seeds, shard * width))
    assert winners(impl, torch.stack(parts).amax(dim=0)) == expected


def check_token_logprobs(impl: ModuleType, device: str, dtype: torch.dtype, rows: int, vocab_size: int) -> None:
    rng = generator(device, rows, vocab_size)
    logits = normal(rng, rows, vocab_size, dtype=dtype) * 4
    logits[:, 1::3] = -math.inf
    token_ids = torch.randint(0, vocab_size, (rows,), generator=rng, device=device)
    token_ids[0] = logits[0].argmax()
    with poisoned_allocations():
        logprobs, ranks, normalisers = impl.token_logprobs(logits, token_ids)
    wide = logits.double()
    torch.testing.assert_close(normalisers.double(), wide.logsumexp(dim=1), atol=5e-6, rtol=1e-6)
    expected = torch.log_softmax(wide, dim=1).gather(1, token_ids[:, None])[:, 0]
    finite = expected.isfinite()
    assert torch.equal(logprobs.isfinite(), finite)
    torch.testing.assert_close(logprobs[finite].double(), expected[finite], atol=5e-6, rtol=1e-6)
    assert ranks.tolist() == [1 + int((wide[r] > wide[r, token_ids[r]]).sum()) for r in range(rows)]
    assert int(ranks[0]) == 1


def check_best_ids(impl: ModuleType, device: str, dtype: torch.dtype, rows: int, vocab_size: int, count: int) -> None:
    """Rows with and without equals, zeros of both signs, infinities and NaN, inside wider rows of what would win; the
    order is that of Python's sort, and a row has it in any batch."""
    rng = generator(device, rows, vocab_size, count)
    wide = torch.full((rows, vocab_size + 24), 1e4, dtype=dtype, device=device)
    logits = wide[:, 8 : 8 + vocab_size]
    logits.copy_(normal(rng, rows, vocab_size, dtype=torch.float32) * 3)
    logits[1::5] = logits[1::5].round().clamp(max=2)  # equals in every chunk, zeros of both signs among them
    logits[2::5] = 0.0
    logits[2::5, 1::2] = -0.0
    logits[2::5, 5::9] = -math.inf
    logits[3::5, 3:] = -math.inf
    logits[3::5, 1::4] = NAN
    logits[3::5, 2::7] = -NAN
    logits[4::5, ::11] = math.inf
    logits[4::5, 4::11] = -math.inf
    with poisoned_allocations():
        best = impl.best_ids(logits, count)
        alone = impl.best_ids(logits[rows // 2 :][:1], count)
    assert best.dtype == torch.int64
    assert torch.equal(alone, best[rows // 2 :][:1])
    values = torch.where(logits.isnan(), -math.inf, logits).tolist()
    for row, ids in zip(values, best.tolist()):
        assert ids == sorted(range(vocab_size), key=lambda column, row=row: (-row[column], column))[:count]


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = ((1, 1), (1, 64), (3, 100), (5, 257), (2, 1024))  # tokens, hidden
LARGE_ROWS = ((1, 5120), (37, 4096), (64, 12800), (513, 1024))
# num_heads, num_kv_heads: ratios 1 to 8 and the odd ones.
HEADS = ((2, 2), (4, 2), (3, 1), (8, 2), (5, 1), (6, 1), (7, 1), (8, 1), (16, 1))
# Around blocks of 8 and 16 and KV tiles of 32 to 128; 0 is padding.
SEQ_LENS = ([1], [7, 8, 9], [15, 0, 16, 17], [31, 32, 33], [63, 1, 64, 65], [127, 128, 0, 129])
# (query_len, seq_len): whole prompts, chunks behind a cached prefix, single tokens, padding, all in one batch.
SPANS = (
    [(1, 1)],
    [(7, 7), (8, 8), (9, 9)],
    [(1, 33), (16, 16), (0, 0), (17, 40)],
    [(33, 64), (1, 65), (2, 129)],
    [(5, 132), (3, 0), (31, 31), (1, 1)],
)
PRODUCTS = ((1, 32, 64), (3, 40, 100), (17, 64, 129), (33, 16, 48))  # tokens, rows of the weight, columns
BATCHES = (1, 7, 256, 300)
BEST = (
    (1, 1, 1),
    (3, 50, 50),
    (5, 37, 0),
    (7, 2047, 5),
    (2, 2049, 64),
    (5, 6200, 20),
    (1, 40, 90),
)  # rows, vocab, count
VOCABULARIES = ((1, 5, 0), (3, 100, 7), (5, 1001, 128), (2, 4099, 4094))  # rows, vocab_size, vocab_start
