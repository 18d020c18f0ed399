"""The batched sampler against a plain reference: one row at a time, in fp64, in the documented order of operations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from qwen_engine import SamplingParams
from qwen_engine.kernels.reference import gumbel_noise
from qwen_engine.layers.sampler import SamplingTables, TokenMasks, top_logprobs
from qwen_engine.scheduling.step_plan import SlotInit

VOCAB = 61
MAX_LEN = 64
MARGIN = 1e-4
"""Rows whose decision hangs on less than this are left to rounding."""


@dataclass
class Row:
    """One request as the sampler sees it."""

    params: SamplingParams
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def slot_init(params: SamplingParams, *, slot: int = 0, **options: Any) -> SlotInit:
    """A request with all its tokens."""
    options = {"stop_ids": (), "bad_word_ids": (), **options}
    return SlotInit(
        slot=slot, first_token=0, num_computed_tokens=0, prefix=None, block_ids=(), params=params, **options
    )


class Batch:
    """Rows in the slots of one `SamplingTables`."""

    def __init__(self, max_num_seqs: int = 8, vocab: int = VOCAB) -> None:
        self.tables = SamplingTables(max_num_seqs, vocab, torch.device("cpu"))
        self.rows: dict[int, Row] = {}

    def put(self, rows: dict[int, Row]) -> None:
        self.rows.update(rows)
        self.tables.set(
            [
                slot_init(
                    row.params,
                    slot=slot,
                    seed=row.seed,
                    token_ids=row.prompt + row.output,
                    num_prompt_tokens=len(row.prompt),
                    stop_ids=row.stop_ids,
                    bad_word_ids=row.bad_words,
                )
                for slot, row in rows.items()
            ]
        )

    def sample(self, logits: torch.Tensor, slots: Sequence[int], masks: TokenMasks | None = None) -> list[int]:
        """One token for each of `slots`; also appends it to the rows."""
        before = logits.clone()
        table = torch.full((self.tables.max_num_seqs, MAX_LEN), 7, dtype=torch.int32)
        for slot, row in self.rows.items():
            table[slot, : row.position] = torch.tensor(row.prompt + row.output)
        token_ids = self.tables.sample(
            logits,
            slots=np.array(slots),
            device_slots=torch.tensor(slots),
            positions=torch.tensor([self.rows[slot].position for slot in slots]),
            token_table=table,
            masks=masks,
        ).tolist()
        assert torch.equal(logits, before), "the raw logits were changed"
        for slot, token_id in zip(slots, token_ids):
            self.rows[slot].output.append(token_id)
        return token_ids


def sample_once(logits: Sequence[float] | torch.Tensor, *rows: Row) -> list[int]:
    batch = Batch(max_num_seqs=len(rows), vocab=len(logits))
    batch.put(dict(enumerate(rows)))
    return batch.sample(torch.as_tensor(logits).expand(len(rows), -1).clone(), range(len(rows)))


def adjusted(row: Row, logits: np.ndarray) -> np.ndarray:
    """Bias, masks and penalties."""
    params, x = row.params, logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    masked = set()
    if params.allowed_token_ids is not None:
        masked |= set(range(len(x))) - set(params.allowed_token_ids)
    for *prefix, last in row.bad_words:
        if len(prefix) <= len(row.output) and row.output[len(row.output) - len(prefix) :] == prefix:
            masked.add(last)
    if len(row.output) < params.min_tokens:
        masked |= set(row.stop_ids)
    x[list(masked)] = -np.inf
    counts = Counter(row.output)
    for token in set(row.prompt) | set(row.output):
        repetition = float(np.float32(params.repetition_penalty))
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in counts.items():
        x[token] -= float(np.float32(params.frequency_penalty)) * count + float(np.float32(params.presence_penalty))
    return x


def kept_tokens(params: SamplingParams, x: np.ndarray) -> tuple[np.ndarray, float]:
    """What min_p, top_k and top_p (in this order) leave, and by how little a token is in or out.

    A token as likely as the last one kept is kept too.
    """
    scaled = x / float(np.float32(params.temperature))
    relative = np.exp(scaled - scaled.max())
    kept = relative >= params.min_p
    margins = [np.abs(relative - params.min_p).min() if params.min_p else 1.0]
    if 0 < params.top_k < kept.sum():
        kept &= scaled >= np.sort(scaled[kept])[-params.top_k]
    if params.top_p < 1:
        probabilities = np.where(kept, relative, 0)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        margins.append(np.abs(before[1:] - params.top_p).min())
        kept &= scaled >= scaled[order[before < params.top_p]].min()
    return kept, min(margins)


def expected_token(row: Row, logits: np.ndarray) -> tuple[int, float]:
    """The token, and the margin by which it was chosen."""
    x = adjusted(row, logits)
    margin = 1.0
    if not row.params.is_greedy:
        kept, margin = kept_tokens(row.params, x)
        x = np.where(kept, x, -np.inf) / float(np.float32(row.params.temperature))
        x += gumbel_noise(torch.tensor([row.seed]), torch.tensor([row.position]), 0, len(x))[0].double().numpy()
    second, first = np.partition(x, -2)[-2:]
    return int(x.argmax()), min(margin, first - second)


def random_row(rng: np.random.Generator) -> Row:
    def maybe(value: object, otherwise: object, probability: float = 0.35) -> object:
        return value if rng.random() < probability else otherwise

    def ids(count: int) -> list[int]:
        return rng.choice(VOCAB, count, replace=False).tolist()

    params = SamplingParams(
        temperature=maybe(0.0, float(rng.uniform(0.2, 2.0)), 0.2),
        top_k=maybe(int(rng.integers(1, 70)), 0),
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.6)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        logit_bias=maybe({token: float(rng.uniform(-8, 8)) for token in ids(5)}, None),
        allowed_token_ids=maybe(ids(20), None),
        min_tokens=maybe(int(rng.integers(0, 6)), 0),
    )
    bad_words = tuple(tuple(rng.integers(0, VOCAB, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(1, 6)))
    return Row(
        params,
        seed=int(rng.integers(-(2**63), 2**63)),
        prompt=rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(),
        output=maybe(rng.integers(0, VOCAB, rng.integers(1, 8)).tolist(), []),
        stop_ids=maybe(tuple(ids(3)), ()),
        bad_words=maybe(bad_words, ()),
    )


@pytest.mark.parametrize("seed", range(8))
def test_mixed_batches_equal_the_reference_over_steps_and_slot_reuse(seed):
    """Rows with any mix of features come, move on, and leave; a few are put back as after a preemption."""
    rng = np.random.default_rng(seed)
    batch = Batch(max_num_seqs=6)
    batch.put({slot: random_row(rng) for slot in (4, 0, 2)})
    num_checked = num_rows = 0
    for _ in range(40):
        slots = sorted(batch.rows, key=lambda _: rng.random())
        logits = torch.tensor(rng.normal(0, 3, (len(slots), VOCAB)), dtype=torch.float32)
        expected = [expected_token(batch.rows[slot], row) for slot, row in zip(slots, logits.numpy())]
        actual = batch.sample(logits, slots)
        for slot, token, (wanted, margin) in zip(slots, actual, expected):
            num_rows += 1
            if margin > MARGIN:
                num_checked += 1
                assert token == wanted, batch.rows[slot]
        leaving = [slot for slot in slots if rng.random() < 0.25 or batch.rows[slot].position > MAX_LEN - 2]
        gone = {slot: batch.rows.pop(slot) for slot in leaving}
        free = [slot for slot in range(6) if slot not in batch.rows]
        new = [random_row(rng) for _ in free[:-1]]
        if gone and rng.random() < 0.5:
            back = next(iter(gone.values()))
            new[:1] = [back] if back.position < MAX_LEN - 2 else []
        if new:
            batch.put(dict(zip(free, new)))
    assert num_checked > 0.97 * num_rows


FEATURES = {
    "bias": {"logit_bias": {3: 5.0, 60: -2.0}},
    "allowed": {"allowed_token_ids": [0, 5, 60]},
    "bad_words": {},
    "min_tokens": {"min_tokens": 3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.5},
    "repetition": {"repetition_penalty": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
}


@pytest.mark.parametrize("feature", [*FEATURES, "all", "none"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_feature_alone_beside_a_plain_row(feature, temperature):
    """Over five steps, the plain row's tokens are those of its solo run."""
    options = {} if feature == "none" else FEATURES.get(feature)
    if options is None:
        options = {name: value for part in FEATURES.values() for name, value in part.items()}
    rng = np.random.default_rng(len(feature))
    logits = torch.tensor(rng.normal(0, 2, (5, VOCAB)), dtype=torch.float32)
    top = int(logits[0].argmax())
    row = Row(
        SamplingParams(temperature=temperature, **options),
        prompt=[top, top, 5],
        stop_ids=(top,),
        bad_words=((top,), (int(logits[1].argmax()), int(logits[2].argmax())))
        if feature in ("bad_words", "all")
        else (),
    )
    plain, alone = (Row(SamplingParams(temperature=temperature), seed=9) for _ in range(2))
    both, solo = Batch(), Batch()
    both.put({5: plain, 1: row})
    solo.put({0: alone})
    for step in logits:
        wanted, margin = expected_token(row, step.numpy())
        _, token = both.sample(step.expand(2, -1).clone(), [5, 1])
        solo.sample(step[None].clone(), [0])
        assert margin > MARGIN
        assert token == wanted
    assert plain.output == alone.output


def test_slot_reuse_leaves_nothing_behind():
    """A slot that had everything, then a row with min_tokens but nothing that could end it early, then a plain one."""
    everything = SamplingParams(
        temperature=1.0,
        **{name: value for part in FEATURES.values() for name, value in part.items()},
    )
    logits = torch.tensor(np.random.default_rng(0).normal(0, 2, (1, VOCAB)), dtype=torch.float32)
    top = int(logits.argmax())
    neighbour = Row(everything, stop_ids=(top,), bad_words=((top,), (9, top)))
    for params in (SamplingParams(temperature=0.0, min_tokens=9), SamplingParams(temperature=0.0)):
        batch = Batch()
        batch.put({0: Row(everything, prompt=[top], output=[top] * 2, stop_ids=(top,), bad_words=((top,),) * 3)})
        batch.sample(logits.clone(), [0])
        reused = Row(params, output=[9])
        batch.put({0: reused, 1: neighbour})
        assert batch.sample(logits.expand(2, -1).clone(), [0, 1])[0] == top


def test_features_of_a_row_do_not_depend_on_the_others_table_sizes():
    """Longer bad words and more stop ids widen the tables of rows that were there before."""
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    greedy = SamplingParams(temperature=0.0, min_tokens=9)
    first = Row(greedy, output=[4], stop_ids=(0,), bad_words=((4, 1),))
    batch = Batch()
    batch.put({3: first})
    batch.put({1: Row(greedy, output=[4] * 6, stop_ids=(5, 6, 7), bad_words=((4,) * 5 + (0,), (0,), (8,)))})
    assert batch.sample(logits.expand(2, -1).clone(), [3, 1]) == [2, 1]
    assert batch.sample(logits.expand(2, -1).clone(), [3, 1]) == [1, 1]  # 4 is no longer the latest token


def test_bad_words_match_the_output_only():
    logits = torch.tensor([0.0, 5.0, 4.0])
    greedy = SamplingParams(temperature=0.0)
    word = ((2, 1),)
    assert sample_once(logits, Row(greedy, prompt=[2], bad_words=word)) == [1]
    assert sample_once(logits, Row(greedy, prompt=[2], output=[2], bad_words=word)) == [2]
    assert sample_once(logits, Row(greedy, prompt=[2], output=[0], bad_words=word)) == [1]


def test_smp_02_masks_give_way_rather_than_let_a_token_in_that_is_not_allowed():
    """When bad words and min_tokens mask everything that is allowed, the token is still an allowed one."""
    logits = torch.tensor([9.0, 1.0, 2.0, 0.0])
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, allowed_token_ids=[1, 2], min_tokens=2, top_p=0.9)
        row = Row(params, stop_ids=(2,), bad_words=((1,),))
        assert sample_once(logits, row)[0] in (1, 2)


def test_smp_01_tiny_temperature_and_top_p_give_the_argmax():
    logits = torch.linspace(-50, 50, VOCAB)[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rows = [Row(SamplingParams(temperature=t), seed=s) for s, t in enumerate((0.0, 1e-3, 1e-6, 1e-10, 0.01))]
        rows += [Row(SamplingParams(temperature=1.0, top_p=p), seed=9) for p in (1e-4, 1e-30, 1e-300)]
        rows.append(Row(SamplingParams(temperature=2.0), seed=3))
        tokens = sample_once(logits.to(dtype), *rows)
        assert tokens[:-1] == [int(logits.to(dtype).argmax())] * 8
        assert tokens[-1:] == sample_once(logits.to(dtype), Row(SamplingParams(temperature=2.0), seed=3))


def test_smp_02_masked_tokens_never_win_in_a_mixed_batch():
    logits = torch.tensor(np.random.default_rng(1).normal(0, 1, VOCAB), dtype=torch.float32)
    best = logits.argsort(descending=True).tolist()
    greedy = Row(
        SamplingParams(temperature=0.0, min_tokens=4, logit_bias={best[0]: -100}, presence_penalty=1.0),
        stop_ids=(best[1],),
        bad_words=((best[2],),),
    )
    other = Row(SamplingParams(temperature=1.5, allowed_token_ids=best[4:6], repetition_penalty=1.3), seed=5)
    alone = sample_once(logits, Row(greedy.params, stop_ids=greedy.stop_ids, bad_words=greedy.bad_words))
    tokens = sample_once(logits, greedy, other)
    assert tokens[0] == alone[0] == best[3]
    assert tokens[1] in best[4:6]


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_smp_06_penalties_count_prompt_and_output_as_documented(penalty):
    """Token 0 is in the prompt, token 1 is not; from the first step on, and again after two of token 1."""
    value = 4.0 if penalty == "repetition_penalty" else 2.0
    row = Row(SamplingParams(temperature=0.0, **{penalty: value}), prompt=[0, 0, 3])
    batch = Batch(vocab=4)
    batch.put({0: row})
    logits = torch.tensor([[4.0, 3.0, -1.0, -9.0]])
    tokens = [batch.sample(logits.clone(), [0])[0] for _ in range(4)]
    assert (
        tokens
        == {
            "repetition_penalty": [1, 0, 0, 0],  # 4 / 4 < 3; then 3 / 4 < 4 / 4, both seen
            "presence_penalty": [0, 1, 0, 0],  # prompt tokens are free; then 2, 3; then 2, 1
            "frequency_penalty": [0, 1, 0, 1],  # 4, 3; 2, 3; 2, 1; 0, 1
        }[penalty]
    )


def test_extreme_repetition_penalties_keep_values_finite():
    logits = torch.tensor([5.0, -5.0, 0.0, 1.0])
    for value in (1e-300, 1e-30, 1e30, 1e300):
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                temperature=temperature, repetition_penalty=value, allowed_token_ids=[0, 3], top_p=0.99, min_p=0.01
            )
            # The seen token is either all but certain or all but impossible.
            assert sample_once(logits, Row(params, prompt=[0, 1, 2])) == [0 if value < 1 else 3]


def test_smp_08_temperature_zero_is_the_lowest_id_of_the_maxima_whatever_else_is_set():
    logits = torch.zeros(VOCAB)
    logits[[17, 42]] = 3.0
    for options in ({}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        row = Row(SamplingParams(temperature=0.0, seed=4, **options), seed=4)
        for others in ([], [Row(SamplingParams(temperature=1.0, top_k=50), seed=8)], [Row(SamplingParams(top_p=0.5))]):
            assert sample_once(logits, row, *others)[0] == 17


def frequencies(logits: torch.Tensor, params: SamplingParams, num_draws: int = 20000) -> np.ndarray:
    """How often each token is drawn over seeds, in one call."""
    tables = SamplingTables(1, len(logits), torch.device("cpu"))
    tables.set([slot_init(params, seed=77, token_ids=[1], num_prompt_tokens=1)])
    tokens = tables.sample(
        logits.expand(num_draws, -1),
        slots=np.zeros(num_draws, dtype=np.int64),
        device_slots=torch.zeros(num_draws, dtype=torch.int64),
        positions=torch.arange(1, num_draws + 1),
        token_table=torch.zeros(1, 8, dtype=torch.int32),
    )
    return np.bincount(tokens.numpy(), minlength=len(logits))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": VOCAB + 1},
        {"temperature": 2.0},
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
        {"logit_bias": {4: 3.0}, "repetition_penalty": 1.5, "top_p": 0.9},
    ],
    ids=str,
)
def test_smp_10_draws_follow_the_softmax_of_what_is_kept(options):
    params = SamplingParams(**options)
    logits = torch.tensor(np.random.default_rng(5).normal(0, 1, VOCAB), dtype=torch.float32)
    x = adjusted(Row(params, prompt=[1]), logits.numpy())
    kept, margin = kept_tokens(params, x)
    assert margin > MARGIN
    scaled = np.where(kept, x, -np.inf) / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    counts = frequencies(logits, params)
    assert not counts[~kept].any()
    assert (counts > 0).sum() > 1
    expected = probabilities * counts.sum()
    frequent = expected >= 5
    # Rare tokens are one cell of the test.
    cells = [(counts[frequent], expected[frequent])]
    if (rest := expected[~frequent].sum()) > 1:
        cells.append((np.array([counts[~frequent].sum()]), np.array([rest])))
    statistic = sum(((c - e) ** 2 / e).sum() for c, e in cells)
    freedom = sum(len(e) for _, e in cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # about one in ten thousand by chance


def test_unseeded_defaults_on_flat_logits_draw_many_tokens():
    assert (frequencies(torch.zeros(VOCAB), SamplingParams(), num_draws=200) > 0).sum() > VOCAB // 2


def test_noise_depends_on_seed_and_position_only():
    logits = torch.zeros(VOCAB)
    rows = [Row(SamplingParams(), seed=seed, prompt=[0] * length) for seed in (1, 2) for length in (3, 4)]
    together = sample_once(logits, *rows)
    assert len(set(together)) > 1
    for shift in range(4):
        shifted = [Row(row.params, seed=row.seed, prompt=list(row.prompt)) for row in rows[shift:] + rows[:shift]]
        torch.manual_seed(shift)
        assert sample_once(logits, *shifted) == together[shift:] + together[:shift]


@pytest.mark.parametrize("vocab", [1, 2, 5, 61, 129])
def test_small_and_odd_vocabularies(vocab):
    logits = torch.linspace(0, 1, vocab)
    for options in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}, {}):
        (token,) = sample_once(logits, Row(SamplingParams(**options), prompt=[0]))
        assert 0 <= token < vocab


def test_ties_at_the_edge_of_top_k_and_top_p_are_kept():
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        assert (frequencies(logits, SamplingParams(**options), num_draws=500) > 0).tolist() == [True] * 4 + [False]


def test_top_logprobs_are_raw_log_softmax_with_ranks():
    logits = torch.tensor(np.random.default_rng(3).normal(0, 3, (4, VOCAB)), dtype=torch.float32)
    expected = logits.double().log_softmax(dim=-1)
    chosen = torch.tensor([0, 5, 60, int(logits[3].argmax())])
    for num_top in (0, 1, 7, VOCAB):
        values = top_logprobs(logits, chosen, num_top)
        torch.testing.assert_close(
            values.logprobs.double(), expected.gather(1, chosen[:, None])[:, 0], atol=1e-5, rtol=0
        )
        wanted, ids = expected.topk(num_top, dim=-1)
        assert torch.equal(values.top_ids, ids)
        torch.testing.assert_close(values.top_logprobs.double(), wanted, atol=1e-5, rtol=0)
        ranks = (expected > expected.gather(1, chosen[:, None])).sum(dim=1) + 1
        assert torch.equal(values.ranks, ranks)


def test_the_top_of_equals_are_the_lowest_ids_in_any_batch():
    row = torch.tensor([1.0, -0.0, 3.0, 0.0, 3.0, -2.0, 1.0, 1.0, -2.0, -math.inf])
    for rows in (1, 2, 40):  # more than are ranked at once
        values = top_logprobs(row.bfloat16().expand(rows, -1), torch.zeros(rows, dtype=torch.int64), len(row))
        assert values.top_ids.tolist() == [[2, 4, 0, 6, 7, 1, 3, 5, 8, 9]] * rows
        assert torch.equal(values.top_logprobs[:, 2], values.logprobs)


def test_a_row_without_bias_is_not_touched_by_what_its_slot_had_before():
    logits = torch.linspace(1, 0, VOCAB)[None]
    batch = Batch()
    batch.put({0: Row(SamplingParams(temperature=0.0, logit_bias={5: 50.0})), 1: Row(SamplingParams(temperature=0.0))})
    assert batch.sample(logits.expand(2, -1).clone(), [0, 1]) == [5, 0]
    batch.put({0: Row(SamplingParams(temperature=0.0)), 1: Row(SamplingParams(logit_bias={7: 50.0}, temperature=0.0))})
    assert batch.sample(logits.expand(2, -1).clone(), [0, 1]) == [0, 7]


@pytest.mark.parametrize("vocab", [5, 32, 61, 64])
def test_masked_rows_choose_among_the_allowed_ids_and_leave_the_others_alone(vocab):
    """A mask is what `allowed_token_ids` would be, for one step and whatever other features the row has."""
    rng = np.random.default_rng(vocab)
    options: list[dict] = [
        {},
        {"temperature": 0.0},
        {"top_k": 3, "top_p": 0.7, "min_p": 0.01},
        {"repetition_penalty": 5.0},
    ]
    for _ in range(10):
        masked, allowed, plain = Batch(vocab=vocab), Batch(vocab=vocab), Batch(vocab=vocab)
        ids = [sorted(rng.choice(vocab, rng.integers(1, 4), replace=False).tolist()) for _ in options]
        for index, option in enumerate(options):
            row = {"seed": index, "prompt": [1, 2]}
            masked.put({index: Row(SamplingParams(**option), **row)})
            plain.put({index: Row(SamplingParams(**option), **row)})
            allowed.put({index: Row(SamplingParams(**option, allowed_token_ids=ids[index]), **row)})
        bits = np.zeros((len(options), -(-vocab // 32)), dtype=np.uint32)
        for row_bits, row_ids in zip(bits, ids):
            for id_ in row_ids:
                row_bits[id_ // 32] |= np.uint32(1) << np.uint32(id_ % 32)
        logits = torch.tensor(rng.normal(0, 3, (len(options), vocab)), dtype=torch.float32)
        slots = list(range(len(options)))
        free = plain.sample(logits, slots)
        limited = allowed.sample(logits, slots)
        chosen = rng.choice(len(options), rng.integers(1, len(options) + 1), replace=False)
        masks = TokenMasks(chosen, bits[chosen].view(np.int32))
        tokens = masked.sample(logits, slots, masks)
        assert tokens == [limited[slot] if slot in chosen else free[slot] for slot in slots]
