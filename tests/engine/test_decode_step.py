"""The decode step over static buffers: padding touches nothing, and a steady batch costs the host no copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from ahead import SIZES, poisoned, run_ahead
from tiny_models import random_prompt

from qwen_engine import LLM, SamplingParams
from qwen_engine.engine import cuda_graphs
from qwen_engine.engine.cuda_graphs import CudaGraphs, decode_sizes
from qwen_engine.errors import QwenEngineError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MIXED = [GREEDY, SamplingParams(temperature=0.9, seed=3, top_k=5, max_tokens=12, ignore_eos=True)]
PROMPTS = [random_prompt(length) for length in (5, 16, 31, 40)]


class RecordedGraphs:
    """Stands in for CudaGraphs on a CPU: a replay runs the call."""

    def __init__(self, calls) -> None:
        self.calls = calls
        self.replays: list[tuple[str, int]] = []

    def replay(self, name: str, size: int) -> None:
        self.replays.append((name, size))
        self.calls[name](size)


@pytest.fixture(scope="module")
def llm(make_tiny_model) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_ahead(monkeypatch)
        llm = poisoned(make_tiny_model(), skip_tokenizer_init=True, kv_cache_bytes=2 << 20, max_model_len=64)
    with llm:
        yield llm


def tokens(llm: LLM, prompts, params) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def state(llm: LLM) -> dict[str, torch.Tensor]:
    runner = llm.core._executor.runner
    tables = runner.tables
    return {
        "kv": runner.kv_cache.view(torch.int32).clone(),
        "tokens": tables.token_table.clone(),
        "lengths": tables.num_tokens.clone(),
        "blocks": tables.block_tables.clone(),
    }


def test_sizes_are_dense_where_padding_costs_most_and_end_at_the_limit():
    assert decode_sizes(1) == (1,)
    assert decode_sizes(13) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13)
    assert decode_sizes(256)[8:] == (10, 12, 14, 16, 20, 24, 28, *range(32, 129, 8), *range(144, 257, 16))
    assert decode_sizes(300)[-3:] == (272, 288, 300)
    for limit in range(1, 700):
        sizes = decode_sizes(limit)
        assert sizes[-1] == limit
        assert list(sizes) == sorted(set(sizes))


def test_cgr_01_a_padded_step_writes_the_new_token_of_each_live_slot_and_nothing_else(llm):
    """The slot that index -1 would mean, and every block, keep their bits."""
    stream = llm.stream(PROMPTS[:2], GREEDY)  # padded to three rows
    for _ in range(6):
        next(stream)
    live = [(request.slot, list(request.block_ids)) for request in llm.core.scheduler.running]
    before = state(llm)
    for _ in range(2):  # one step brings both their outputs
        next(stream)
    after = state(llm)
    changed = (before["kv"] != after["kv"]).any(dim=-1).any(dim=0).any(dim=0).any(dim=1)  # [blocks, rows of a block]
    written = {(int(block), int(row)) for block, row in changed.nonzero()}
    expected = set()
    for slot, blocks in live:
        length = int(before["lengths"][slot])
        assert int(after["lengths"][slot]) == length + 1
        position = length - 1
        expected.add((blocks[position // 16], position % 16))
        row = after["tokens"][slot].clone()
        row[length] = before["tokens"][slot, length]
        assert torch.equal(row, before["tokens"][slot])
    assert written == expected
    others = [slot for slot in range(SIZES[-1]) if slot not in [slot for slot, _ in live]]
    assert torch.equal(after["tokens"][others], before["tokens"][others])
    assert torch.equal(after["lengths"][others], before["lengths"][others])
    stream.close()


def test_cgr_05_what_a_capture_runs_changes_nothing_between_two_steps(llm):
    expected = tokens(llm, PROMPTS, GREEDY)
    stream = llm.stream(PROMPTS, GREEDY)
    seen = {out.request_id: out for _, out in zip(range(9), stream)}
    decode, before = llm.core._executor.runner.decode, state(llm)
    with torch.inference_mode():
        decode.clear()
        for size in SIZES:
            for call in decode.calls.values():
                call(size)
    after = state(llm)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not decode._logits.isnan().any()
    assert (decode._token_ids == 0).all()
    seen.update({out.request_id: out for out in stream})
    assert [out.outputs[0].token_ids for _, out in sorted(seen.items(), key=lambda pair: int(pair[0]))] == expected


def test_cgr_02_cgr_04_sequences_grow_to_the_context_limit_and_short_ones_follow_in_their_slots(llm, make_tiny_model):
    longest = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    with LLM(make_tiny_model(), device="cpu", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4) as plain:
        for length in (47, 48, 49, 63):
            prompts = [random_prompt(length, seed=length), random_prompt(40, seed=length)]
            expected = [tokens(plain, prompts, longest), tokens(plain, [[7], [8, 9]], GREEDY)]
            assert [len(row) for row in expected[0]] == [64 - length, 24]
            assert [tokens(llm, prompts, longest), tokens(llm, [[7], [8, 9]], GREEDY)] == expected


def test_a_steady_batch_sends_nothing_to_the_device(llm, monkeypatch):
    tables, copies = llm.core._executor.runner.tables, []
    to_device = tables.to_device
    stream = llm.stream(PROMPTS[:1], SamplingParams(temperature=0.7, seed=1, max_tokens=11, ignore_eos=True))
    for _ in range(3):
        next(stream)
    monkeypatch.setattr(tables, "to_device", lambda array: copies.append(array) or to_device(array))
    assert len(list(stream)) == 8
    assert not copies  # prompt of 5 and 11 tokens: no new block either
    assert len(tokens(llm, PROMPTS[:2], GREEDY)) == 2
    assert copies


def test_graphs_are_replayed_back_to_back_and_the_full_sampler_replaces_the_second(llm):
    """Whichever way a row's token is chosen, it is the same token."""
    penalised = [*MIXED, dataclasses.replace(MIXED[1], seed=4), dataclasses.replace(GREEDY, presence_penalty=0.5)]
    expected = [tokens(llm, PROMPTS, params) for params in (penalised, MIXED * 2, GREEDY)]
    decode = llm.core._executor.runner.decode
    decode.graphs = graphs = RecordedGraphs(decode.calls)
    try:
        for params, outputs, choice in zip((penalised, MIXED * 2, GREEDY), expected, (None, "filtered", "plain")):
            graphs.replays.clear()
            assert tokens(llm, PROMPTS, params) == outputs
            step = [("forward", 7)] if choice is None else [("forward", 7), (choice, 7)]
            assert graphs.replays == step * 11
        assert expected[0][:2] == expected[1][:2]
    finally:
        decode.graphs = None


def test_a_capture_that_fails_names_its_size_and_the_way_out():
    graphs = CudaGraphs(torch.device("cpu"))  # has no streams
    with pytest.raises(QwenEngineError, match=r"CUDA graph of 24 tokens failed \(.*\); enforce_eager=True"):
        graphs._capture_size({"forward": lambda size: None}, 24)


def test_the_memory_of_graphs_is_the_first_and_as_many_times_the_second_as_there_are_more(monkeypatch):
    graphs, captured = CudaGraphs(torch.device("cpu")), []
    readings = iter([10_000, 9_000, 8_990, 8_490, 8_470])
    monkeypatch.setattr(graphs, "_free_bytes", lambda: next(readings))
    monkeypatch.setattr(graphs, "_capture_size", lambda calls, size: captured.append(size))
    monkeypatch.setattr(cuda_graphs.torch.cuda, "synchronize", lambda device: None)
    assert graphs.measure(({}, (1, 2, 4, 8)), ({}, (3, 5))) == 1000 + 3 * 10 + 500 + 20
    assert captured == [8, 4, 5, 3]
    readings = iter([500, 600])  # another process has freed memory meanwhile
    monkeypatch.setattr(graphs, "_free_bytes", lambda: next(readings))
    assert graphs.measure(({}, (1,))) == 0
