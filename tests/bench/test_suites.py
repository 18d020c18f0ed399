"""The stress suites on real engines: they pass, and every check notices what it is there for."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_engine import LLM, SamplingParams, cli
from qwen_engine.bench import load
from qwen_engine.bench import suites as suites_module
from qwen_engine.bench.load import PromptSource, check_pool, run_batch
from qwen_engine.bench.results import read_result
from qwen_engine.bench.suites import SUITES, Phase, Suite, run_suite, run_suites
from qwen_engine.engine.core import EngineCore
from qwen_engine.errors import ConfigError, EngineDeadError

SHAPES = {  # prompt tokens, prefix tokens, (requests, output tokens) of each phase
    "prefix-cache": (16_584, 16_384, [(8, 256), (1, 256), (8, 256)]),
    "high-concurrency": (4096, 0, [(16, 256)]),
    "long-decode": (8192, 0, [(2, 4096)]),
    "max-output": (8192, 0, [(1, 32_768)]),
}


def failed_checks(result: dict[str, Any]) -> set[str]:
    return {check["name"] for check in result["checks"] if not check["passed"]}


def after_steps(llm: LLM, num_steps: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `act` called once, before the engine's `num_steps`-th step from now."""
    step, calls = llm.core.step, iter(range(1, 10**9))

    def counted() -> Any:
        if next(calls) == num_steps:
            act()
        return step()

    monkeypatch.setattr(llm.core, "step", counted)


@pytest.mark.parametrize("name", SUITES)
def test_the_suites_have_the_sizes_that_were_promised(name: str):
    suite = SUITES[name]
    prompt, prefix, phases = SHAPES[name]
    assert (suite.prompt_tokens, suite.prefix_tokens) == (prompt, prefix)
    assert [(phase.num_requests, phase.output_tokens) for phase in suite.phases] == phases
    assert suite.num_context_tokens <= 40_960
    assert suite.scaled(1, 16) is suite


@pytest.mark.parametrize("scale", [0.5, 0.02, 0.0001])
@pytest.mark.parametrize("name", SUITES)
def test_a_scaled_suite_is_smaller_and_still_means_the_same(name: str, scale: float):
    full, suite = SUITES[name], SUITES[name].scaled(scale, block_size=16)
    assert 1 <= suite.prompt_tokens - suite.prefix_tokens < full.prompt_tokens
    assert suite.prefix_tokens % 16 == 0
    assert suite.prefix_tokens >= (64 if full.prefix_tokens else 0)
    for before, after in zip(full.phases, suite.phases):
        assert min(before.num_requests, 2) <= after.num_requests <= before.num_requests
        assert 2 <= after.output_tokens < before.output_tokens


def test_every_suite_passes_on_the_demo_model_and_leaves_a_file(tmp_path: Path):
    done = list(run_suites(list(SUITES.values()), "demo", {"device": "cpu"}, scale=0.004, results_dir=tmp_path))
    assert [result["name"] for _, result in done] == list(SUITES)
    for path, result in done:
        assert result["status"] == "completed", result["checks"]
        assert read_result(path) == result
        assert path.name == f"{result['created'][:10]}-cpu-demo-{result['name']}.json"
        assert all(row["output_tokens"] == row["expected_output_tokens"] for row in result["requests"])
        assert result["engine_config"]["dtype"] == "float32"
    prefix = done[0][1]["metrics"]
    assert prefix["prefix_hit_rate"] >= 0.98
    assert prefix["prefill_speedup"] > 1
    assert {"cold_decode_step_ms", "hot_decode_step_ms", "p99_itl_ms"} <= {*prefix, *done[1][1]["metrics"]}


def test_a_suite_that_cannot_fit_is_refused_before_it_runs(tiny_model: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"long-decode needs 12288 tokens of context; .* 512"):
        list(run_suites([SUITES["long-decode"]], str(tiny_model), {"device": "cpu"}, results_dir=tmp_path))
    with pytest.raises(ConfigError, match="scale is 2"):
        list(run_suites([SUITES["long-decode"]], str(tiny_model), {"device": "cpu"}, scale=2, results_dir=tmp_path))


def test_ben_03_a_second_run_meets_no_warm_cache_although_nothing_is_reset(llm: LLM, suite: Suite):
    vocab_size = llm.core.model_config.vocab_size
    for _ in range(2):
        source = PromptSource(vocab_size)
        rows = run_batch(llm, "load", source.draw("load", [200] * 3), [2] * 3).rows
        assert [row["cached_tokens"] for row in rows] == [0, 0, 0]
    source = PromptSource(vocab_size, seed=7)
    assert source.draw("load", [50]) != source.draw("load", [50])
    assert PromptSource(vocab_size, seed=7).draw("load", [50]) == PromptSource(vocab_size, seed=7).draw("load", [50])


def test_ben_03_repeated_prompts_are_flagged(llm: LLM, suite: Suite, monkeypatch: pytest.MonkeyPatch):
    prompts = PromptSource(llm.core.model_config.vocab_size).draw("load", [40] * 2)
    source = PromptSource(llm.core.model_config.vocab_size)
    monkeypatch.setattr(source, "draw", lambda name, lengths, prefix=(): prompts[: len(lengths)])
    result = run_suite(llm, dataclasses.replace(suite, prompt_tokens=40), source)
    assert failed_checks(result) == {"prompts fresh"}
    assert result["metrics"]["cached_token_share"] > 0.01


def test_ben_02_a_request_that_ends_early_is_flagged_with_both_lengths(
    llm: LLM, suite: Suite, source: PromptSource, monkeypatch: pytest.MonkeyPatch
):
    def abort_one() -> None:
        request_id = next(iter(llm.core.scheduler.requests))
        llm.core.finish(request_id, "stop")
        llm._live[request_id].abort()

    # Warm-up and two first-token batches take 4 steps; the whole batch has begun after 6.
    after_steps(llm, 6, abort_one, monkeypatch)
    result = run_suite(llm, suite, source)
    assert result["status"] == "failed"
    assert failed_checks(result) == {"requests complete"}
    (row,) = [row for row in result["requests"] if row["output_tokens"] != row["expected_output_tokens"]]
    assert row["output_tokens"] < row["expected_output_tokens"] == suite.phases[0].output_tokens


def test_a_lost_block_is_noticed(llm: LLM, suite: Suite, source: PromptSource):
    manager = llm.core.scheduler.block_manager
    lost = manager.allocate(1)
    try:
        result = run_suite(llm, suite, source)
    finally:
        manager.release(lost)
    assert failed_checks(result) == {"pool whole"}
    assert run_suite(llm, suite, source)["status"] == "completed"


def test_a_request_left_behind_and_a_broken_pool_are_noticed(
    llm: LLM, suite: Suite, source: PromptSource, monkeypatch: pytest.MonkeyPatch
):
    run = run_batch(llm, "load", source.draw("load", [20]), [2])
    scheduler = llm.core.scheduler
    assert check_pool(llm).passed
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "check", lambda: None)
        patch.setitem(scheduler.requests, "left", None)
        check = check_pool(llm)
        assert not check.passed
        assert "1 requests left" in check.detail
    with monkeypatch.context() as patch:  # even if the invariants do not tell
        patch.setattr(scheduler, "check", lambda: None)
        lost = scheduler.block_manager.allocate(1)
        assert not check_pool(llm).passed
        scheduler.block_manager.release(lost)

    def broken(*_: Any) -> None:
        raise AssertionError("block 3 is free and referenced")

    monkeypatch.setattr(scheduler.block_manager, "check", broken)
    assert not run.ended_early
    check = check_pool(llm)
    assert not check.passed
    assert "block 3 is free and referenced" in check.detail


def lose_a_block(core: EngineCore, num_steps: int) -> None:
    if num_steps == 1:
        core.scheduler.block_manager.allocate(1)


def break_down(core: EngineCore, num_steps: int) -> None:
    if num_steps == 6:
        raise RuntimeError("device-side assert")


@pytest.mark.parametrize(
    ("check", "fault", "flags"),
    [
        ("requests complete", None, []),
        ("no stall", None, ["--stall-timeout", "1e-9"]),
        ("engine alive", break_down, []),
        ("pool whole", lose_a_block, []),
        ("prefix hit", None, ["--suite", "prefix-cache", "--no-enable-prefix-caching"]),
    ],
)
def test_each_check_that_fails_is_in_the_file_and_makes_the_exit_code_1(
    check: str,
    fault: Callable[[EngineCore, int], None] | None,
    flags: list[str],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    step, num_steps = EngineCore.step, iter(range(1, 10**9))
    if fault is not None:

        def faulty(core: EngineCore) -> Any:
            fault(core, next(num_steps))
            return step(core)

        monkeypatch.setattr(EngineCore, "step", faulty)
    if check == "requests complete":  # each request ends one token early
        monkeypatch.setattr(
            load, "SamplingParams", lambda **o: SamplingParams(**{**o, "max_tokens": max(1, o["max_tokens"] - 1)})
        )
    argv = ["bench", "stress", "--suite", "high-concurrency", "--model", str(tiny_model), "--device", "cpu"]
    argv += ["--scale", "0.004", "--kv-cache-bytes", str(2 << 20), "--results-dir", str(tmp_path), *flags]
    assert cli.main(argv) == 1
    (path,) = tmp_path.iterdir()
    result = read_result(path)
    assert result["status"] == "failed"
    assert check in failed_checks(result)


def test_an_engine_that_does_nothing_is_stopped_and_noticed(
    llm: LLM, suite: Suite, source: PromptSource, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(llm.core, "step", list)
    result = run_suite(llm, suite, source, stall_timeout_s=3600)  # the number of silent steps ends it, no clock
    assert failed_checks(result) == {"no stall", "requests complete"}
    monkeypatch.undo()
    assert run_suite(llm, suite, source)["status"] == "completed"


def test_a_silence_longer_than_allowed_is_noticed(llm: LLM, suite: Suite, source: PromptSource):
    result = run_suite(llm, suite, source, stall_timeout_s=1e-9)
    assert "no stall" in failed_checks(result)


def test_a_missed_prefix_is_noticed(tiny_model: Path):
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_bytes": 2 << 20, "max_num_seqs": 8}
    with LLM(tiny_model, enable_prefix_caching=False, **options) as llm:
        suite = SUITES["prefix-cache"].scaled(0.004, block_size=16)
        result = run_suite(llm, suite, PromptSource(llm.core.model_config.vocab_size))
    assert failed_checks(result) == {"prefix hit"}
    assert result["metrics"]["prefix_hit_rate"] == 0


@pytest.mark.parametrize("error", [EngineDeadError("rank 1 died"), RuntimeError("device-side assert")])
def test_an_engine_that_fails_is_written_down_with_what_it_had_done(
    error: Exception, llm: LLM, suite: Suite, source: PromptSource, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        raise error

    after_steps(llm, 6, fail, monkeypatch)
    result = run_suite(llm, suite, source)
    assert failed_checks(result) == {"engine alive", "requests complete"}
    (detail,) = [check["detail"] for check in result["checks"] if check["name"] == "engine alive"]
    assert str(error) in detail
    assert result["metrics"]["first_token_s"] > 0
    assert result["metrics"]["total_s"] is None


def test_a_dead_engine_ends_the_list_of_suites(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run_dead(llm: LLM, suite: Suite, source: PromptSource, **options: Any) -> dict[str, Any]:
        llm.close()
        return run_suite(llm, suite, source, **options)

    monkeypatch.setattr(suites_module, "run_suite", run_dead)
    suites = [SUITES["high-concurrency"], SUITES["long-decode"]]
    done = list(run_suites(suites, str(tiny_model), {"device": "cpu"}, scale=0.004, results_dir=tmp_path))
    assert [result["status"] for _, result in done] == ["failed"]


@pytest.mark.parametrize("num_steps", [1, 6])
def test_an_interrupt_keeps_the_rows_and_says_so(
    num_steps: int, llm: LLM, suite: Suite, source: PromptSource, monkeypatch: pytest.MonkeyPatch
):
    after_steps(llm, num_steps, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    result = run_suite(llm, suite, source)
    assert result["status"] == "interrupted"
    phases = {row["phase"] for row in result["requests"]}
    assert phases == (
        {"warm-up"} if num_steps == 1 else {"warm-up", "load/first-token-1", "load/first-token-2", "load"}
    )
    assert any(row["finish_reason"] == "abort" for row in result["requests"])
    assert run_suite(llm, suite, source)["status"] == "completed"


def test_an_interrupt_ends_the_list_and_keeps_the_files(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    suites = [SUITES["high-concurrency"], SUITES["long-decode"], SUITES["max-output"]]

    def run_interrupted(llm: LLM, suite: Suite, source: PromptSource, **options: Any) -> dict[str, Any]:
        if suite.name == "long-decode":
            after_steps(llm, 5, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
        return run_suite(llm, suite, source, **options)

    monkeypatch.setattr(suites_module, "run_suite", run_interrupted)
    done = list(run_suites(suites, str(tiny_model), {"device": "cpu"}, scale=0.004, results_dir=tmp_path))
    assert [result["status"] for _, result in done] == ["completed", "interrupted"]
    assert [read_result(path) for path, _ in done] == [result for _, result in done]


def test_ben_07_one_token_outputs_have_no_gaps_and_no_decode_step(llm: LLM, source: PromptSource):
    suite = Suite("one-token", "", prompt_tokens=9, phases=(Phase("load", num_requests=1, output_tokens=1),))
    result = run_suite(llm, suite, source)
    assert result["status"] == "completed", result["checks"]
    assert result["metrics"]["mean_itl_ms"] is None
    assert result["metrics"]["mean_tpot_ms"] is None
    assert result["metrics"]["mean_ttft_ms"] > 0
