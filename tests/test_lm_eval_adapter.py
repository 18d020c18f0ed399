"""`benchmarks/lm_eval_adapter.py` against Transformers, with requests that only look like the harness's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_demo_checkpoint import DEMO

from qwen_engine import LLM, SamplingParams
from qwen_engine.errors import RequestError

MAX_MODEL_LEN = 48
TEXT = "Return the sample arithmetic mean of data, which can be a sequence or an iterable. " * 4


@pytest.fixture(scope="module")
def adapter():
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    try:
        import lm_eval_adapter
    finally:
        sys.path.pop(0)
    return lm_eval_adapter


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", max_model_len=MAX_MODEL_LEN, kv_cache_bytes=4 << 20) as llm:
        yield llm


@pytest.fixture
def scorer(adapter, llm: LLM):
    return adapter.Scorer(llm, show_progress=False)


def request(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


@torch.no_grad()
def reference_logprob(model: Any, token_ids: list[int], count: int) -> float:
    """Transformers' log-probability of the last `count` tokens."""
    logprobs = model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(dim=-1)
    return float(logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[-count:].sum())


def test_continuations_are_scored_as_transformers_scores_them(scorer, llm: LLM, reference_model):
    model = reference_model(DEMO)
    pairs = [("Return the sample", " mean"), ("Return the sample", " zebra crossing"), ("", "Return"), ("a b ", "c")]
    pairs.append(("class Thread:", "\n    pass"))  # ":" and the line end are one token of the whole
    assert llm.encode("".join(pairs[-1]))[: len(llm.encode(pairs[-1][0]))] != llm.encode(pairs[-1][0])
    found = scorer.loglikelihood([request(*pair) for pair in pairs])
    (prefix,) = [scorer._prefix_token]
    for (context, continuation), (logprob, _) in zip(pairs, found):
        whole = llm.encode(context + continuation)
        before = llm.encode(context.rstrip())
        scored = whole[len(before) :]
        expected = reference_logprob(model, [*(before or [prefix]), *scored], len(scored))
        assert logprob == pytest.approx(expected, abs=1e-3)


def test_a_continuation_is_greedy_if_the_engine_would_write_it(scorer, llm: LLM):
    context = "Return the sample arithmetic"
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate([context], params, use_tqdm=False)
    likely = llm.tokenizer.decode(output.outputs[0].token_ids)
    assert llm.encode(context + likely) == [*llm.encode(context), *output.outputs[0].token_ids]
    (greedy,), (other,) = (scorer.loglikelihood([request(context, text)]) for text in (likely, likely + "zebra"))
    assert greedy[1]
    assert not other[1]
    assert other[0] < greedy[0] < 0


def test_a_long_text_is_scored_in_windows_that_count_each_token_once(scorer, llm: LLM, reference_model):
    model, token_ids = reference_model(DEMO), llm.encode(TEXT)
    assert len(token_ids) > 1.5 * MAX_MODEL_LEN
    windows = scorer._windows(token_ids)
    assert sum(count for _, count in windows) == len(token_ids)
    expected = sum(reference_logprob(model, prompt, count) for prompt, count in windows)
    short = "Return a string"
    found = scorer.loglikelihood_rolling([request(TEXT), request(short)])
    assert found[0] == pytest.approx(expected, abs=1e-2)
    whole = [scorer._prefix_token, *llm.encode(short)]
    assert found[1] == pytest.approx(reference_logprob(model, whole, len(whole) - 1), abs=1e-3)


@given(st.integers(0, 200), st.integers(3, 60))
def test_windows_fit_cover_everything_in_order_and_give_each_token_a_context(adapter, num_tokens: int, max_len: int):
    model = SimpleNamespace(eos_token_ids=(9999,))
    llm = SimpleNamespace(max_model_len=max_len, core=SimpleNamespace(model_config=model))
    token_ids = list(range(num_tokens))
    windows = adapter.Scorer(llm)._windows(token_ids)
    assert [token for prompt, count in windows for token in prompt[-count:]] == token_ids
    for prompt, count in windows:
        assert 1 <= count < len(prompt) <= max_len - 1
        first = token_ids.index(prompt[-count])
        assert prompt[-count - 1] == (token_ids[first - 1] if first else 9999)


def test_generation_stops_where_it_is_told_and_is_greedy_unless_asked(scorer, llm: LLM):
    context = "Return the sample arithmetic"
    options = {"until": ["data"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}
    first, second = scorer.generate_until([request(context, options), request(context, {**options, "until": "data"})])
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (output,) = llm.generate([context], params, use_tqdm=False)
    assert first == second == output.outputs[0].text.split("data")[0]
    assert adapter_params(scorer, {"do_sample": True, "temperature": 0.7}).temperature == 0.7


def adapter_params(scorer: Any, options: dict[str, Any]) -> SamplingParams:
    return sys.modules[type(scorer).__module__]._sampling_params(options)


def test_what_does_not_fit_loses_its_beginning_or_is_refused(scorer, llm: LLM, caplog):
    (text,) = scorer.generate_until([request(TEXT, {"max_gen_toks": 8})])
    tail = llm.encode(TEXT)[-(MAX_MODEL_LEN - 8) :]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (output,) = llm.generate([tail], params, use_tqdm=False)
    assert text == output.outputs[0].text
    assert "loses its beginning" in caplog.text
    ((logprob, _),) = scorer.loglikelihood([request(TEXT, " data")])
    assert logprob < 0
    with pytest.raises(RequestError, match="does not fit"):
        scorer.loglikelihood([request("a", TEXT)])
    with pytest.raises(RequestError, match=f"max_gen_toks is 99; max_model_len is {MAX_MODEL_LEN}"):
        scorer.generate_until([request("a", {"max_gen_toks": 99})])
    with pytest.raises(RequestError, match="'num_beams' is not known"):
        scorer.generate_until([request("a", {"num_beams": 4})])


def test_figures_of_the_harness_become_flat(adapter):
    results = {"arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": "N/A", "exact_match,strict-match": 0.25}}
    assert adapter.flat_metrics(results) == {"arc_acc": 0.5, "arc_exact_match_strict-match": 0.25}
