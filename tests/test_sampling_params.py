"""Ranges of SamplingParams: everything invalid is refused by name in a bounded line, everything valid normalised."""

from __future__ import annotations

import inspect
import math
import time

import numpy as np
import pytest
import torch

from qwen_engine import SamplingParams
from qwen_engine.errors import RequestError, UnknownParameterError
from qwen_engine.structured_outputs import StructuredOutputs

NAN, INF = math.nan, math.inf
NO_NUMBERS = [NAN, INF, -INF, True, "0.5", None, [1.0], 10**400]
NO_INTEGERS = [NAN, 1.5, True, "5", [1]]
HUGE = 10**5000  # Python refuses to print it

REFUSED = {
    "n": [0, -1, 10**6, 10**9, HUGE, None, *NO_INTEGERS],
    "temperature": [-0.1, -1e-9, 2.01, *NO_NUMBERS],
    "top_p": [0, -0.1, 1.0001, *NO_NUMBERS],
    "top_k": [-2, 2**63, HUGE, -HUGE, None, *NO_INTEGERS],
    "min_p": [-0.1, 1.1, *NO_NUMBERS],
    "presence_penalty": [-2.1, 2.1, *NO_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NO_NUMBERS],
    "repetition_penalty": [0, -1.0, *NO_NUMBERS],
    "seed": [2**63, -(2**63) - 1, HUGE, *NO_INTEGERS],
    "logit_bias": [
        [1],
        "5",
        {"x": 1},
        {None: 1},
        {1.5: 1},
        {INF: 1},
        {1: NAN},
        {1: "2"},
        {1: True},
        {1: None},
        {True: 1.0},
        dict.fromkeys(range(5000), 1.0),
    ],
    "allowed_token_ids": [[], 5, "5", [1.5], [True], ["1"]],
    "bad_words": ["word", 5, [""], [5], ["x" * 65], ["x"] * 129],
    "stop": [5, [""], "", [5], [None], ["ok", ""], "x" * 10**6, ["x"] * 500_000, b"x"],
    "stop_token_ids": [5, 0, False, "5", [1.5], [True], ["1"], list(range(10**5))],
    "include_stop_str_in_output": [1, "true", None],
    "ignore_eos": [0, "no", None],
    "min_tokens": [-1, None, *NO_INTEGERS],
    "max_tokens": [0, -1, HUGE, "5", 1.5, True],
    "logprobs": [-2, -HUGE, *NO_INTEGERS],
    "prompt_logprobs": [-2, *NO_INTEGERS],
    "skip_special_tokens": [1, None],
    "detokenize": [1, None],
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temprature", "did you mean 'temperature'?"),
        ("best_of", "known: n, temperature, top_p,"),
        ("x" * 1000, "known: n,"),
    ],
)
def test_a_parameter_that_does_not_exist_is_refused_with_one_that_does(name: str, words: str):
    with pytest.raises(UnknownParameterError, match=name[:40]) as error:
        SamplingParams(**{name: 1})
    assert isinstance(error.value, RequestError)
    assert error.value.param == name
    assert words in str(error.value)
    assert len(str(error.value)) < 600
    assert "temperature" in inspect.signature(SamplingParams).parameters


def test_a_kind_of_structured_output_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(RequestError, match=r"unknown parameter 'jsn' of StructuredOutputs; did you mean 'json'\?"):
        StructuredOutputs(jsn={})


@pytest.mark.parametrize("name", REFUSED)
def test_smp_03_values_out_of_range_are_refused_by_name(name):
    for value in REFUSED[name]:
        with pytest.raises(RequestError, match=name) as error:
            SamplingParams(**{name: value})
        assert error.value.param == name
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0, 0.0, 2, 1e-300]),
        ("top_p", [1e-300, 1, 1.0]),
        ("top_k", [-1, 0, 1, 10**9]),
        ("min_p", [0, 1]),
        ("presence_penalty", [-2, 2.0]),
        ("repetition_penalty", [1e-300, 1e300]),
        ("seed", [None, -1, 0, 2**63 - 1, -(2**63)]),
        ("stop", [None, "a", ["a"], ("a", "b"), []]),
        ("stop_token_ids", [None, [], (1,), {1, 2}]),
        ("logit_bias", [None, {}, {"5": 1}, {5: -100}]),
        ("max_tokens", [None, 1, 2**62]),
        ("logprobs", [None, -1, 0, 20]),
    ],
)
def test_values_at_the_edge_of_a_range_are_taken(name, values):
    for value in values:
        SamplingParams(**{name: value})


def test_values_are_normalised():
    params = SamplingParams(
        temperature=1e-6,
        stop="end",
        stop_token_ids=[3, 3, 1],
        logit_bias={"5": 1000, 6: -INF, 7: 10**400},
        allowed_token_ids=[2, 1, 2],
        bad_words=["x"],
    )
    assert params.temperature == 0.01
    assert params.is_greedy
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 1)
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 100.0}
    assert params.allowed_token_ids == (2, 1)
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop == ()


def test_numbers_of_numpy_and_torch_are_as_good_as_pythons():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(4),
        seed=torch.tensor(7),
        ignore_eos=np.True_,
        stop_token_ids=np.array([3, 1]),
        allowed_token_ids=[np.int32(2), 5],
        logit_bias={np.int64(5): np.float32(1.5)},
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=4,
        seed=7,
        ignore_eos=True,
        stop_token_ids=[3, 1],
        allowed_token_ids=[2, 5],
        logit_bias={5: 1.5},
    )
    assert type(params.seed) is type(params.allowed_token_ids[0]) is int
    for name, value in (("top_k", np.float64(1.5)), ("temperature", np.array([0.5])), ("stop_token_ids", [np.True_])):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


def test_params_do_not_share_what_the_caller_may_change():
    bias, stop = {5: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[6] = 2.0
    stop.append("b")
    assert params.logit_bias == {5: 1.0}
    assert params.stop == ("a",)


def test_fields_that_contradict_each_other_are_refused():
    for options, param in (
        ({"n": 2, "temperature": 0}, "n"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
    ):
        with pytest.raises(RequestError) as error:
            SamplingParams(**options)
        assert error.value.param == param
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=5, max_tokens=None).max_tokens is None


def test_sec_03_sec_05_refusals_are_quick_and_short():
    start = time.thread_time()
    for name, value in (
        ("n", 10**9),
        ("stop", ["stop"] * 500_000),
        ("stop", "x" * 2**20),
        ("bad_words", ["x" * 2**20]),
        ("temperature", "x" * 2**20),
        ("top_p", [0.5] * 2**20),
        ("ignore_eos", "x" * 2**20),
        ("seed", "x" * 2**20),
        ("logit_bias", {"x" * 2**20: 1.0}),
        ("allowed_token_ids", ["x" * 2**20]),
    ):
        with pytest.raises(RequestError, match=name) as error:
            SamplingParams(**{name: value})
        assert len(str(error.value)) < 300
    assert time.thread_time() - start < 5


def test_sec_06_logprobs_over_the_cap_are_refused_however_spelt():
    for name in ("logprobs", "prompt_logprobs"):
        for value in (21, 502, 503, 10**9, -1):
            with pytest.raises(RequestError, match=f"{name} is {value}") as error:
                SamplingParams(**{name: value}).check_model(vocab_size=503, max_logprobs=20)
            assert error.value.param == name
        SamplingParams(**{name: 20}).check_model(vocab_size=503, max_logprobs=20)
        for value, cap in ((-1, 503), (-1, -1), (503, -1)):
            SamplingParams(**{name: value}).check_model(vocab_size=503, max_logprobs=cap)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_smp_13_ids_outside_the_vocabulary_are_refused(name):
    for token_id in (-1, 503, 506, 2**63, HUGE):
        value = {token_id: 1.0} if name == "logit_bias" else [token_id]
        with pytest.raises(RequestError, match=name) as error:
            SamplingParams(**{name: value}).check_model(vocab_size=503, max_logprobs=20)
        assert error.value.param == name
        assert len(str(error.value)) < 300


def test_logprobs_beyond_the_vocabulary_are_refused_even_under_the_cap():
    with pytest.raises(RequestError, match="logprobs"):
        SamplingParams(logprobs=600).check_model(vocab_size=503, max_logprobs=1000)


def test_requests_that_leave_no_token_to_choose_are_refused():
    params = SamplingParams(min_tokens=1, allowed_token_ids=[3, 7], stop_token_ids=[3])
    params.check_model(vocab_size=503, max_logprobs=20)
    with pytest.raises(RequestError) as error:
        params.check_model(vocab_size=503, max_logprobs=20, eos_token_ids=[7])
    assert error.value.param == "allowed_token_ids"
