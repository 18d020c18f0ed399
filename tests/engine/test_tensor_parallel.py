"""Several ranks over gloo on the CPU give the tokens of one rank, for every feature of the engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ahead import IN_WORKERS, SIZES, assert_nothing_in_flight, run_ahead
from fault_tools import plant
from safetensors.torch import load_file, save_file
from tiny_models import random_prompt

from qwen_engine import LLM, SamplingParams
from qwen_engine.engine import mixed_step
from qwen_engine.engine.mixed_step import _Rows
from qwen_engine.engine.rank import RankSetup
from qwen_engine.errors import ConfigError, EngineDeadError

PROMPTS = [random_prompt(length) for length in (1, 15, 16, 17, 40, 83, 120)]
SHARED = random_prompt(64, seed=5)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True, n=3),
    SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, max_tokens=24, ignore_eos=True, min_p=0.02),
    SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, seed=5, logit_bias={5: 3.0}, allowed_token_ids=list(range(1, 200))),
    SamplingParams(temperature=1.0, seed=6, stop_token_ids=list(range(120)), min_tokens=10, max_tokens=30),
]
FILTERED = [
    SamplingParams(temperature=1.0, seed=number, top_k=(0, 5, 20)[number % 3], top_p=0.8, min_p=0.01, ignore_eos=True)
    for number in range(len(PROMPTS))
]
TINY_POOL_TOKENS = 256


def engine(folder: Path, **options) -> LLM:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "debug_checks": True, **options}
    return LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **options)


def kv_bytes(tokens: int, ranks: int, kv_heads: int = 2) -> int:
    """KV bytes per rank for a pool of `tokens` tokens of the tiny model in fp32."""
    return tokens * 3 * 2 * max(1, kv_heads // ranks) * 32 * 4


def run(llm: LLM, num_passes: int = 4) -> list:
    """Everything the engine says about a workload: cold, then warm, then with a shared prefix, which the last time
    tables have in common when they are made."""
    seen = []
    with_prefix = [SHARED + prompt for prompt in PROMPTS]
    for prompts in (PROMPTS, PROMPTS, with_prefix, with_prefix)[:num_passes]:
        for out in llm.generate(prompts, PARAMS, use_tqdm=False):
            logprobs = [sorted(row) for row in out.outputs[0].logprobs or []]
            prompt_logprobs = [sorted(row) for row in out.prompt_logprobs or [] if row]
            seen.append(
                (
                    [(s.token_ids, s.finish_reason) for s in out.outputs],
                    out.num_cached_tokens,
                    logprobs,
                    prompt_logprobs,
                )
            )
    return seen


@pytest.fixture
def ahead(tmp_path, monkeypatch):
    """Engines of several ranks run one step ahead, and pad their decode steps, as on GPUs."""
    run_ahead(monkeypatch)
    plant(tmp_path, *IN_WORKERS)
    monkeypatch.syspath_prepend(tmp_path)
    return {"max_num_seqs": SIZES[-1]}


def seeded(seen: list) -> list:
    """Tokens of the requests that do not depend on what the engine has done before."""
    fixed = [params.seed is not None or params.is_greedy for params in PARAMS]
    return [entry[0] for number, entry in enumerate(seen) if fixed[number % len(fixed)]]


@pytest.fixture(scope="module")
def expected(make_tiny_model):
    with engine(make_tiny_model()) as llm:
        return run(llm)


@pytest.fixture(scope="module")
def two_ranks(make_tiny_model):
    with engine(make_tiny_model(), tensor_parallel_size=2) as llm:
        yield llm


def test_tpw_02_every_feature_gives_the_tokens_of_one_rank(two_ranks, expected):
    assert run(two_ranks) == expected


def test_filters_alone_are_seen_to_by_every_rank_for_itself(two_ranks, make_tiny_model, monkeypatch):
    """Unlike other features, which rank 0 sees to."""
    with engine(make_tiny_model()) as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, FILTERED, use_tqdm=False)]
    monkeypatch.setattr(two_ranks.core._executor.runner.sampler, "choose", None)
    outputs = two_ranks.generate(PROMPTS, FILTERED, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == expected


def test_steps_in_halves_whose_sums_overlap_give_the_tokens_of_one_rank(make_tiny_model, expected, monkeypatch):
    monkeypatch.setenv("QWEN_ENGINE_OVERLAPPED_TOKENS", "8")  # for the other rank
    monkeypatch.setattr(mixed_step, "MIN_OVERLAPPED_TOKENS", 8)
    with engine(make_tiny_model(), tensor_parallel_size=2) as llm:
        monkeypatch.setattr(_Rows, "halves", lambda rows, halves=_Rows.halves: seen.append(1) or halves(rows))
        seen = []
        outputs = run(llm, num_passes=1)
    assert len(seen) > 5
    assert outputs == expected[: len(outputs)]


def test_every_feature_gives_the_tokens_of_one_rank_where_kv_heads_are_held_twice(make_tiny_model, expected):
    with engine(make_tiny_model(), tensor_parallel_size=4) as llm:  # of 2 KV heads
        outputs = run(llm, num_passes=1)
    assert outputs == expected[: len(outputs)]


def test_mem_02_pre_01_all_ranks_use_the_smallest_pool_and_preemption_in_it_changes_nothing(
    make_tiny_model, expected, ahead, monkeypatch
):
    true_blocks = RankSetup.num_kv_blocks
    monkeypatch.setattr(RankSetup, "num_kv_blocks", lambda self, runner: 2 * true_blocks(self, runner))  # rank 0 alone
    pool = kv_bytes(TINY_POOL_TOKENS, 2)
    with engine(make_tiny_model(), tensor_parallel_size=2, kv_cache_bytes=pool, **ahead) as llm:
        assert llm._core.scheduler.block_manager.num_blocks == TINY_POOL_TOKENS // 16
        outputs = run(llm)
        assert_nothing_in_flight(llm)
        preemptions = llm._core.scheduler.num_preemptions
    assert preemptions > 0
    assert [entry[0] for entry in outputs] == [entry[0] for entry in expected]


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ({"tie_word_embeddings": True, "attention_bias": True}, 2),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 3),  # the vocabulary of 503 needs padding
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, 2),
    ],
    ids=["tied_and_bias", "three_ranks", "one_kv_head"],
)
def test_other_shapes_give_the_tokens_of_one_rank(overrides, ranks, make_tiny_model):
    folder = make_tiny_model(**overrides)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=20)
    outputs = []
    for size in (1, ranks):
        with engine(folder, tensor_parallel_size=size) as llm:
            outputs.append([out.outputs[0] for out in llm.generate(PROMPTS[:4], params, use_tqdm=False)])
    for alone, sharded in zip(*outputs):
        assert sharded.token_ids == alone.token_ids
        for row, reference in zip(sharded.logprobs, alone.logprobs):
            assert all(
                value.logprob == pytest.approx(reference[token].logprob, abs=1e-4) for token, value in row.items()
            )
            assert max(row) < 503


def test_tpw_06_columns_that_pad_the_vocabulary_are_never_chosen_nor_weighed(make_tiny_model, tmp_path):
    folder = tmp_path / "negative"
    shutil.copytree(make_tiny_model(vocab_size=101), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 50.0  # stays the largest part of every hidden state,
    weights["lm_head.weight"][:, 0] = -10.0  # so that every logit is far below the zero of a column that is no token
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sampled = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=20),
        SamplingParams(seed=1, **sampled),
        SamplingParams(seed=2, top_p=0.9, **sampled),
        SamplingParams(seed=3, top_k=200, logprobs=20, **sampled),
        SamplingParams(seed=4, min_p=0.01, repetition_penalty=1.2, **sampled),
    ]
    prompts = [random_prompt(10 + number, vocab_size=101) for number in range(len(params))]
    outputs = []
    for size in (1, 2):
        with engine(folder, tensor_parallel_size=size) as llm:  # each alone: a mixed batch chooses in one way for all
            results = [llm.generate([prompt], own, use_tqdm=False)[0] for prompt, own in zip(prompts, params)]
        outputs.append([out.outputs[0] for out in results])
    for alone, sharded in zip(*outputs):
        assert max(sharded.token_ids) < 101
        assert sharded.token_ids == alone.token_ids
        for row, reference in zip(sharded.logprobs or [], alone.logprobs or []):
            assert row.keys() == reference.keys()
            assert all(row[token].logprob == pytest.approx(reference[token].logprob, abs=1e-4) for token in row)


def test_tpw_04_a_split_that_cannot_work_is_refused_before_anything_starts(make_tiny_model):
    with pytest.raises(ConfigError, match=r"4 heads and 2 KV heads cannot be split over 3 ranks"):
        engine(make_tiny_model(), tensor_parallel_size=3)


def test_aborts_leave_all_ranks_in_step(make_tiny_model, expected, ahead):
    with engine(make_tiny_model(), tensor_parallel_size=2, **ahead) as llm:
        stream = llm.stream(PROMPTS, PARAMS)
        for _ in range(9):
            next(stream)
            # A step that is done but not yet read is not late, however long its reader takes.
            for step in llm.core._executor._workers.in_flight:
                step.deadline = 0.0
        assert len(llm.core._in_flight) == 1
        stream.close()
        assert_nothing_in_flight(llm)
        llm._core.scheduler.check()
        after = run(llm)
    assert seeded(after) == seeded(expected)


def test_ipc_02_two_engines_in_one_process_do_not_meet_and_one_that_fails_does_not_harm_the_other(
    two_ranks, make_tiny_model, expected, monkeypatch
):
    with engine(make_tiny_model(), tensor_parallel_size=2) as llm:
        assert run(llm) == expected
        assert seeded(run(two_ranks)) == seeded(expected)
        # The debug checks notice a rank that computes other rows.
        runner = llm._core._executor.runner
        execute = type(runner)._check_agreement
        monkeypatch.setattr(
            type(runner), "_check_agreement", lambda self, plan, starts, ids: execute(self, plan, starts + 1, ids)
        )
        with pytest.raises(EngineDeadError, match="ranks disagree about step"):
            llm.generate([PROMPTS[2]], PARAMS[0], use_tqdm=False)
        monkeypatch.undo()
    assert seeded(run(two_ranks)) == seeded(expected)
