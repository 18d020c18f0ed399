"""`deterministic=True`: the bits of a request, tokens and log-probabilities, depend on the request alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ahead import SIZES, run_ahead
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TINY, random_prompt

from qwen_engine import LLM, SamplingParams
from qwen_engine.engine import mixed_step

SHARED = random_prompt(48, seed=9)
PROMPTS = [*(random_prompt(length) for length in (1, 15, 16, 17, 40, 83)), SHARED + random_prompt(20)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3},
]
PARAMS = [
    SamplingParams(
        **kind, seed=number, max_tokens=24, ignore_eos=True, logprobs=5, prompt_logprobs=3 if number % 2 else None
    )
    for number, kind in enumerate((KINDS * 2)[: len(PROMPTS)])
]
TINY_POOL_BYTES = 144 * 2 * TINY["num_hidden_layers"] * TINY["num_key_value_heads"] * TINY["head_dim"]  # values
DTYPES = {"float32": 4, "bfloat16": 2}


def engine(folder: Path, dtype: str, **options: Any) -> LLM:
    options = {"max_num_seqs": 8, "deterministic": True, **options}
    return LLM(folder, device="cpu", dtype=dtype, skip_tokenizer_init=True, **options)


def bits(llm: LLM, numbers: Sequence[int]) -> list[tuple]:
    """All that comes out of these prompts together; floats are compared with ==."""
    outputs = llm.generate([PROMPTS[n] for n in numbers], [PARAMS[n] for n in numbers], use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs) for out in outputs]


def alone(llm: LLM, numbers: Sequence[int] = range(len(PROMPTS))) -> list[tuple]:
    """Every prompt by itself, cold."""
    seen = []
    for number in numbers:
        llm.reset_prefix_cache()
        seen += bits(llm, [number])
    return seen


EVERYTHING = range(len(PROMPTS))


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(dtype: str, make_tiny_model: Callable[..., Path]):
    with engine(make_tiny_model(), dtype) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[tuple]:
    return alone(llm)


def test_the_option_makes_a_difference(dtype, make_tiny_model):
    """Without it these batches have other bits, so that the tests below can fail."""
    with engine(make_tiny_model(), dtype, deterministic=False) as llm:
        by_itself = alone(llm)
    with engine(make_tiny_model(), dtype, deterministic=False, max_num_batched_tokens=11) as llm:
        assert bits(llm, EVERYTHING) != by_itself


def test_repeated_batched_and_behind_a_cached_prefix(llm, expected):
    assert alone(llm) == expected
    llm.reset_prefix_cache()
    assert bits(llm, EVERYTHING) == expected
    assert bits(llm, EVERYTHING) == expected  # warm


def test_a_prefix_that_another_request_has_computed(llm, expected):
    llm.reset_prefix_cache()
    llm.generate([SHARED + random_prompt(3)], SamplingParams(max_tokens=1), use_tqdm=False)
    out = llm.generate([PROMPTS[-1]], PARAMS[-1], use_tqdm=False)[0]
    assert out.num_cached_tokens == len(SHARED)
    assert (out.outputs[0].token_ids, out.outputs[0].logprobs) == expected[-1][:2]


@pytest.mark.parametrize("max_num_batched_tokens", [8, 21, 100])
def test_prompts_in_chunks(max_num_batched_tokens, dtype, expected, make_tiny_model):
    with engine(make_tiny_model(), dtype, max_num_batched_tokens=max_num_batched_tokens) as llm:
        assert bits(llm, EVERYTHING) == expected


@pytest.mark.parametrize("block_size", [8, 32])
def test_blocks_of_another_size(block_size, dtype, expected, make_tiny_model):
    with engine(make_tiny_model(), dtype, block_size=block_size) as llm:
        assert bits(llm, EVERYTHING) == expected


def test_pre_01_preempted_in_a_tiny_pool(dtype, expected, make_tiny_model):
    pool = TINY_POOL_BYTES * DTYPES[dtype]
    with engine(make_tiny_model(), dtype, kv_cache_bytes=pool, max_num_batched_tokens=24) as llm:
        assert bits(llm, EVERYTHING) == expected
        assert llm.core.scheduler.num_preemptions > 0


def test_padded_steps_that_run_ahead(dtype, expected, make_tiny_model, monkeypatch):
    run_ahead(monkeypatch)
    with engine(make_tiny_model(), dtype, max_num_seqs=SIZES[-1], max_num_batched_tokens=40) as llm:
        assert bits(llm, EVERYTHING) == expected


@settings(max_examples=15)
@given(batch=st.lists(st.sampled_from(EVERYTHING), min_size=1, max_size=8), cold=st.booleans())
def test_any_batch(llm, expected, batch, cold):
    if cold:
        llm.reset_prefix_cache()
    assert bits(llm, batch) == [expected[number] for number in batch]


def test_two_ranks_with_themselves_in_halves_whose_sums_overlap_too(make_tiny_model, monkeypatch):
    """In bf16, where the sum is rounded."""
    options = {"tensor_parallel_size": 2, "debug_checks": True}
    with engine(make_tiny_model(), "bfloat16", **options) as llm:
        by_itself = alone(llm)
        llm.reset_prefix_cache()
        assert bits(llm, EVERYTHING) == by_itself
    monkeypatch.setenv("QWEN_ENGINE_OVERLAPPED_TOKENS", "8")  # for the other rank
    monkeypatch.setattr(mixed_step, "MIN_OVERLAPPED_TOKENS", 8)
    with engine(make_tiny_model(), "bfloat16", max_num_batched_tokens=24, **options) as llm:
        assert bits(llm, EVERYTHING) == by_itself


def test_the_sum_of_four_ranks_has_one_order(make_tiny_model):
    """That of a backend depends on the size of what is summed."""
    numbers = [0, 3, 6]
    with engine(make_tiny_model(), "float32", tensor_parallel_size=4) as llm:
        by_itself = alone(llm, numbers)
        llm.reset_prefix_cache()
        assert bits(llm, numbers) == by_itself
