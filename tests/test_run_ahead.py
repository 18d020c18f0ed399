"""One step ahead, decode steps padded: every request gives what it gives alone on an engine that does neither."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ahead import assert_idle, assert_nothing_in_flight, poisoned, run_ahead
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from test_llm import (
    VOCAB,
    base_output,
    digest,
    folder,  # noqa: F401 - a fixture
    greedy,
    interrupted_at,
    one,
    run,
    seeded,
    tokens,
    workload,
    workload_alone,  # noqa: F401 - a fixture
)
from tiny_models import BYTES_PER_BLOCK, random_prompt

from qwen_engine import LLM, RequestOutput, SamplingParams
from qwen_engine.errors import EngineDeadError

NUM_INTERRUPTS = 6


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:  # noqa: F811
    with LLM(folder, device="cpu", max_num_seqs=16, kv_cache_bytes=256 * BYTES_PER_BLOCK) as llm:
        assert llm.core._executor.max_steps_in_flight == 1  # a CPU gains nothing by running ahead
        yield llm


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Iterator[LLM]:  # noqa: F811
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_ahead(monkeypatch)
        llm = poisoned(folder, kv_cache_bytes=256 * BYTES_PER_BLOCK)
    with llm:
        yield llm


@pytest.fixture
def make_ahead(monkeypatch: pytest.MonkeyPatch, folder: Path):  # noqa: F811
    """Factory of further engines that run ahead."""
    run_ahead(monkeypatch)
    return functools.partial(poisoned, folder)


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ahead" in request.fixturenames:
        llm = request.getfixturevalue("ahead")
        assert_nothing_in_flight(llm)
        assert_idle(llm)


@pytest.mark.parametrize(
    ("options", "is_tight"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 19, "kv_cache_bytes": 13 * BYTES_PER_BLOCK, "scheduling_policy": "priority"}, True),
    ],
    ids=str,
)
def test_pre_03_running_ahead_gives_the_same_under_every_schedule(options, is_tight, make_ahead, workload_alone):  # noqa: F811
    """Every sampling feature; batched, chunked, preempted, cache cold and warm, rows joining and leaving."""
    options = {"kv_cache_bytes": 256 * BYTES_PER_BLOCK, **options}
    with make_ahead(**options) as llm:
        cold = run(llm, *workload())
        assert_nothing_in_flight(llm)
        warm = run(llm, *workload())
        assert digest(cold) == workload_alone
        assert digest(warm) == workload_alone
        assert sum(out.metrics.num_preemptions for out in cold) > 0 or not is_tight
        assert_idle(llm)


def test_the_next_step_is_launched_before_the_last_one_is_read(ahead, plain):
    for llm, expected in ((ahead, 1), (plain, 0)):
        stream = llm.stream([5, 6], greedy(8))
        next(stream)
        assert len(llm.core._in_flight) == expected
        assert len(list(stream)) == 7


def test_logprobs_of_prompts_and_outputs_are_those_of_an_engine_that_waits(ahead, plain):
    prompts = [random_prompt(n, vocab_size=VOCAB) for n in (1, 17, 60)]
    params = [greedy(6, logprobs=3, prompt_logprobs=2), seeded(3, 6, logprobs=1, prompt_logprobs=0), greedy(6)]
    for mine, other in zip(run(ahead, prompts, params), run(plain, prompts, params)):
        assert tokens([mine]) == tokens([other])
        for ours, theirs in ((mine["logprobs"], other["logprobs"]), (mine.prompt_logprobs, other.prompt_logprobs)):
            assert (ours is None) == (theirs is None)
            for entry, reference in zip(ours or [], theirs or []):
                assert (entry or {}).keys() == (reference or {}).keys()
                assert {t: v.logprob for t, v in (entry or {}).items()} == pytest.approx(
                    {t: v.logprob for t, v in (reference or {}).items()}, abs=1e-5
                )


def test_stp_01_stop_strings_and_ids_end_where_they_do_without_running_ahead(ahead, plain):
    text, ids = base_output(plain)["text"], base_output(plain)["token_ids"]
    kinds = [{"stop": text[10:14]}, {"stop": text[3]}, {"stop_token_ids": [ids[7]]}, {"stop": text[12:15], "n": 3}, {}]
    params = [seeded(3, 40, **kind) for kind in kinds]
    expected = [one(plain, "The quick", kind) for kind in params]
    assert {out["finish_reason"] for out in expected} == {"stop", "length"}
    for out, reference in zip(run(ahead, ["The quick"] * len(params), params), expected):
        assert [(s.text, s.token_ids, s.finish_reason, s.stop_reason) for s in out.outputs] == [
            (s.text, s.token_ids, s.finish_reason, s.stop_reason) for s in reference.outputs
        ]


def test_a_request_that_stops_wastes_at_most_one_row_and_one_that_reaches_its_length_none(ahead, plain, monkeypatch):
    ids = base_output(plain, max_tokens=12)["token_ids"]
    runner, rows = ahead.core._executor.runner, []
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda plan, masks: rows.extend(plan.slots) or execute(plan))
    for options, wasted in (({"stop_token_ids": [ids[6]]}, 1), ({}, 0)):
        rows.clear()
        out = one(ahead, "The quick", seeded(3, 12, **options))
        assert len(rows) == len(out["token_ids"]) + wasted
        assert_nothing_in_flight(ahead)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_api_10_aborts_drop_what_is_in_flight(after, ahead, plain):
    beside = ahead.stream([9], seeded(4, 30))
    next(beside)
    stream = ahead.stream([[5, 6], random_prompt(60, vocab_size=VOCAB)], seeded(2, 200, n=2))
    for _ in range(after):
        next(stream)
    stream.close()
    ahead.core.scheduler.check()
    *_, last = beside
    assert tokens([last]) == tokens([one(plain, [9], seeded(4, 30))])


def test_an_interrupt_anywhere_leaves_an_engine_that_runs_ahead_usable(make_ahead):
    prompts = [random_prompt(n, vocab_size=VOCAB) for n in (20, 33, 3)]
    params = [seeded(1, 12, presence_penalty=1.0), greedy(10, bad_words=["e", "hello"]), seeded(2, 6, logprobs=1)]
    with make_ahead(kv_cache_bytes=6 * BYTES_PER_BLOCK, max_num_batched_tokens=24) as llm:
        expected = tokens(run(llm, prompts, params))
        llm.reset_prefix_cache()
        with interrupted_at(-1) as num_lines:
            run(llm, prompts, params)
        total = num_lines()
        for line in range(total // 20, total, total // NUM_INTERRUPTS):
            llm.reset_prefix_cache()
            with interrupted_at(line), pytest.raises(KeyboardInterrupt):
                run(llm, prompts, params)
            assert_nothing_in_flight(llm)
            assert tokens(run(llm, prompts, params)) == expected, f"after an interrupt at line {line} of {total}"
            assert_idle(llm)


def test_a_failed_launch_loses_the_step_before_it_and_no_more(ahead, monkeypatch):
    expected = one(ahead, [5, 6], greedy())["token_ids"]
    outer = ahead.stream([5, 6], greedy(100))
    next(outer)
    with monkeypatch.context() as patch:
        patch.setattr(ahead.core._executor.runner, "execute", lambda plan, masks: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one(ahead, [7], greedy())
    assert [out["finish_reason"] for out in outer] == ["abort"]
    assert_nothing_in_flight(ahead)
    assert one(ahead, [5, 6], greedy())["token_ids"] == expected


def test_closing_with_a_step_in_flight_ends_at_once(make_ahead):
    llm = make_ahead(kv_cache_bytes=64 * BYTES_PER_BLOCK)
    stream = llm.stream([5, 6], greedy(300))
    next(stream)
    assert llm.core._in_flight
    closer = threading.Thread(target=llm.close)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    with pytest.raises(EngineDeadError, match="closed"):
        next(stream)


PROMPTS = [random_prompt(length, seed=3, vocab_size=VOCAB) for length in (1, 16, 40)]
PROMPTS.append([*PROMPTS[2][:32], 7, 8])


@functools.cache
def kinds_of_params(text: str) -> list[SamplingParams]:
    return [
        greedy(12),
        seeded(1, 20, logprobs=1),
        seeded(2, 25, stop=[text[2:4], text[8:10]]),
        seeded(3, 18, n=2),
        seeded(4, 16, top_k=8, presence_penalty=0.7),
        seeded(5, 30, min_tokens=6, ignore_eos=False, logit_bias={2: 4.0}),
    ]


class Machine(RuleBasedStateMachine):
    """Streams that come, move, are left, and die together; on a pool small enough for preemption."""

    llm: LLM
    plain: LLM
    solo: dict[tuple[int, int], RequestOutput]

    @initialize()
    def start(self) -> None:
        self.streams: list[tuple[Iterator[RequestOutput], tuple[int, int], list[RequestOutput]]] = []
        self.kinds = kinds_of_params(one(self.plain, PROMPTS[1], seeded(2, 25))["text"])
        self.llm.reset_prefix_cache()

    @rule(prompt=st.sampled_from(range(len(PROMPTS))), kind=st.sampled_from(range(6)))
    def add(self, prompt: int, kind: int) -> None:
        stream = self.llm.stream([PROMPTS[prompt]], self.kinds[kind])
        self.streams.append((stream, (prompt, kind), []))
        self.move(len(self.streams) - 1, 1)

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 100), times=st.integers(1, 6))
    def move(self, which: int, times: int) -> None:
        stream, _, seen = self.streams[which % len(self.streams)]
        for _ in range(times):
            out = next(stream, None)
            if out is None:
                self.compare(*self.streams.pop(which % len(self.streams))[1:])
                return
            seen.append(out)

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        stream, job, seen = self.streams.pop(which % len(self.streams))
        stream.close()
        if seen:
            self.compare_beginning(job, seen[-1])

    @precondition(lambda self: self.streams)
    @rule()
    def die_together(self) -> None:
        """What a Ctrl-C in a step does: the outcome of what was in flight is unknown."""
        with pytest.MonkeyPatch.context() as patch:

            def interrupt(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(self.llm.core._executor.runner, "execute", interrupt)
            with pytest.raises(KeyboardInterrupt):
                one(self.llm, [9], greedy(4))
        assert_nothing_in_flight(self.llm)
        for stream, job, seen in self.streams:
            seen.extend(stream)
            if seen:
                self.compare_beginning(job, seen[-1])
        self.streams.clear()

    @rule()
    def forget_prefixes(self) -> None:
        self.llm.reset_prefix_cache()

    def expected(self, job: tuple[int, int]) -> RequestOutput:
        if job not in self.solo:
            self.solo[job] = one(self.plain, PROMPTS[job[0]], self.kinds[job[1]])
        return self.solo[job]

    def compare(self, job: tuple[int, int], seen: list[RequestOutput]) -> None:
        assert seen[-1].finished
        for mine, other in zip(seen[-1].outputs, self.expected(job).outputs):
            assert (mine.text, mine.token_ids) == (other.text, other.token_ids)
            assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)

    def compare_beginning(self, job: tuple[int, int], out: RequestOutput) -> None:
        for mine, other in zip(out.outputs, self.expected(job).outputs):
            assert mine.token_ids == other.token_ids[: len(mine.token_ids)]

    def teardown(self) -> None:
        if not hasattr(self, "streams"):
            return
        while self.streams:
            self.move(0, 50)
        assert_nothing_in_flight(self.llm)
        assert_idle(self.llm)


def test_any_order_of_requests_gives_each_what_it_gives_alone(make_ahead, plain):
    with make_ahead(kv_cache_bytes=14 * BYTES_PER_BLOCK, max_num_batched_tokens=24) as llm:
        solo: dict[Any, Any] = {}
        machine = type("BoundMachine", (Machine,), {"llm": llm, "plain": plain, "solo": solo})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=6,
                stateful_step_count=16,
                suppress_health_check=list(HealthCheck),
            ),
        )
        assert len(solo) > 3
