"""Decode steps as CUDA graphs on a GPU: the tokens of eager steps, the same bits every time, and no byte more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_decode_step import state
from test_engine_gpu import MIXED_PARAMS
from tiny_models import random_prompt

from qwen_engine import LLM, SamplingParams
from qwen_engine.engine.cuda_graphs import decode_sizes
from qwen_engine.engine.decode_step import DecodeStep
from qwen_engine.errors import QwenEngineError
from qwen_engine.kernels.gpu.common import pdl_options

pytestmark = pytest.mark.gpu

MAX_NUM_SEQS = 13
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
REPLAYS = 3000


def engine(folder, **options) -> LLM:
    options = {"dtype": "float32", "max_num_seqs": MAX_NUM_SEQS, "kv_cache_bytes": 64 << 20, **options}
    return LLM(folder, device="cuda", **options)


def tokens(llm: LLM, prompts, params) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def graph(make_tiny_model) -> Iterator[LLM]:
    with engine(make_tiny_model(), skip_tokenizer_init=True) as llm:
        decode = llm.core._executor.runner.decode
        assert decode.sizes == decode_sizes(MAX_NUM_SEQS)
        assert decode.graphs is not None
        assert llm.core._executor.runner.mixed.graphs is decode.graphs
        assert llm.core._executor.max_steps_in_flight == 2
        yield llm


@pytest.fixture(scope="module")
def eager(make_tiny_model) -> Iterator[LLM]:
    """Every step at its own size."""
    with engine(make_tiny_model(), skip_tokenizer_init=True, enforce_eager=True) as llm:
        runner = llm.core._executor.runner
        assert runner.decode.graphs is None
        assert runner.mixed.graphs is None
        assert runner.mixed.sizes
        runner.mixed.sizes = ()
        yield llm


@pytest.mark.parametrize(
    "kinds",
    [[GREEDY], [*MIXED_PARAMS, GREEDY], MIXED_PARAMS[:2], [*MIXED_PARAMS[1:4], GREEDY]],
    ids=["greedy", "all", "plain", "filtered"],
)
def test_graphs_give_the_tokens_of_eager_steps_while_requests_join_and_leave(kinds, graph, eager):
    prompts = [random_prompt(1 + 17 * number % 230) for number in range(40)]
    params = [kinds[number % len(kinds)] for number in range(40)]
    expected = tokens(eager, prompts, params)
    graph.reset_prefix_cache()
    assert tokens(graph, prompts, params) == expected
    assert tokens(graph, prompts, params) == expected  # warm
    for prompt, param, row in zip(prompts[:4], params[:4], expected):
        assert tokens(graph, [prompt], param) == [row]
    graph.core.scheduler.check()


def test_every_size_gives_the_tokens_of_eager_steps(graph, eager):
    for rows in range(1, MAX_NUM_SEQS + 1):
        prompts = [random_prompt(3 + number, seed=rows) for number in range(rows)]
        assert tokens(graph, prompts, GREEDY) == tokens(eager, prompts, GREEDY)


def test_mixed_steps_of_every_size_are_replayed_and_give_the_tokens_of_eager_steps(graph, eager, monkeypatch):
    """Prompts of lengths around each size, alone, together, and beside a row that decodes."""
    mixed, replayed = graph.core._executor.runner.mixed, set()
    replay = mixed.graphs.replay
    monkeypatch.setattr(mixed.graphs, "replay", lambda *key: replayed.add(key) or replay(*key))
    for size in (size for size in mixed.sizes if size <= 384):
        prompts = [random_prompt(length, seed=size) for length in (size, size - 1, size // 3 + 2, 2, 9)]
        outputs = []
        for llm in (eager, graph):
            llm.reset_prefix_cache()
            outputs.append([tokens(llm, [prompt], GREEDY) for prompt in prompts[:2]])
            llm.reset_prefix_cache()
            outputs[-1].append(tokens(llm, prompts, GREEDY))
            llm.reset_prefix_cache()
            first = llm.stream([[3, 1, 4]], GREEDY)
            next(first)
            outputs[-1].append(tokens(llm, prompts[1:2], GREEDY))
            outputs[-1].append(list(first)[-1].outputs[0].token_ids)
        assert outputs[0] == outputs[1]
        assert ("chunks" if size <= 256 else "mixed", size) in replayed
    assert {("mixed", 64), ("mixed", 384)} <= replayed


def test_the_states_of_a_replayed_mixed_step_have_the_same_bits_every_time(graph):
    graph.reset_prefix_cache()
    assert tokens(graph, [random_prompt(100, seed=8)], GREEDY)
    mixed = graph.core._executor.runner.mixed
    torch.cuda.synchronize()
    mixed.graphs.replay("chunks", 128)
    first, allocated = mixed._hidden[:100].clone(), torch.cuda.memory_allocated()
    for number in range(REPLAYS):
        mixed.graphs.replay("chunks", 128)
        if number % 50 == 0:
            assert torch.equal(mixed._hidden[:100], first)
    assert torch.cuda.memory_allocated() == allocated


def test_the_demo_writes_the_same_with_graphs_and_without():
    prompts = ["def mean(data):", "The Zen of Python", "你好", "import os"]
    params = [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=2, max_tokens=60)] * 2
    texts = []
    for enforce_eager in (False, True):
        with engine("demo", enforce_eager=enforce_eager) as llm:
            texts.append([out["text"] for out in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


def test_kernels_that_overlap_give_the_tokens_of_kernels_that_do_not(make_tiny_model, graph, monkeypatch):
    prompts = [random_prompt(1 + 17 * number) for number in range(MAX_NUM_SEQS)]
    params = [MIXED_PARAMS[number % len(MIXED_PARAMS)] for number in range(MAX_NUM_SEQS)]
    overlapped = tokens(graph, prompts, params)
    assert pdl_options(torch.device("cuda", 0))["PDL"]
    monkeypatch.setenv("QWEN_ENGINE_PDL", "0")
    pdl_options.cache_clear()
    try:
        assert not pdl_options(torch.device("cuda", 0))["PDL"]
        with engine(make_tiny_model(), skip_tokenizer_init=True) as llm:
            assert tokens(llm, prompts, params) == overlapped
    finally:
        pdl_options.cache_clear()


def test_sequences_reach_the_context_limit_in_graphs(graph, eager):
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    prompts = [random_prompt(length) for length in (400, 480, 511, 496, 495)]
    outputs = tokens(graph, prompts, params)
    assert [len(row) for row in outputs] == [112, 32, 1, 16, 17]
    assert outputs == tokens(eager, prompts, params)


def test_a_replay_gives_the_same_bits_every_time_and_takes_no_memory(graph):
    stream = graph.stream([random_prompt(length) for length in (5, 100, 250)] * 3, GREEDY)
    for _ in range(30):
        next(stream)
    decode = graph.core._executor.runner.decode
    torch.cuda.synchronize()
    decode.graphs.replay("forward", 10)
    first, allocated = decode._logits[:10].clone(), torch.cuda.memory_allocated()
    for number in range(REPLAYS):
        decode.graphs.replay("forward", 10)
        if number % 50 == 0:
            assert torch.equal(decode._logits[:10], first)
    assert torch.cuda.memory_allocated() == allocated
    assert (first[9] == 0).all()  # a padding row
    stream.close()


def test_memory_is_flat_over_many_steps(graph):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=200, ignore_eos=True)
    prompts = [random_prompt(20, seed=number) for number in range(MAX_NUM_SEQS)]
    tokens(graph, prompts, params)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        tokens(graph, prompts, params)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_cgr_01_padding_rows_of_a_graph_leave_poisoned_and_live_kv_alone(make_tiny_model, eager):
    prompts = [random_prompt(20 + number) for number in range(9)]  # padded to ten rows
    expected = tokens(eager, prompts, GREEDY)
    with engine(make_tiny_model(), skip_tokenizer_init=True, kv_cache_bytes=2 << 20) as llm:
        llm.core._executor.runner.kv_cache.fill_(float("nan"))
        stream = llm.stream(prompts, GREEDY)
        for _ in range(27):
            next(stream)
        torch.cuda.synchronize()
        before, live = state(llm), [list(request.block_ids) for request in llm.core.scheduler.running]
        for _ in range(9):
            next(stream)
        torch.cuda.synchronize()
        after = state(llm)
        changed = (before["kv"] != after["kv"]).any(dim=-1).any(dim=0).any(dim=0).any(dim=1).nonzero().tolist()
        assert len(live) == 9
        assert {block for block, _ in changed} <= {block for blocks in live for block in blocks}
        # The step that was read has written one row of a block for each request, the one ahead of it another.
        assert 9 <= len(changed) <= 18
        stream.close()
        assert tokens(llm, prompts, GREEDY) == expected


def test_the_pool_leaves_room_for_the_graphs(make_tiny_model):
    _, total = torch.cuda.mem_get_info()
    options = {"kv_cache_bytes": None, "gpu_memory_utilization": 0.05, "max_num_seqs": 128}
    with engine(make_tiny_model(), skip_tokenizer_init=True, **options) as llm:
        free, _ = torch.cuda.mem_get_info()
        assert total - free < 0.05 * total + (1 << 30)
        assert len(tokens(llm, [[1, 2, 3]] * 128, GREEDY)) == 128


def test_a_capture_that_fails_names_its_size_and_the_way_out(make_tiny_model, monkeypatch):
    forward = DecodeStep._forward

    def synchronising(self: DecodeStep, size: int) -> None:
        forward(self, size)
        if torch.cuda.is_current_stream_capturing():
            self._token_ids.tolist()

    monkeypatch.setattr(DecodeStep, "_forward", synchronising)
    with pytest.raises(QwenEngineError, match=r"CUDA graph of 13 tokens failed .*enforce_eager=True"):
        engine(make_tiny_model(), skip_tokenizer_init=True)
    monkeypatch.undo()
    with engine(make_tiny_model(), skip_tokenizer_init=True) as llm:
        assert len(tokens(llm, [[1, 2, 3]], GREEDY)[0]) == 40
