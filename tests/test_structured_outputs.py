"""Structured output through the engine: batched, sampled, preempted, cached, chunked and on several ranks."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ahead import assert_idle
from tiny_models import BYTES_PER_BLOCK, save_tiny_model, save_tokenizer, train_tokenizer

from qwen_engine import LLM, RequestOutput, SamplingParams, StructuredOutputs
from qwen_engine.errors import RequestError
from qwen_engine.request import Request

VOCAB = 400  # the tokenizer has fewer
EOS = 2
TEXT = 'The quick brown fox says {"hello": "world"}, and the lazy dog answers: 東京 👍 naïve. '
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": -9, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "東"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
PATTERN = "[a-c]{3,5}(-[0-9]){2}"
CHOICES = ["yes", "no", "not yet", "東京"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has thinking tags."""
    folder = save_tiny_model(tmp_path_factory.mktemp("structured"), vocab_size=VOCAB, eos_token_id=EOS)
    save_tokenizer(folder, train_tokenizer([TEXT] * 4, marks=("<think>", "</think>")))
    return folder


def engine(folder: Path, **options: Any) -> LLM:
    options = {"max_num_seqs": 8, "kv_cache_bytes": 256 * BYTES_PER_BLOCK, **options}
    return LLM(folder, device="cpu", dtype="float32", **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder) as llm:
        yield llm


@pytest.fixture(autouse=True)
def whole_afterwards(llm: LLM) -> Iterator[None]:
    yield
    assert_idle(llm)


def params(seed: int, max_tokens: int = 90, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, **options)


def mixed() -> tuple[list[str], list[SamplingParams]]:
    """Constrained requests of every kind, among others, behind a shared prefix that is longer than a block."""
    shared = "The quick brown fox says hello world, and the lazy dog answers: "
    wanted = [
        params(1, structured_outputs={"json": SCHEMA}, n=2),
        params(2, max_tokens=40),
        params(3, structured_outputs={"regex": PATTERN}, repetition_penalty=1.2, logprobs=2),
        params(4, structured_outputs={"choice": CHOICES}),
        SamplingParams(temperature=0.0, structured_outputs={"choice": CHOICES}),
        params(5, top_k=5, top_p=0.9, structured_outputs={"json": json.dumps(SCHEMA)}),
        params(6, structured_outputs=StructuredOutputs(grammar='start: "<" /[a-z]{1,4}/ ">"'), presence_penalty=1.0),
        params(7, max_tokens=40, ignore_eos=True),
    ]
    return [shared + str(index) for index in range(len(wanted))], wanted


def run(llm: LLM, prompts: Any, wanted: Any) -> list[RequestOutput]:
    return llm.generate(prompts, wanted, use_tqdm=False)


def seen(outs: list[RequestOutput]) -> list[list[tuple[list[int], str, str | None]]]:
    return [[(sample.token_ids, sample.text, sample.finish_reason) for sample in out.outputs] for out in outs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[tuple[list[int], str, str | None]]]:
    """Each request alone."""
    return seen([run(llm, [prompt], [wanted])[0] for prompt, wanted in zip(*mixed())])


def check_object(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "size", "tags"]
    assert len(value["name"]) <= 6
    assert -9 <= value["size"] <= 99
    assert len(value["tags"]) <= 2
    assert set(value["tags"]) <= {"x", "東"}


def test_outputs_have_their_structure_and_end_by_themselves(expected):
    objects, _, pattern, choice, greedy_choice, more_objects, grammar, _ = expected
    for sample in (*objects, *pattern, *choice, *greedy_choice, *more_objects, *grammar):
        assert sample[2] == "stop"
        assert sample[0][-1] == EOS
    for _, text, _ in (*objects, *more_objects):
        check_object(text)
    assert len({text for _, text, _ in objects}) == 2
    assert re.fullmatch(PATTERN, pattern[0][1])
    assert choice[0][1] in CHOICES
    assert greedy_choice[0][1] in CHOICES
    assert re.fullmatch("<[a-z]{1,4}>", grammar[0][1])


def test_a_batch_gives_what_each_request_gives_alone(llm, expected):
    llm.reset_prefix_cache()
    outs = run(llm, *mixed())
    assert seen(outs) == expected
    warm = run(llm, *mixed())
    assert seen(warm) == expected
    assert all(out.num_cached_tokens for out in warm)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 6, "max_num_batched_tokens": 8, "block_size": 8},
        {"max_num_batched_tokens": 24, "kv_cache_bytes": 9 * BYTES_PER_BLOCK, "block_size": 8},
        {"tensor_parallel_size": 2, "debug_checks": True},
    ],
    ids=["chunked", "preempted", "two ranks"],
)
def test_chunks_preemption_ranks_and_steps_ahead_change_nothing(folder, expected, options):
    with engine(folder, **options) as llm:
        llm.core._executor.max_steps_in_flight = 2  # as on a GPU
        outs = run(llm, *mixed())
        preemptions = llm.core.scheduler.num_preemptions
    assert seen(outs) == expected
    if "kv_cache_bytes" in options:
        assert preemptions > 2


def test_logprobs_are_those_of_the_model_whatever_the_mask(llm):
    (out,) = run(llm, ["hello"], [params(1, structured_outputs={"choice": ["東京"]}, logprobs=3)])
    assert out["text"] == "東京"
    for token_id, entry in zip(out["token_ids"], out["logprobs"]):
        assert len(entry) >= 3
        assert entry[token_id].logprob > float("-inf")
    assert any(entry[token_id].rank > 3 for token_id, entry in zip(out["token_ids"], out["logprobs"]))


def test_the_end_of_the_structure_goes_before_min_tokens(llm):
    (out,) = run(llm, ["hello"], [params(1, structured_outputs={"choice": ["no"]}, min_tokens=50)])
    assert (out["text"], out["finish_reason"]) == ("no", "stop")


def test_max_tokens_and_stop_strings_cut_a_structure_off(llm):
    (out,) = run(llm, ["hello"], [params(1, max_tokens=3, structured_outputs={"json": SCHEMA})])
    assert out["finish_reason"] == "length"
    assert out["text"].startswith("{")
    (out,) = run(llm, ["hello"], [params(1, stop="size", structured_outputs={"json": SCHEMA})])
    assert (out["finish_reason"], out["stop_reason"]) == ("stop", "size")
    assert "size" not in out["text"]


def test_a_stop_token_may_take_the_place_of_eos(llm):
    wanted = params(1, structured_outputs={"choice": ["no"]}, ignore_eos=True, stop_token_ids=[399])
    (out,) = run(llm, ["hello"], [wanted])
    assert (out["text"], out["token_ids"][-1], out["stop_reason"]) == ("no", 399, 399)


def test_a_chat_may_think_before_its_structure(llm):
    messages = [{"role": "user", "content": "hi"}]
    for seed in range(2):
        for bias in (99.0, -100.0):
            open_id, close_id = llm.encode("<think></think>")
            wanted = params(
                seed, structured_outputs={"choice": CHOICES}, logit_bias={open_id: bias, close_id: 100.0}, max_tokens=60
            )
            (out,) = llm.chat(messages, wanted, use_tqdm=False)
            thought, tag, answer = out["text"].rpartition("</think>")
            assert bool(tag) == (bias > 0)
            assert thought.startswith("<think>") == (bias > 0)
            assert re.fullmatch("\n{0,2}", answer.removesuffix(answer.lstrip("\n")))
            assert answer.lstrip("\n") in CHOICES
            assert out["finish_reason"] == "stop"


def test_streams_and_aborts(llm):
    expected = run(llm, ["hello"], [params(3, structured_outputs={"json": SCHEMA})])[0]["text"]
    texts = [out["text"] for out in llm.stream("hello", params(3, structured_outputs={"json": SCHEMA}))]
    assert texts[-1] == expected
    assert all(expected.startswith(text) for text in texts)
    stream = llm.stream("hello", params(3, structured_outputs={"json": SCHEMA}))
    next(stream)
    stream.close()


def test_a_structure_that_cannot_be_followed_ends_its_request_alone(llm, caplog):
    free = params(2, max_tokens=30, ignore_eos=True)
    alone = run(llm, ["hello"], [free])[0]["token_ids"]
    endless = params(1, structured_outputs={"grammar": 'start: /[ab]/ "ab"{100000000}'})
    with caplog.at_level(logging.WARNING, logger="qwen_engine"):
        broken, other = run(llm, ["hello", "hello"], [endless, free])
    assert broken["finish_reason"] == "abort"
    assert re.fullmatch("[ab](ab)*a?", broken["text"])
    assert "ends without its structure: " in caplog.text
    assert other["token_ids"] == alone
    assert other["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_sec_09_a_bad_structure_is_refused_before_any_work(llm, options, param):
    good = params(1, structured_outputs={"choice": CHOICES})
    assert run(llm, ["a"], [good])[0]["text"] in CHOICES
    with pytest.raises(RequestError) as caught:
        run(llm, ["a", "b"], [good, params(1, **options)])
    assert caught.value.param == param
    with pytest.raises(RequestError, match="entry must be a token id"):
        run(llm, [[1, "a"]], [good])
    assert run(llm, ["a"], [good])[0]["text"] in CHOICES


def test_one_limit_of_ids_is_enough():
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs={"choice": ["a"]}, allowed_token_ids=[1])
    assert caught.value.param == "allowed_token_ids"


def test_structure_needs_a_tokenizer_and_a_compiled_constraint(folder, llm):
    with pytest.raises(RequestError, match="was not compiled"):
        llm.core.add(Request("x", [5], params(1, structured_outputs={"choice": CHOICES}), eos_token_ids=[EOS]))
    with engine(folder, skip_tokenizer_init=True) as plain, pytest.raises(RequestError, match="tokenizer"):
        run(plain, [[5]], [params(1, structured_outputs={"choice": CHOICES})])
