"""Steps with chunks of prompts over static buffers: what is padded changes nothing, whatever the mixture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from ahead import MIXED_SIZES, SIZES, poisoned, run_ahead
from hypothesis import given, settings
from test_decode_step import RecordedGraphs, state
from tiny_models import random_prompt

from qwen_engine import LLM, SamplingParams
from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.engine import mixed_step
from qwen_engine.engine.mixed_step import MAX_CHUNKS, MixedStep, _Rows, _Shape
from qwen_engine.engine.rank import graph_sizes

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(scope="module")
def llm(make_tiny_model) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_ahead(monkeypatch)
        llm = poisoned(make_tiny_model(), skip_tokenizer_init=True, kv_cache_bytes=2 << 20, max_model_len=128)
    with llm:
        yield llm


@pytest.fixture
def mixed(llm) -> MixedStep:
    return llm.core._executor.runner.mixed


def tokens(llm: LLM, prompts, params=GREEDY) -> list[list[int]]:
    llm.reset_prefix_cache()
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def sizes_run(mixed: MixedStep, monkeypatch) -> list[tuple[int, int]]:
    """(tokens, decoding rows) of the shapes that run from now on."""
    shapes, forward = [], mixed._forward

    def record(batches):
        shapes.extend((len(batch.token_slots), len(batch.decode_slots)) for batch in batches)
        return forward(batches)

    monkeypatch.setattr(mixed, "_forward", record)
    return shapes


@pytest.mark.parametrize(
    ("model", "num_ranks", "largest"), [("0.6B", 1, 8192), ("8B", 1, 1536), ("32B", 2, 1024), ("32B", 8, 4096)]
)
def test_large_models_are_launch_bound_up_to_fewer_tokens(model, num_ranks, largest):
    shapes = {  # hidden, intermediate, layers, heads
        "0.6B": (1024, 3072, 28, 16),
        "8B": (4096, 12288, 36, 32),
        "32B": (5120, 25600, 64, 64),
    }
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fixed = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }
    model_config = ModelConfig.from_dict({**fixed, **dict(zip(names, shapes[model]))})
    config = EngineConfig(model="unused", tensor_parallel_size=num_ranks)
    assert graph_sizes(config, model_config, 40960, CUDA).mixed[-1] == largest
    small = EngineConfig(model="unused", max_num_batched_tokens=300, enforce_eager=True)
    assert graph_sizes(small, model_config, 40960, CUDA).mixed[-1] == 320
    few = EngineConfig(model="unused", max_num_seqs=2)
    assert graph_sizes(few, model_config, 51, CUDA).mixed == (16, 32, 64, 128)  # 100 tokens at most
    assert not graph_sizes(small, model_config, 40960, CUDA).decode
    assert not graph_sizes(config, model_config, 40960, CPU).mixed


def test_a_step_is_padded_to_the_next_size_and_the_largest_run_at_their_own(llm, mixed, monkeypatch):
    monkeypatch.setattr(mixed_step, "MAX_CHUNKS_ONLY", 16)
    shapes = sizes_run(mixed, monkeypatch)
    for length in (2, 15, 16, 17, 48, 49, 100):
        tokens(llm, [random_prompt(length)], SamplingParams(max_tokens=1))
    assert shapes == [(16, 0), (16, 0), (16, 0), (48, 16), (48, 16), (49, 0), (100, 0)]


def test_a_step_of_more_chunks_than_there_is_room_for_runs_at_its_own_size(llm, mixed, monkeypatch):
    monkeypatch.setattr(mixed_step, "MAX_CHUNKS", 3)
    monkeypatch.setattr(mixed, "_inputs", torch.full_like(mixed._inputs, -1))
    shapes = sizes_run(mixed, monkeypatch)
    expected = [tokens(llm, [random_prompt(3, seed=number)])[0] for number in range(4)]
    shapes.clear()
    assert tokens(llm, [random_prompt(3, seed=number) for number in range(4)]) == expected
    assert shapes == [(12, 0)]
    assert MAX_CHUNKS == 64


def test_padding_writes_no_kv_but_that_of_the_computed_tokens(llm, mixed):
    """The last token of one row again and the last eleven of another, among 16."""
    llm.reset_prefix_cache()
    stream = llm.stream([random_prompt(5), random_prompt(20)], GREEDY)
    for _ in range(4):
        next(stream)
    rows = [(request.slot, list(request.block_ids)) for request in llm.core.scheduler.running]
    slots, counts = np.array([slot for slot, _ in rows]), np.array([1, 11])
    ends = llm.core._executor.runner.tables.computed_tokens[slots]
    before = state(llm)
    mixed.kv_cache.add_(1.0)  # so that every place that is written to changes
    with torch.inference_mode():
        assert mixed.run(slots, counts, ends - counts, ends).shape[0] == 12
    after = state(llm)
    kept = (before["kv"].view(torch.float32) + 1.0).view(torch.int32)
    changed = (kept != after["kv"]).any(dim=-1).any(dim=0).any(dim=0).any(dim=1)  # [blocks, rows of a block]
    computed = [(blocks, range(end - count, end)) for (_, blocks), count, end in zip(rows, counts, ends)]
    expected = {(blocks[position // 16], position % 16) for blocks, positions in computed for position in positions}
    assert {(int(block), int(row)) for block, row in changed.nonzero()} == expected
    for name in ("tokens", "lengths", "blocks"):
        assert torch.equal(after[name], before[name])
    mixed.kv_cache.copy_(before["kv"].view(torch.float32))
    assert len(list(stream)) > 8


def test_what_a_capture_runs_changes_nothing_between_two_steps(llm, mixed):
    prompts = [random_prompt(30), random_prompt(9)]
    expected = tokens(llm, prompts)
    llm.reset_prefix_cache()
    stream = llm.stream(prompts, GREEDY)
    seen = [next(stream) for _ in range(7)]
    before = state(llm)
    with torch.inference_mode():
        mixed.clear()
        assert [list(calls) for calls, _ in mixed.parts] == [["mixed"], ["chunks"]]
        for calls, sizes in mixed.parts:
            assert sizes
            for call, size in itertools.product(calls.values(), sizes):
                call(size)
    after = state(llm)
    assert all(torch.equal(after[name], before[name]) for name in before)
    last = {out.request_id: out for out in [*seen, *stream]}
    assert [out.outputs[0].token_ids for _, out in sorted(last.items(), key=lambda pair: int(pair[0]))] == expected


def test_graphs_are_replayed_for_padded_steps_only(llm, mixed):
    prompts = [random_prompt(length) for length in (5, 30, 60)]
    expected = [tokens(llm, [prompt])[0] for prompt in prompts]
    mixed.graphs = graphs = RecordedGraphs({name: call for calls, _ in mixed.parts for name, call in calls.items()})
    try:
        assert [tokens(llm, [prompt])[0] for prompt in prompts] == expected
        assert graphs.replays == [("chunks", 16), ("chunks", 48)]
        stream = llm.stream(prompts[:1], GREEDY)
        next(stream)
        other = llm.stream(prompts[1:2], GREEDY)
        next(other)
        assert graphs.replays[-1] == ("mixed", 48)
        assert [list(stream)[-1].outputs[0].token_ids, list(other)[-1].outputs[0].token_ids] == expected[:2]
    finally:
        mixed.graphs = None


@settings(max_examples=40)
@given(data=st.data())
def test_any_mixture_has_the_hidden_states_it_has_at_its_own_size(llm, data):
    """Chunks of several rows at any place of their prompts, beside decoding rows; both leave the same KV."""
    runner = llm.core._executor.runner
    mixed, tables = runner.mixed, runner.tables
    num_rows = data.draw(st.integers(1, 5))
    ends = np.array([data.draw(st.integers(2, 40)) for _ in range(num_rows)])
    wanted = sorted(data.draw(st.integers(1, 12)) for _ in range(num_rows))
    counts = np.minimum(np.array(wanted), ends - 1)
    order = np.argsort(counts, kind="stable")
    counts, ends = counts[order], ends[order]
    slots = np.random.default_rng(0).permutation(SIZES[-1])[:num_rows]
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    with torch.inference_mode():
        tables.token_table.copy_(torch.randint(0, 100, tables.token_table.shape, generator=rng))
        for row, slot in enumerate(slots):
            tables.block_tables[slot, :3] = torch.arange(3) + 3 * row
        kv = torch.randn(runner.kv_cache.shape, generator=rng)
        hidden, caches = [], []
        for sizes in ((), MIXED_SIZES):
            runner.kv_cache.copy_(kv)
            mixed.sizes = sizes
            hidden.append(mixed.run(slots, counts, ends - counts, ends).clone())
            caches.append(runner.kv_cache.clone())
    assert hidden[1].isfinite().all()
    # fp32 products of other shapes are summed in another order.
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches[0], caches[1], rtol=1e-4, atol=1e-4)
    runner.kv_cache.fill_(float("nan"))


@given(st.integers(1, 700), st.integers(0, 300), st.integers(0, 64))
def test_inputs_are_packed_at_aligned_places_and_filled_up_with_padding(num_tokens, num_decodes, num_chunks):
    shape = _Shape(num_tokens, num_decodes, num_chunks)
    values = {name: np.arange(max(1, length // 2)) + 7 for name, length in shape.parts.items() if length}
    values |= {name: np.empty(0) for name, length in shape.parts.items() if not length}
    packed = torch.from_numpy(shape.packed(values))
    assert packed.shape == (shape.num_inputs,)
    views = shape.views(packed)
    assert [len(view) for view in views.values()] == list(shape.parts.values())
    for name, view in views.items():
        assert (view.data_ptr() - packed.data_ptr()) % 16 == 0
        given_values = values[name]
        assert view[: len(given_values)].tolist() == given_values.tolist()
        rest = int(given_values[-1]) if name == "query_start" else -1
        assert (view[len(given_values) :] == rest).all()


@st.composite
def rows_of_a_step(draw):
    """Slots, counts, starts and ends: some rows that decode, then chunks."""
    counts = [1] * draw(st.integers(0, 5)) + draw(st.lists(st.integers(1, 30), max_size=6))
    if sum(counts) < 2:
        counts.append(2)
    starts = np.array([draw(st.integers(0, 50)) for _ in counts])
    counts = np.array(counts)
    return np.arange(len(counts)) + 3, counts, starts, starts + counts


@given(rows_of_a_step())
def test_the_halves_of_a_step_are_its_tokens_in_order(rows):
    counts = rows[1]
    whole, halves = _Rows(*rows), _Rows(*rows).halves()
    assert [half.shape.num_tokens for half in halves] == [counts.sum() // 2, counts.sum() - counts.sum() // 2]
    for name in ("token_slots", "positions"):
        assert np.concatenate([half.inputs[name] for half in halves]).tolist() == whole.inputs[name].tolist()
    for half in halves:  # every token belongs to one row, which ends at its last token
        inputs = half.inputs
        bounds = [*range(half.shape.num_decodes), *inputs["query_start"]]
        slots_of_rows = [*inputs["decode_slots"], *inputs["chunk_slots"]]
        lengths = [*inputs["decode_seq_lens"], *inputs["chunk_seq_lens"]]
        for slot, length, first, end in zip(slots_of_rows, lengths, bounds, bounds[1:]):
            assert set(inputs["token_slots"][first:end]) == {slot}
            assert inputs["positions"][first:end].tolist() == list(range(length - (end - first), length))


def test_steps_in_halves_give_the_tokens_of_whole_ones(llm, mixed, monkeypatch):
    prompts = [random_prompt(length, seed=length) for length in (90, 5, 33, 64, 50)]
    expected = tokens(llm, prompts)
    monkeypatch.setattr(mixed, "_is_overlapped", lambda shape: shape.num_tokens > 1)
    monkeypatch.setattr(mixed, "sizes", ())
    shapes = sizes_run(mixed, monkeypatch)
    assert tokens(llm, prompts) == expected
    assert len(shapes) % 2 == 0
    assert len(shapes) >= 2
