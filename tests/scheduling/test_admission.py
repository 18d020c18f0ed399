"""Requests that are refused: the message has both numbers, `param` names the field, and nothing has changed."""

from __future__ import annotations

import copy
import re
import time

import pytest
from fake_device import VOCAB_SIZE, Driver

from qwen_engine.errors import RequestError
from qwen_engine.request import SamplingParams

HUGE = 2**80


def driver_with_work(**options):
    """One request decoding, one waiting; a pool of 32 tokens and a context of 24."""
    driver = Driver(num_blocks=8, block_size=4, max_num_seqs=1, max_model_len=24, **options)
    driver.add("running", [1, 2, 3], max_tokens=8)
    driver.step()
    driver.add("waiting", [1, 2, 3, 4, 5])
    return driver


def state(scheduler):
    """Everything the scheduler holds, by value; requests by identity; without what only saves it work."""
    others = {"block_manager", "_recent_prompts"}
    plain = {name: copy.copy(value) for name, value in vars(scheduler).items() if name not in others}
    blocks = scheduler.block_manager
    return plain, copy.deepcopy({**vars(blocks), "_ref_counts": blocks._ref_counts.tolist()})


def assert_refused(driver, message, param, request_id="new", prompt=(1, 2, 3), **options):
    before = state(driver.scheduler)
    with pytest.raises(RequestError, match=message) as caught:
        driver.add(request_id, prompt, **options)
    assert caught.value.param == param
    assert len(str(caught.value)) < 250
    assert state(driver.scheduler) == before
    driver.scheduler.check()
    driver.run()
    driver.check_outputs()


def test_an_empty_prompt_is_refused():
    assert_refused(driver_with_work(), "prompt is empty", "prompt", prompt=[])


@pytest.mark.parametrize("length", [24, 25, 240])
def test_a_prompt_without_room_for_an_output_token_is_refused(length):
    assert_refused(driver_with_work(), rf"{length} tokens.* 24 ", "prompt", prompt=[1] * length)


def test_the_longest_prompt_is_served_and_yields_one_token():
    driver = driver_with_work()
    request = driver.add("new", [1] * 23, max_tokens=None)
    driver.run()
    driver.check_outputs()
    assert (request.num_output_tokens, request.finish_reason) == (1, "length")


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31, -(2**31) - 1, HUGE, -HUGE])
@pytest.mark.parametrize("position", [0, 2])
def test_ids_outside_the_vocabulary_are_refused(token_id, position):
    prompt = [1, 2, 3]
    prompt[position] = token_id
    assert_refused(driver_with_work(), rf"{token_id}.* 0 to {VOCAB_SIZE - 1}", "prompt", prompt=prompt)


@pytest.mark.parametrize(
    "token_id", [True, False, 1.0, float("nan"), "1", None, [1], "x" * 10_000], ids=lambda v: repr(v)[:9]
)
def test_ids_that_are_not_integers_are_refused(token_id):
    shown = re.escape(repr(token_id)[:20])
    assert_refused(driver_with_work(), f"holds {shown}.*token id", "prompt", prompt=[1, token_id, 3])


def test_every_id_of_the_vocabulary_is_served():
    driver = driver_with_work()
    driver.add("new", range(VOCAB_SIZE))
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "param"),
    [(30, 4, "max_tokens"), (1, 33, "max_tokens"), (33, 1, "prompt"), (33, None, "prompt"), (200, 4, "prompt")],
)
def test_what_can_never_fit_the_pool_is_refused(prompt_length, max_tokens, param):
    driver = Driver(num_blocks=8, block_size=4)
    needed = prompt_length + (max_tokens or 1) - 1
    assert_refused(driver, rf"{needed} tokens.* 32", param, prompt=[1] * prompt_length, max_tokens=max_tokens)


@pytest.mark.parametrize(("prompt_length", "max_tokens"), [(29, 4), (1, 32), (32, 1), (32, None), (5, None)])
def test_what_just_fits_the_pool_is_served_to_its_limit(prompt_length, max_tokens):
    driver = Driver(num_blocks=8, block_size=4)
    request = driver.add("exact", [1] * prompt_length, max_tokens=max_tokens)
    driver.run()
    driver.check_outputs()
    assert request.finish_reason == "length"
    assert len(request.token_ids) == (prompt_length + max_tokens if max_tokens else 33)


def test_max_tokens_beyond_the_context_is_cut_not_refused():
    driver = driver_with_work()
    request = driver.add("new", [1, 2], max_tokens=2**63 - 1)
    driver.run()
    driver.check_outputs()
    assert len(request.token_ids) == 24


def test_a_full_queue_refuses_and_takes_again_when_it_has_moved():
    driver = driver_with_work(max_num_waiting=1)
    assert_refused(driver, "1 requests are waiting; max_num_waiting is 1", None)
    driver.add("new", [1, 2, 3])
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("request_id", ["running", "waiting"])
def test_an_id_in_use_is_refused(request_id):
    assert_refused(driver_with_work(), f"'{request_id}' is in use", "request_id", request_id=request_id)


@pytest.mark.parametrize("salt", ["", 5, b"salt", ["a"], True])
def test_a_salt_that_is_not_a_string_is_refused(salt, monkeypatch):
    monkeypatch.setattr("fake_device.seed_of", lambda salt: 0)
    assert_refused(driver_with_work(), "non-empty string", "cache_salt", salt=salt)


@pytest.mark.parametrize("priority", ["high", None, 1.5, float("nan"), True, 2**63, -(2**63) - 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_priority_that_is_not_an_integer_is_refused(priority, policy):
    assert_refused(driver_with_work(policy=policy), f"priority is {priority!r}", "priority", priority=priority)


def test_any_string_salts_a_request_without_disturbing_others():
    driver = driver_with_work()
    driver.add("new", [1, 2, 3, 4, 5], salt="\ud800")
    driver.run()
    driver.check_outputs()


def test_a_huge_prompt_is_refused_at_once():
    driver = driver_with_work()
    start = time.thread_time()
    assert_refused(driver, "2000000 tokens", "prompt", prompt=[1] * 2_000_000)
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("prompt", ["123", b"123", 5, None, {1, 2}, iter([1, 2])], ids=lambda v: type(v).__name__)
def test_a_prompt_that_is_not_a_list_is_refused(prompt):
    assert_refused(driver_with_work(), f"prompt is {type(prompt).__name__}; .* list", "prompt", prompt=prompt)


@pytest.mark.parametrize("n", [10**6, 10**9, 0, -1, True, "3"])
def test_sec_03_a_huge_n_is_refused_at_once(n):
    with pytest.raises(RequestError, match="n is") as caught:
        SamplingParams(n=n)
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ["x"] * 500_000}, "500000 entries; at most 64"),
        ({"stop": "x" * 1_000_000}, "1000000 characters; at most 1024"),
        ({"stop": [""]}, "non-empty"),
        ({"bad_words": ["x"] * 500_000}, "500000 entries; at most 128"),
        ({"bad_words": ["x" * 1_000_000]}, "1000000 characters; at most 64"),
        ({"stop_token_ids": list(range(500_000))}, "500000 entries; at most 128"),
        ({"logit_bias": dict.fromkeys(range(500_000), 1.0)}, "500000 entries; at most 1024"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_sec_05_huge_lists_are_refused_before_any_work(options, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**options)
    assert caught.value.param == next(iter(options))
    assert len(str(caught.value)) < 250
