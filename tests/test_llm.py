"""The public API on tiny models: what goes in, what comes out, and that nothing of one call is left for the next."""

from __future__ import annotations

import functools
import gc
import json
import linecache
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from ahead import assert_idle
from tiny_models import (
    BYTES_PER_BLOCK,
    greedy_tokens,
    random_prompt,
    save_tiny_model,
    save_tokenizer,
    train_tokenizer,
)

from qwen_engine import LLM, RequestOutput, SamplingParams
from qwen_engine.errors import ConfigError, EngineDeadError, RequestError

VOCAB = 400  # the tokenizer has fewer: ids above its own are padding rows of the embedding
EOS, SECOND_EOS = 2, 0
NUM_INTERRUPTS = 25
TEXT = "The quick brown fox says hello world, and the lazy dog answers: 東京 👍 naïve. "
MAKE: dict[str, Any] = {"device": "cpu", "max_num_seqs": 16, "kv_cache_bytes": 256 * BYTES_PER_BLOCK}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, a chat template, two EOS ids and default sampling parameters."""
    folder = save_tiny_model(tmp_path_factory.mktemp("text"), vocab_size=VOCAB, eos_token_id=EOS)
    save_tokenizer(folder, train_tokenizer([TEXT] * 4))
    generation = {"eos_token_id": [EOS, SECOND_EOS], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **MAKE) as engine:
        yield engine


@pytest.fixture(autouse=True)
def whole_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the shared engine as it found it."""
    yield
    if "llm" in request.fixturenames:
        assert_idle(request.getfixturevalue("llm"))


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True, **options})


def seeded(seed: int, max_tokens: int = 24, **options: Any) -> SamplingParams:
    """Varied text that repeats by seed."""
    options = {"temperature": 1.0, "ignore_eos": True, **options}
    return SamplingParams(seed=seed, max_tokens=max_tokens, **options)


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (out,) = run(llm, [prompt], params)
    return out


def tokens(outs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in out.outputs] for out in outs]


# What goes in


def test_every_form_of_a_prompt_is_the_same_request(llm):
    ids = llm.encode("hello world")
    expected = one(llm, "hello world", greedy())["token_ids"]
    forms = ["hello world", ["hello world"], ids, [ids], tuple(ids), [tuple(ids)]]
    forms += [{"prompt": "hello world"}, [{"prompt_token_ids": ids}], {"prompt_token_ids": tuple(ids), "prompt": "x"}]
    forms += [np.array(ids), [np.array(ids)], list(np.array(ids)), [list(np.array(ids))], torch.tensor([ids])]
    forms += [{"prompt_token_ids": np.array(ids)}, {"prompt_token_ids": list(torch.tensor(ids))}]
    for form in forms:
        (out,) = run(llm, form, greedy())
        assert out["token_ids"] == expected
        assert out.prompt_token_ids == ids
        assert out.finished
    assert one(llm, "hello world", greedy()).prompt == "hello world"
    assert run(llm, [], greedy()) == []
    assert run(llm, range(3, 6), greedy())[0].prompt_token_ids == [3, 4, 5]


BAD_PROMPTS: list[Any] = [
    "",
    [""],
    [[]],
    [-1],
    [VOCAB],
    [2**31],
    [2**63],
    [10**5000],
    [[1.5]],
    [1.5],
    [True],
    [[1, True]],
    [[1, None]],
    [["a"]],
    [[[1]]],
    [1, "a"],
    [1, [2]],
    np.array([1.5]),
    [np.array([True])],
    np.array(5),
    [None],
    None,
    5,
    b"abc",
    [b"abc"],
    {1, 2},
    {"prompt": 5},
    {"prompt": None},
    {},
    {"prompt_token_ids": 5},
    {"prompt_token_ids": "abc"},
    {"prompt_token_ids": []},
    {"text": "hello"},
    {"prompt": "a", "priority": "high"},
    {"prompt": "a", "priority": None},
    {"prompt": "a", "priority": True},
    {"prompt": "a", "cache_salt": ""},
    {"prompt": "a", "cache_salt": 5},
    [1] * 512,
    "\ud800",
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda p: repr(p)[:24] if not isinstance(p, list) else None)
def test_api_01_api_02_bad_prompts_are_refused_and_nothing_is_queued(prompt, llm):
    for prompts in (prompt, [[5, 6], *prompt] if isinstance(prompt, list) else [[5, 6], prompt]):
        with pytest.raises(RequestError) as error:
            run(llm, prompts, greedy())
        assert len(str(error.value)) < 300
        assert "\n" not in str(error.value)
        assert_idle(llm)


def test_sch_04_hundreds_of_refused_requests_leave_no_trace(llm):
    expected = one(llm, [5, 6], greedy())["token_ids"]
    bad = [([1] * 600, {}), ([1], {"logprobs": 21}), ([1], {"stop_token_ids": [VOCAB]}), ([], {}), ([VOCAB], {"n": 4})]
    for number in range(200):
        prompt, options = bad[number % len(bad)]
        with pytest.raises(RequestError):
            run(llm, [[5, 6], prompt], [greedy(), seeded(1, **options)])
        if number % 10 == 0:
            assert one(llm, [5, 6], greedy())["token_ids"] == expected
    assert_idle(llm)


def test_params_may_differ_by_prompt_and_results_keep_the_order(llm):
    prompts = [random_prompt(n, vocab_size=VOCAB) for n in (30, 1, 12)]
    params = [greedy(3), seeded(4, 9), greedy(6, logprobs=2)]
    outs = run(llm, prompts, params)
    assert [out.prompt_token_ids for out in outs] == prompts
    assert [len(out["token_ids"]) for out in outs] == [3, 9, 6]
    assert tokens(outs) == [tokens([one(llm, *pair)])[0] for pair in zip(prompts, params)]
    assert len({out.request_id for out in outs}) == 3


@pytest.mark.parametrize(
    "params", [[greedy()], [greedy()] * 3, 5, "greedy", {"temperature": 0}, [{}, {}], [greedy(), None]]
)
def test_params_of_the_wrong_number_or_kind_are_refused(params, llm):
    with pytest.raises(RequestError) as error:
        run(llm, [[1], [2]], params)
    assert error.value.param == "sampling_params"


def test_checkpoint_defaults_are_used_without_params(llm):
    assert llm.default_sampling_params(max_tokens=5) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, max_tokens=5
    )
    (out,) = llm.generate("hello", use_tqdm=False)
    assert len(out["token_ids"]) <= 16


def test_api_09_output_is_capped_at_the_context(folder):
    prompt = random_prompt(60, vocab_size=VOCAB)
    with LLM(folder, max_model_len=64, **MAKE) as llm:
        for max_tokens, length in ((3, 3), (4, 4), (5, 4), (1000, 4), (None, 4)):
            out = one(llm, prompt, greedy(max_tokens))
            assert (len(out["token_ids"]), out["finish_reason"]) == (length, "length")
        assert len(one(llm, prompt + [1] * 3, greedy(None))["token_ids"]) == 1
        for extra in (4, 5, 500):
            with pytest.raises(RequestError, match=f"{60 + extra} tokens; max_model_len is 64"):
                one(llm, prompt + [1] * extra, greedy())
        assert_idle(llm)


def test_sch_01_what_can_never_fit_is_refused_at_once(folder):
    with LLM(folder, **{**MAKE, "kv_cache_bytes": 8 * BYTES_PER_BLOCK}) as llm:
        with pytest.raises(RequestError, match="up to 207 tokens; the whole pool holds 128"):
            run(llm, [random_prompt(200, vocab_size=VOCAB), [1] * 5], greedy())
        outs = run(llm, [[1] * 5, [2] * 5, [3] * 5], greedy())
        assert [out["finish_reason"] for out in outs] == ["length"] * 3
        # Without a limit of its own a request goes on until the pool is full.
        assert len(one(llm, [1] * 100, greedy(None))["token_ids"]) == 29
        assert_idle(llm)


def test_a_full_queue_refuses_the_call_and_keeps_the_pool(folder):
    with LLM(folder, **{**MAKE, "max_num_waiting": 2}) as llm:
        with pytest.raises(RequestError, match="max_num_waiting is 2"):
            run(llm, [[1], [2], [3]], greedy())
        assert_idle(llm)
        assert len(run(llm, [[1], [2]], greedy())) == 2


def test_skip_tokenizer_init_works_with_ids_only(folder, llm):
    with LLM(folder, skip_tokenizer_init=True, **MAKE) as ids_only:
        out = one(ids_only, [5, 6], greedy(logprobs=1))
        assert out["token_ids"] == one(llm, [5, 6], greedy())["token_ids"]
        assert out["text"] == ""
        for call in (
            lambda: run(ids_only, "hello", greedy()),
            lambda: run(ids_only, [[1]], greedy(stop="x")),
            lambda: run(ids_only, [[1]], greedy(bad_words=["x"])),
            lambda: ids_only.chat([{"role": "user", "content": "hi"}], use_tqdm=False),
            lambda: ids_only.encode("hello"),
            lambda: ids_only.get_tokenizer(),
        ):
            with pytest.raises(RequestError, match="skip_tokenizer_init"):
                call()
        assert_idle(ids_only)


def test_unknown_options_and_missing_models_are_one_clear_line(folder, tmp_path):
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        LLM(folder, max_num_sequences=5)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len is 1000; this checkpoint's positions go up to 512"):
        LLM(folder, max_model_len=1000, device="cpu")
    for device in ("tpu", "cuda:x", "cpu:1"):
        with pytest.raises(ConfigError, match=device):
            LLM(folder, device=device)


# What comes out


def test_outputs_have_every_field_and_the_short_form(llm):
    before = time.monotonic()
    out = one(llm, "hello world", greedy(20, logprobs=0))
    after = time.monotonic()
    sample = out.outputs[0]
    assert out["text"] == sample.text == llm.tokenizer.decode(sample.token_ids)
    assert out["token_ids"] is sample.token_ids
    assert (sample.index, sample.finish_reason, sample.stop_reason) == (0, "length", None)
    assert sample.finished()
    assert len(sample.logprobs) == len(sample.token_ids) == 20
    assert sample.cumulative_logprob == sum(e[t].logprob for t, e in zip(sample.token_ids, sample.logprobs))
    assert one(llm, "hello world", greedy()).outputs[0].cumulative_logprob is None
    assert "text" in out
    assert "tokens" not in out
    with pytest.raises(KeyError):
        out["tokens"]
    assert before <= out.metrics.arrival_time <= after
    assert 0 < out.metrics.first_token_s < out.metrics.finished_s <= after - before
    assert out.metrics.num_preemptions == 0


def test_dtk_05_ids_without_text_end_nothing(llm):
    """The model may sample ids that the tokenizer does not have."""
    assert llm.tokenizer.vocab_size < VOCAB - 10
    forced = greedy(4, allowed_token_ids=[VOCAB - 1], logprobs=3)
    outs = run(llm, [[5, 6], [7, VOCAB - 2], [8]], [greedy(), forced, greedy()])
    assert outs[1]["token_ids"] == [VOCAB - 1] * 4
    assert outs[1]["text"] == ""
    assert outs[0]["token_ids"] == one(llm, [5, 6], greedy())["token_ids"]


def test_logprobs_equal_transformers(llm, folder, reference_model):
    prompts = [random_prompt(n, vocab_size=VOCAB) for n in (1, 16, 40)]
    outs = run(llm, prompts, greedy(12, logprobs=5, prompt_logprobs=3))
    for prompt, out in zip(prompts, outs):
        output = out["token_ids"]
        assert output == greedy_tokens(reference_model(folder), prompt, output)
        with torch.no_grad():
            ids = torch.tensor([prompt + output])
            expected = reference_model(folder)(ids).logits[0].log_softmax(dim=-1)
        assert out.prompt_logprobs[0] is None
        entries = out.prompt_logprobs[1:] + out["logprobs"]
        assert {type(entry) for entry in entries} == {dict}
        assert len(entries) == len(prompt) + len(output) - 1
        for position, entry in enumerate(entries):
            token = ids[0, position + 1].item()
            num_top = 3 if position + 1 < len(prompt) else 5
            top = expected[position].topk(num_top).indices.tolist()
            assert set(entry) == {*top, token}
            for token_id, value in entry.items():
                assert value.logprob == pytest.approx(expected[position, token_id].item(), abs=1e-4)
                assert value.rank == (expected[position] > expected[position, token_id]).sum() + 1
                assert value.decoded_token == llm.tokenizer.token_str(token_id)


def test_logprobs_of_a_stream_are_those_of_the_whole(llm):
    params = greedy(5, logprobs=2, prompt_logprobs=1)
    whole = one(llm, [5, 6, 7], params)
    seen = list(llm.stream([5, 6, 7], params))
    for output in seen:
        count = len(output["token_ids"])
        assert output["logprobs"] == whole["logprobs"][:count]
        assert output.prompt_logprobs == whole.prompt_logprobs
    assert len(seen[-1]["logprobs"]) == 5


def test_logprobs_of_the_whole_vocabulary_add_up_to_one(folder):
    with LLM(folder, max_logprobs=-1, **MAKE) as llm:
        out = one(llm, [5, 6, 7], seeded(1, 3, logprobs=-1, prompt_logprobs=-1))
        for token_id, entry in zip([6, 7, *out["token_ids"]], [*out.prompt_logprobs[1:], *out["logprobs"]]):
            assert entry.keys() == {*range(VOCAB)}
            assert sum(math.exp(value.logprob) for value in entry.values()) == pytest.approx(1)
            assert entry[token_id].rank == 1 + sum(v.logprob > entry[token_id].logprob for v in entry.values())


def test_logprobs_are_raw_whatever_shapes_the_choice(llm):
    """Masked or filtered tokens keep their own finite value; the chosen token is always there."""
    options = {"logit_bias": {7: 50.0}, "top_k": 1, "repetition_penalty": 1.5, "logprobs": 5}
    shaped = one(llm, [5, 6], seeded(1, 1, **options))
    plain = one(llm, [5, 6], greedy(1, logprobs=20))
    assert shaped["token_ids"] == [7]
    (entry,), (reference,) = shaped["logprobs"], plain["logprobs"]
    assert 7 in entry
    assert {t: v.logprob for t, v in entry.items() if t in reference} == pytest.approx(
        {t: v.logprob for t, v in reference.items() if t in entry}, abs=1e-5
    )


@pytest.mark.parametrize("budget", [8192, 20])
def test_lpb_02_prompt_logprobs_are_complete_with_a_warm_cache(budget, folder):
    with LLM(folder, **MAKE, max_num_batched_tokens=budget) as llm:
        for length in (15, 16, 17, 48):
            prompt = random_prompt(length, vocab_size=VOCAB)
            params = greedy(2, prompt_logprobs=1, logprobs=1)
            cold, warm = one(llm, prompt, params), one(llm, prompt, params)
            assert len(cold.prompt_logprobs) == length
            for first, second in zip(cold.prompt_logprobs[1:], warm.prompt_logprobs[1:]):
                assert {t: v.logprob for t, v in first.items()} == pytest.approx(
                    {t: v.logprob for t, v in second.items()}, abs=1e-5
                )
            assert warm["token_ids"] == cold["token_ids"]
            # Prompt and output logprobs are the same measure.
            again = one(llm, prompt + cold["token_ids"], params)
            assert again.prompt_logprobs[length][cold["token_ids"][0]].logprob == pytest.approx(
                cold["logprobs"][0][cold["token_ids"][0]].logprob, abs=1e-4
            )


def test_pfx_01_whole_cached_prompts_still_compute_the_last_token(folder):
    with LLM(folder, **MAKE) as llm:
        for length, cached in ((16, 0), (32, 16), (33, 32)):
            prompt = random_prompt(length, seed=length, vocab_size=VOCAB)
            cold, warm = (one(llm, prompt, greedy(6, logprobs=1)) for _ in range(2))
            assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, cached)
            assert warm["token_ids"] == cold["token_ids"]
            mixed = run(llm, [prompt, random_prompt(20, seed=99 + length, vocab_size=VOCAB)], greedy(6))
            assert mixed[0]["token_ids"] == cold["token_ids"]
            assert [out.num_cached_tokens for out in mixed] == [cached, 0]
        llm.reset_prefix_cache()
        assert one(llm, prompt, greedy()).num_cached_tokens == 0


def test_pfx_08_salts_keep_caches_apart(llm):
    prompt = random_prompt(64, seed=8, vocab_size=VOCAB)
    salts = ["A", "B", "A", None]
    outs = [one(llm, {"prompt_token_ids": prompt, "cache_salt": salt}, greedy()) for salt in salts]
    assert [out.num_cached_tokens > 0 for out in outs] == [False, False, True, False]
    assert len({tuple(out["token_ids"]) for out in outs}) == 1


# Sampling across the engine


def test_smp_11_samples_of_one_seed_differ_and_repeat(llm):
    four = one(llm, [5, 6], seeded(7, n=4))
    assert [sample.index for sample in four.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in four.outputs}) == 4
    assert tokens([one(llm, [5, 6], seeded(7, n=4))]) == tokens([four])
    two = one(llm, [5, 6], seeded(7, n=2))
    assert tokens([two])[0] == tokens([four])[0][:2]
    assert one(llm, [5, 6], seeded(7))["token_ids"] == four["token_ids"]
    unseeded = one(llm, [5, 6], SamplingParams(n=4, ignore_eos=True))
    assert len({tuple(sample.token_ids) for sample in unseeded.outputs}) == 4


def test_unseeded_requests_differ_and_engines_with_one_seed_agree(folder):
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def sampled(seed: int) -> list[list[list[int]]]:
        with LLM(folder, seed=seed, **MAKE) as llm:
            return tokens(run(llm, [[5, 6]] * 3, params))

    first = sampled(3)
    assert len({str(out) for out in first}) == 3
    assert sampled(3) == first
    assert sampled(4) != first


def test_smp_04_a_seeded_request_does_not_see_the_rest_of_the_batch(llm):
    prompt, params = random_prompt(20, vocab_size=VOCAB), seeded(11)
    alone = one(llm, prompt, params)["token_ids"]
    others = [greedy(30), SamplingParams(), seeded(11), seeded(5, top_p=0.5), seeded(6, 2)]
    for row in range(len(others) + 1):
        torch.manual_seed(row)
        batch = [*others[:row], params, *others[row:]]
        prompts = [[row, 9]] * row + [prompt] + [[row, 8]] * (len(others) - row)
        assert run(llm, prompts, batch)[row]["token_ids"] == alone


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests that share prefixes, and use what depends on the past: penalties, bad words, min_tokens, logprobs."""
    prefix = random_prompt(48, seed=1, vocab_size=VOCAB)
    prompts = [
        *([*prefix, number] for number in range(4)),
        prefix,
        prefix[:33],
        *(random_prompt(n, seed=2, vocab_size=VOCAB) for n in (1, 15, 16, 17, 70)),
    ]
    kinds = [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"frequency_penalty": 1.0, "top_p": 0.9},
        {"top_k": 10, "min_p": 0.02, "logprobs": 2},
        {"bad_words": ["e", "he"], "min_tokens": 10, "ignore_eos": False},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"logit_bias": {EOS: 6.0}, "ignore_eos": False, "min_tokens": 20},
    ]
    params = [seeded(number, 32, **kinds[number % len(kinds)]) for number in range(len(prompts))]
    return prompts, params


def digest(outs: list[RequestOutput]) -> list[Any]:
    return [(out["token_ids"], out["text"], out["finish_reason"], len(out["logprobs"] or [])) for out in outs]


@pytest.fixture(scope="module")
def workload_alone(folder: Path) -> list[Any]:
    with LLM(folder, enable_prefix_caching=False, **MAKE) as llm:
        return digest([one(llm, *pair) for pair in zip(*workload())])


@pytest.mark.parametrize(
    ("options", "is_tight"),
    [
        ({}, False),
        ({"kv_cache_bytes": 14 * BYTES_PER_BLOCK}, True),
        ({"kv_cache_bytes": 14 * BYTES_PER_BLOCK, "enable_prefix_caching": False}, True),
        ({"max_num_batched_tokens": 16}, False),
        ({"max_num_batched_tokens": 19, "kv_cache_bytes": 13 * BYTES_PER_BLOCK, "max_num_seqs": 5}, True),
        ({"block_size": 8}, False),
        ({"block_size": 32, "max_num_batched_tokens": 50}, False),
        ({"block_size": 8, "kv_cache_bytes": 14 * BYTES_PER_BLOCK, "max_num_batched_tokens": 23}, True),
        ({"scheduling_policy": "priority", "kv_cache_bytes": 14 * BYTES_PER_BLOCK}, True),
        ({"max_num_seqs": 1}, False),
    ],
    ids=str,
)
def test_pre_03_requests_give_the_same_under_every_schedule(options, is_tight, folder, workload_alone):
    """Batched, chunked, preempted, on any block size, cache cold and warm: equal to each alone without a cache."""
    with LLM(folder, **{**MAKE, **options}) as llm:
        cold = run(llm, *workload())
        warm = run(llm, *workload())
        assert digest(cold) == workload_alone
        assert digest(warm) == workload_alone
        assert sum(out.metrics.num_preemptions for out in cold) > 0 or not is_tight
        assert_idle(llm)


def test_pre_03_streams_have_no_gap_under_preemption(folder, workload_alone):
    prompts, params = workload()
    with LLM(folder, **{**MAKE, "kv_cache_bytes": 14 * BYTES_PER_BLOCK}) as llm:
        last: dict[str, RequestOutput] = {}
        for out in llm.stream(prompts, params):
            seen = last.get(out.request_id)
            if seen is not None:
                assert out["text"].startswith(seen["text"])
                assert out["token_ids"][: len(seen["token_ids"])] == seen["token_ids"]
                assert len(out["token_ids"]) > len(seen["token_ids"])
            last[out.request_id] = out
        assert digest([last[key] for key in sorted(last, key=int)]) == workload_alone
        assert any(out.metrics.num_preemptions for out in last.values())
        assert_idle(llm)


# Ends


def base_output(llm: LLM, seed: int = 3, max_tokens: int = 40) -> RequestOutput:
    return one(llm, "The quick", seeded(seed, max_tokens))


@pytest.mark.parametrize("seed", range(4))
def test_stp_01_stop_strings_cut_where_they_first_occur(seed, llm):
    text = base_output(llm, seed)["text"]
    assert len(text) > 20
    for start, length in ((3, 1), (7, 3), (10, 8), (12, 2)):
        stop = text[start : start + length]
        cut = text.index(stop)
        for options, expected in (({}, text[:cut]), ({"include_stop_str_in_output": True}, text[: cut + length])):
            shown = list(llm.stream("The quick", seeded(seed, 40, stop=[stop, "\x00never"], **options)))
            assert shown[-1]["text"] == expected
            assert (shown[-1]["finish_reason"], shown[-1]["stop_reason"]) == ("stop", stop)
            assert all(expected.startswith(out["text"]) for out in shown)
            assert one(llm, "The quick", seeded(seed, 40, stop=stop, **options))["text"] == expected


def test_stp_05_the_earliest_stop_wins_in_any_order(llm):
    text = base_output(llm)["text"]
    early, late = text[6:9], text[11:16]
    for stop in ([early, late], [late, early]):
        out = one(llm, "The quick", seeded(3, 40, stop=stop))
        assert out["text"] == text[: text.index(early)]
        assert out["stop_reason"] == early


def test_stp_02_held_text_is_flushed_when_generation_ends_otherwise(llm):
    for max_tokens in range(5, 12):
        text = base_output(llm, max_tokens=max_tokens)["text"]
        stop = text[-2:] + "\x00\x00"
        shown = list(llm.stream("The quick", seeded(3, max_tokens, stop=stop)))
        assert shown[-1]["text"] == text
        assert shown[-1]["finish_reason"] == "length"


def test_stp_04_nothing_ends_a_request_before_min_tokens(llm):
    for min_tokens in (4, 5, 6):
        for target in ({"logit_bias": {SECOND_EOS: 100.0}}, {"logit_bias": {9: 100.0}, "stop_token_ids": [9]}):
            (ending,) = target["logit_bias"]
            out = one(llm, [5, 6], greedy(20, ignore_eos=False, min_tokens=min_tokens, **target))
            assert len(out["token_ids"]) == min_tokens + 1
            assert out["token_ids"].index(ending) == min_tokens
            assert not {EOS, SECOND_EOS} & set(out["token_ids"][:min_tokens])
            assert out["finish_reason"] == "stop"


def test_stp_04_stop_strings_within_min_tokens_do_not_count(llm):
    ids = base_output(llm)["token_ids"]
    texts = [llm.tokenizer.decode([token]) for token in ids]
    stop = next(c for c in "".join(texts[:6]) if c.isascii() and any(c in text for text in texts[6:]))
    out = one(llm, "The quick", seeded(3, 40, stop=stop, min_tokens=6))
    assert len(out["token_ids"]) == next(count for count in range(7, 41) if stop in texts[count - 1])
    assert out["stop_reason"] == stop
    assert stop in out["text"]


def test_min_tokens_alone_beside_a_request_with_stop_ids(llm):
    """Slots that were used by requests with stop ids do not pass them on."""
    expected = one(llm, [5, 6], greedy(12))["token_ids"]
    stops = [one(llm, [7], greedy(1, stop_token_ids=expected[:3], min_tokens=1)) for _ in range(3)]
    assert len(stops) == 3
    beside = greedy(12, stop_token_ids=[9], min_tokens=12)
    for _ in range(3):
        outs = run(llm, [[5, 6], [7]], [greedy(12, min_tokens=12), beside])
        assert outs[0]["token_ids"] == expected


def test_stp_07_every_eos_id_ends_a_request_unless_ignored(llm):
    for eos in (EOS, SECOND_EOS):
        out = one(llm, [5, 6], greedy(9, ignore_eos=False, logit_bias={eos: 100.0}))
        assert (out["token_ids"], out["finish_reason"], out["stop_reason"]) == ([eos], "stop", None)
        assert out["text"] == ""
        out = one(llm, [5, 6], greedy(9, logit_bias={eos: 100.0}))
        assert (out["token_ids"], out["finish_reason"]) == ([eos] * 9, "length")
        out = one(llm, [5, 6], greedy(9, logit_bias={eos: 100.0}, stop_token_ids=[eos]))
        assert (out["token_ids"], out["stop_reason"]) == ([eos], eos)


def test_stp_09_finish_reasons_on_the_last_allowed_token(llm):
    out = base_output(llm, max_tokens=10)
    ids, text = out["token_ids"], out["text"]
    last = ids[-1]
    assert last not in ids[:-1]
    assert out["finish_reason"] == "length"
    assert one(llm, "The quick", seeded(3, 10, stop_token_ids=[last]))["finish_reason"] == "stop"
    shorter = base_output(llm, max_tokens=9)["text"]
    stop = text[len(shorter) - 1 :]
    assert text.index(stop) == len(shorter) - 1
    stopped = one(llm, "The quick", seeded(3, 10, stop=stop))
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["token_ids"] == ids


def test_api_05_samples_of_a_request_end_on_their_own(llm):
    out = one(llm, "The quick", seeded(3, 30, n=3))
    first = [sample.token_ids for sample in out.outputs]
    stop_id = first[0][4]
    ended = one(llm, "The quick", seeded(3, 30, n=3, stop_token_ids=[stop_id]))
    for sample, ids in zip(ended.outputs, first):
        expected = ids[: ids.index(stop_id) + 1] if stop_id in ids else ids
        assert sample.token_ids == expected
        assert sample.finish_reason == ("stop" if stop_id in ids else "length")
    assert len({len(sample.token_ids) for sample in ended.outputs}) > 1


def test_bad_words_do_not_appear_in_either_spelling(llm):
    tokenizer, common = llm.tokenizer, greedy(12, logit_bias={llm.encode(word)[0]: 90.0 for word in ("dog", " dog")})
    assert "dog" in one(llm, "The quick", common)["text"]
    ids = one(llm, "The quick", replace(common, bad_words=["dog"]))["token_ids"]
    assert "dog" not in tokenizer.decode(ids)
    several = one(llm, "The quick", replace(common, bad_words=["dogdog"]))["text"]
    assert "dog" in several
    assert "dogdog" not in several


def test_detokenize_off_gives_ids_without_text(llm):
    out = one(llm, "The quick", seeded(3, 10, detokenize=False))
    assert out["text"] == ""
    assert out["token_ids"] == base_output(llm, max_tokens=10)["token_ids"]


# Chat


def test_chat_renders_the_template_and_takes_one_or_many(llm):
    messages = [{"role": "user", "content": "hello"}]
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    (out,) = llm.chat(messages, greedy(), use_tqdm=False)
    assert out.prompt_token_ids == llm.encode(prompt)
    assert out["token_ids"] == one(llm, prompt, greedy())["token_ids"]
    two = llm.chat([messages, [*messages, *messages]], greedy(), use_tqdm=False)
    assert tokens(two)[0] == tokens([out])[0]
    assert len(two) == 2


def test_transformers_tokenizer_writes_the_prompts_that_chat_does(llm):
    tokenizer, messages = llm.get_tokenizer(), [{"role": "user", "content": "hello 👍"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text) == llm.encode(text) == llm.apply_chat_template(messages)


def test_chat_without_params_goes_on_to_the_context_limit(folder):
    with LLM(folder, max_model_len=64, **MAKE) as llm:
        (out,) = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        total = len(out.prompt_token_ids) + len(out["token_ids"])
        assert total == 64 or out["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "messages", [[], [[]], "hello", None, {"role": "user", "content": "x"}, [5], [{"content": "x"}]]
)
def test_malformed_chats_are_refused(messages, llm):
    with pytest.raises(RequestError):
        llm.chat(messages, greedy(), use_tqdm=False)


# Streams


def test_streams_show_what_generate_returns(llm):
    prompts = ["hello", "The lazy dog", [5, 6, 7]]
    params = seeded(5, 20, logprobs=1)
    last = {out.request_id: out for out in llm.stream(prompts, params)}
    assert list(last) == sorted(last, key=int)
    expected = run(llm, prompts, params)
    assert digest(list(last.values())) == digest(expected)
    assert all(out.finished for out in last.values())


def test_streams_are_checked_when_they_are_made_and_run_when_they_are_read(llm):
    with pytest.raises(RequestError):
        llm.stream([VOCAB], greedy())
    stream = llm.stream([5, 6], greedy())
    assert_idle(llm)
    del stream


@pytest.mark.parametrize("after", [0, 1, 5])
def test_leaving_a_stream_early_aborts_it(after, llm):
    stream = llm.stream([[5, 6], random_prompt(60, vocab_size=VOCAB)], seeded(2, 200, n=2))
    for _ in range(after):
        next(stream)
    stream.close()
    assert_idle(llm)
    for number, _ in enumerate(llm.stream([5, 6], greedy(100))):
        if number == 3:
            break
    assert_idle(llm)


def test_nested_streams_and_calls_take_turns(llm):
    expected = [one(llm, [token], seeded(token, 15))["token_ids"] for token in (5, 6, 7)]
    outer_last = inner_last = None
    for number, outer in enumerate(llm.stream([5], seeded(5, 15))):
        outer_last = outer
        if number == 4:
            for inner in llm.stream([6], seeded(6, 15)):
                inner_last = inner
                assert one(llm, [7], seeded(7, 15))["token_ids"] == expected[2]
    assert [outer_last["token_ids"], inner_last["token_ids"]] == expected[:2]


def test_a_stream_collected_in_the_middle_of_a_step_is_dropped(folder, monkeypatch):
    """As after an exception in a loop over a stream: its frames are garbage in a cycle, collected at any later time."""
    with LLM(folder, **MAKE) as llm:
        cycle: list[Any] = [llm.stream([5, 6], greedy(200))]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        runner = llm._core._executor.runner
        execute = runner.execute

        def collecting(*args: Any) -> Any:
            gc.collect()
            return execute(*args)

        monkeypatch.setattr(runner, "execute", collecting)
        assert len(one(llm, [7], greedy(3))["token_ids"]) == 3
        assert_idle(llm)


def test_threads_share_an_engine(llm):
    jobs = [(random_prompt(3 + number, vocab_size=VOCAB), seeded(number, 20, n=1 + number % 2)) for number in range(8)]
    expected = tokens([one(llm, *job) for job in jobs])
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        prompt, params = jobs[number]
        for _ in range(3):
            if number % 2:
                outs = list(llm.stream(prompt, params))[-1:]
            else:
                outs = run(llm, prompt, params)
            results.setdefault(number, []).append(tokens(outs)[0])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: [expected[number]] * 3 for number in range(8)}


def test_two_engines_live_in_one_process(llm, make_tiny_model):
    other_folder = make_tiny_model(vocab_size=VOCAB, tie_word_embeddings=True)
    with LLM(other_folder, skip_tokenizer_init=True, **MAKE, block_size=32) as other:
        expected = one(llm, [5, 6], greedy())["token_ids"], one(other, [5, 6], greedy())["token_ids"]
        assert expected[0] != expected[1]
        pairs = zip(llm.stream([5, 6], greedy()), other.stream([5, 6], greedy()))
        *_, (first, second) = pairs
        assert (first["token_ids"], second["token_ids"]) == expected


# Failures and the end


@contextmanager
def interrupted_at(line: int) -> Iterator[Callable[[], int]]:
    """Raises KeyboardInterrupt at the n-th line the engine executes; yields a function that tells how many it was.

    Lines of `with` and `try` are left out: tracing stops there outside of what they protect, where no signal is taken.
    So are those that a garbage collection would run, which can come anywhere.
    """
    count = 0
    gc.collect()
    gc.disable()

    @functools.cache
    def is_traced(filename: str) -> bool:
        return "qwen_engine" in filename and "kernels" not in filename

    @functools.cache
    def counts(filename: str, number: int) -> bool:
        return not linecache.getline(filename, number).lstrip().startswith(("with ", "try:"))

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if not is_traced(frame.f_code.co_filename):
            return None
        if event == "line" and counts(frame.f_code.co_filename, frame.f_lineno):
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)
        gc.enable()


def test_an_interrupt_anywhere_leaves_the_engine_usable(folder):
    options = {**MAKE, "kv_cache_bytes": 6 * BYTES_PER_BLOCK, "max_num_batched_tokens": 24}
    prompts = [random_prompt(n, vocab_size=VOCAB) for n in (20, 33, 3)]
    params = [seeded(1, 12, presence_penalty=1.0), greedy(10, bad_words=["e", "hello"]), seeded(2, 6, logprobs=1)]
    with LLM(folder, **options) as llm:
        expected = tokens(run(llm, prompts, params))
        llm.reset_prefix_cache()
        with interrupted_at(-1) as num_lines:
            run(llm, prompts, params)
        total = num_lines()
        for line in range(1, total, total // NUM_INTERRUPTS):
            llm.reset_prefix_cache()
            with interrupted_at(line), pytest.raises(KeyboardInterrupt):
                run(llm, prompts, params)
            llm._core.scheduler.check()
            assert tokens(run(llm, prompts, params)) == expected, f"after an interrupt at line {line} of {total}"
            assert_idle(llm)


def test_a_failed_step_ends_every_live_request_and_no_more(folder, monkeypatch):
    with LLM(folder, **MAKE) as llm:
        expected = one(llm, [5, 6], greedy())["token_ids"]
        outer = llm.stream([5, 6], greedy(100))
        next(outer)
        with monkeypatch.context() as patch:
            patch.setattr(llm._core._executor.runner, "execute", lambda plan, masks: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                one(llm, [7], greedy())
        *_, last = outer
        assert (last["finish_reason"], last.finished) == ("abort", True)
        assert_idle(llm)
        assert one(llm, [5, 6], greedy())["token_ids"] == expected


def test_a_failure_while_text_is_made_ends_every_live_request(folder, monkeypatch):
    """The tokens of that step are lost, so nobody may go on as if they had never been."""
    with LLM(folder, **MAKE) as llm:
        outer = llm.stream([5, 6], greedy(100))
        next(outer)
        with monkeypatch.context() as patch:
            patch.setattr("qwen_engine.frontend.output_processor.RequestState.take", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                one(llm, [7], greedy())
        assert [out["finish_reason"] for out in outer] == ["abort"]
        assert_idle(llm)
        assert len(one(llm, [7], greedy())["token_ids"]) == 8


def test_a_closed_engine_says_so(folder):
    llm = LLM(folder, **MAKE)
    stream = llm.stream([5, 6], greedy(50))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        next(stream)
    for call in (
        lambda: run(llm, [[1]], greedy()),
        lambda: run(llm, "hello", greedy()),
        lambda: llm.stream("hello", greedy()),
        lambda: llm.chat([{"role": "user", "content": "x"}], greedy(), use_tqdm=False),
    ):
        with pytest.raises(EngineDeadError, match="closed"):
            call()
    with LLM(folder, **MAKE) as llm:
        pass
    with pytest.raises(EngineDeadError):
        run(llm, [[1]], greedy())


def test_closing_while_another_thread_generates_ends_it_with_a_clear_error(folder):
    llm = LLM(folder, **MAKE)
    started, errors = threading.Event(), []

    def work() -> None:
        try:
            while True:
                for _ in llm.stream([5, 6], greedy(450)):
                    started.set()
        except EngineDeadError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    llm.close()
    thread.join(60)
    assert len(errors) == 1


@pytest.mark.parametrize("how", ["del", "close"])
def test_parameters_are_freed_without_a_garbage_collection(how, folder):
    gc.collect()
    gc.disable()
    try:
        llm = LLM(folder, **MAKE)
        run(llm, [[5, 6], [7]], [seeded(1, 5, logprobs=2, prompt_logprobs=1, presence_penalty=1.0), greedy()])
        stream = llm.stream([5, 6], greedy(50))
        next(stream)
        del stream
        runner = llm._core._executor.runner
        parts = [runner.model.embed_tokens.weight, runner.model.layers[0].mlp.down_proj.weight, runner.kv_cache]
        alive = [weakref.ref(part) for part in parts]
        engine = weakref.ref(llm)
        del runner, parts
        if how == "close":
            llm.close()
        else:
            del llm
            assert engine() is None
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()
