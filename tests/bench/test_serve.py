"""`bench serve` against a stub server whose schedule is known: counts, definitions, arrivals, and what is written."""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_server import DONE, Reply, StubServer, VirtualLoop, event, run_virtual, steady, text, usage

from qwen_engine.bench import serve
from qwen_engine.bench.cli import parse_args
from qwen_engine.bench.results import ResultError, read_result, validate
from qwen_engine.bench.serve_client import SseDecoder
from qwen_engine.bench.serve_load import arrival_offsets_s, run_load
from qwen_engine.errors import ConfigError

SMALL = ["--random-input-len", "32", "--random-output-len", "8"]
CLI = (
    "import argparse, sys\nfrom qwen_engine.bench import serve\np = argparse.ArgumentParser()\nserve.add_arguments(p)\n"
)
CLI += "sys.exit(serve.run(p.parse_args()))"


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    return parser.parse_args([*SMALL, *flags])


def bench(reply: Callable[[int, dict[str, Any]], Reply], *flags: str) -> tuple[dict[str, Any], StubServer]:
    """What one run against a stub reports, `flat`, and the stub."""

    async def main() -> tuple[dict[str, Any], StubServer]:
        async with StubServer(reply) as stub:
            return await serve.benchmark(parse("--base-url", stub.url, *flags)), stub

    result, stub = run_virtual(main())
    return flat(result), stub


def flat(result: dict[str, Any]) -> dict[str, Any]:
    """A result that followed the schema, its parameters and figures under their own names as vLLM's JSON has them.

    warnings: its notes, and what failed checks say.
    """
    validate(result, "the result")
    json.dumps(result, allow_nan=False)
    failed = {check["name"]: check["detail"] for check in result["checks"] if not check["passed"]}
    warnings = [*result["notes"], *(text for name, text in failed.items() if name != "requests complete")]
    rest = {key: result[key] for key in ("status", "requests", "distributions", "device")}
    rest |= {"failed_checks": list(failed), "warnings": warnings, "shown": serve.render(result)}
    return {**result["parameters"], **result["metrics"], **rest}


def errors(report: dict[str, Any]) -> dict[str, int]:
    return dict(collections.Counter(row["error"] for row in report["requests"] if row["error"]))


def test_ben_01_counts_are_the_servers_and_token_time_ends_with_the_last_token() -> None:
    steps = [
        (0.0, text("")),  # sent before there is any token
        (0.5, text(" ")),
        (0.1, text("<|im_start|>")),
        (0.1, text("")),  # a special token that is hidden
        (0.2, text(" three more tokens")),
        (0.1, text("", "length")),  # the last token has no text
        (3.0, usage(8, prompt_tokens=17)),
        (4.0, DONE),
    ]
    report, _ = bench(lambda *_: Reply(steps), "--num-prompts", "3", "--save-detailed")
    assert (report["completed"], report["total_output_tokens"], report["total_input_tokens"]) == (3, 24, 51)
    for row in report["requests"]:
        assert row["ttft_ms"] == pytest.approx(500)
        assert row["e2el_ms"] == pytest.approx(1000)
        assert row["tpot_ms"] == pytest.approx(500 / 7)
        assert row["itl_ms"] == pytest.approx([100, 300])
        assert row["generated_text"] == " <|im_start|> three more tokens"
    assert report["mean_tpot_ms"] == pytest.approx(500 / 7)
    assert report["duration"] == pytest.approx(8.0)
    assert report["output_throughput"] == pytest.approx(24 / 8)
    assert report["total_token_throughput"] == pytest.approx(75 / 8)


def test_ben_01_merged_chunks_change_gaps_but_no_totals() -> None:
    single, _ = bench(lambda *_: steady(9, ttft_s=0.1, itl_s=0.05), "--num-prompts", "1")
    merged_steps = [(0.1, text("a")), (0.2, text("bcde")), (0.2, text("fg") + text("hi")), (0, usage(9) + DONE)]
    merged, _ = bench(lambda *_: Reply(merged_steps), "--num-prompts", "1")
    for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput", "total_output_tokens"):
        assert merged[name] == pytest.approx(single[name])
    assert single["mean_itl_ms"] == pytest.approx(50)
    assert merged["p50_itl_ms"] == merged["mean_itl_ms"] == pytest.approx(200)  # no gap of zero inside a read


def test_ben_01_token_time_is_undefined_when_all_tokens_come_at_once() -> None:
    steps = [(0.3, text("all eight tokens")), (0.001, text("", "length") + usage(8) + DONE)]
    report, _ = bench(lambda *_: Reply(steps), "--num-prompts", "2")
    assert report["total_output_tokens"] == 16
    assert report["mean_tpot_ms"] is None


def test_chunks_are_counted_with_a_warning_when_the_server_sends_no_usage() -> None:
    steps = [(0.1, text("a")), (0.1, text("b", "stop")), (0, DONE)]
    report, _ = bench(lambda *_: Reply(steps), "--num-prompts", "2")
    assert report["total_output_tokens"] == 4
    assert report["total_input_tokens"] is report["total_token_throughput"] is None
    assert any("2 of 2 responses had no usage" in warning for warning in report["warnings"])


def test_chat_times_the_first_reasoning_text_and_not_the_role() -> None:
    def delta(content: dict[str, Any], reason: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "delta": content, "finish_reason": reason}]})

    steps = [
        (0.1, delta({"role": "assistant", "content": ""})),
        (0.1, delta({"reasoning_content": "hm"})),
        (0.1, delta({"content": "yes"})),
        (0.0, delta({}, "stop")),
        (0.0, usage(2)),
        (0.0, DONE),
    ]
    report, stub = bench(lambda *_: Reply(steps), "--backend", "openai-chat", "--num-prompts", "1", "--save-detailed")
    assert stub.paths == ["/v1/chat/completions"]
    assert stub.bodies[0]["messages"][0]["role"] == "user"
    assert stub.bodies[0]["max_completion_tokens"] == 8
    row = report["requests"][0]
    assert (row["ttft_ms"], row["tpot_ms"]) == (pytest.approx(200), pytest.approx(100))
    assert row["generated_text"] == "hmyes"


@pytest.mark.parametrize("flag", [True, False])
def test_ben_02_every_request_carries_ignore_eos_and_lengths_are_compared(flag: bool) -> None:
    flags = ["--num-prompts", "6", "--num-warmups", "2", "--save-detailed", *(["--ignore-eos"] if flag else [])]
    report, stub = bench(lambda n, _: steady(3 if n == 4 else 8), *flags)
    assert [body.get("ignore_eos", False) for body in stub.bodies] == [flag] * 8
    assert [body["max_tokens"] for body in stub.bodies] == [8] * 8
    assert (report["total_requested_output_tokens"], report["total_output_tokens"]) == (48, 43)
    assert [(r["requested_output_tokens"], r["output_tokens"]) for r in report["requests"]].count((8, 3)) == 1
    assert report["num_length_mismatches"] == 1
    assert report["failed_checks"] == (["lengths as asked"] if flag else [])
    assert any("1 of 6 outputs have another length" in warning for warning in report["warnings"])


def caching_reply(cache: set[str]) -> Callable[[int, dict[str, Any]], Reply]:
    """A server that remembers whole prompts of 32 tokens."""

    def reply(_: int, body: dict[str, Any]) -> Reply:
        prompt = json.dumps(body["prompt"])
        cached = 31 if prompt in cache else 0
        cache.add(prompt)
        return steady(8, prompt_tokens=32, cached_tokens=cached)

    return reply


def test_ben_03_a_second_run_sends_other_prompts() -> None:
    cache: set[str] = set()
    runs = [bench(caching_reply(cache), "--num-prompts", "5", "--num-warmups", "2") for _ in range(2)]
    prompts = [body["prompt"] for _, stub in runs for body in stub.bodies]
    assert len(set(prompts)) == 14
    for report, _ in runs:
        assert report["cached_token_share"] == 0
        assert report["warnings"] == []
        assert "new prompts" in report["shown"]
    assert runs[0][0]["prompt_seed"] != runs[1][0]["prompt_seed"]


def test_ben_03_a_warm_cache_under_a_given_seed_is_reported_and_flagged() -> None:
    cache: set[str] = set()
    cold, warm = (bench(caching_reply(cache), "--num-prompts", "5", "--seed", "0")[0] for _ in range(2))
    assert (cold["cached_token_share"], cold["warnings"]) == (0, [])
    assert warm["cached_tokens"] == 5 * 31
    assert warm["cached_token_share"] == pytest.approx(31 / 32)
    assert any("96.9% of the prompt tokens came from the server's cache" in warning for warning in warm["warnings"])


def test_a_shared_prefix_may_be_cached_without_a_flag() -> None:
    flags = ["--num-prompts", "4", "--random-prefix-len", "32"]
    report, stub = bench(lambda *_: steady(8, prompt_tokens=64, cached_tokens=32), *flags)
    assert report["warnings"] == []
    words = [body["prompt"].split() for body in stub.bodies]
    assert len({tuple(prompt[:32]) for prompt in words}) == 1
    assert len({tuple(prompt[32:]) for prompt in words}) == 4
    report, _ = bench(lambda *_: steady(8, prompt_tokens=64, cached_tokens=40), *flags)
    assert len(report["warnings"]) == 1


def test_ben_05_only_successes_have_latencies_and_throughput_divides_by_the_true_span() -> None:
    def reply(number: int, _: dict[str, Any]) -> Reply:
        if number % 3 == 0:
            return Reply([(2.0, b'{"error": {"message": "no memory"}}')], status=500)
        if number % 3 == 1:
            return Reply([(0.05, text("", "stop")), (0, usage(0)), (0, DONE)])
        return steady(8, ttft_s=0.1, itl_s=0.1)

    report, _ = bench(reply, "--num-prompts", "9", "--save-detailed", "--goodput", "ttft:500")
    assert (report["completed"], report["failed"]) == (3, 6)
    assert errors(report) == {"HTTP 500: no memory": 3, "the stream held no token": 3}
    assert report["failed_checks"] == ["requests complete"]
    assert report["duration"] == pytest.approx(2.0)
    assert report["mean_ttft_ms"] == report["p99_ttft_ms"] == pytest.approx(100)
    assert report["mean_e2el_ms"] == pytest.approx(800)
    assert report["output_throughput"] == pytest.approx(3 * 8 / 2)
    assert report["request_throughput"] == report["request_goodput"] == pytest.approx(1.5)
    assert report["total_input_tokens"] == 30
    assert all(row["ttft_ms"] is None for row in report["requests"] if row["error"])


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (
            [(0.1, text("a")), (0.1, event({"error": {"message": "died"}})), (0, DONE)],
            "error event: died",
        ),
        ([(0.1, text("a")), (0.1, event({"object": "error", "message": "flat"})), (0, DONE)], "error event: flat"),
        ([(0.1, text("a")), (0.1, text("b"))], "the stream ended before the completion did"),
        ([(0.1, text("a")), (0.1, text("", "abort")), (0, DONE)], "the server aborted the request"),
        ([(0.1, text("a")), (0.1, b"data: {nonsense\n\n")], "malformed event"),
        ([(0.1, b'data: {"choices": 3}\n\n')], "malformed event"),
        ([], "the stream ended before the completion did"),
    ],
)
def test_ben_05_a_stream_that_breaks_is_a_failure(steps: list[tuple[float, bytes]], error: str) -> None:
    report, _ = bench(lambda *_: Reply(steps), "--num-prompts", "1")
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (0, 1, 0)
    assert next(iter(errors(report))).startswith(error)
    assert report["mean_ttft_ms"] is report["mean_itl_ms"] is None


def test_ben_05_a_server_that_is_not_there_fails_every_request() -> None:
    report = flat(run_virtual(serve.benchmark(parse("--port", "9", "--model", "m", "--num-prompts", "2"))))
    assert (report["completed"], report["failed"]) == (0, 2)
    with pytest.raises(ConfigError, match=r"no model at http://127.0.0.1:9/v1/models"):
        run_virtual(serve.benchmark(parse("--port", "9", "--num-prompts", "2")))


def test_ben_07_one_token_outputs_have_no_token_time() -> None:
    report, _ = bench(lambda *_: steady(1), "--num-prompts", "3", "--goodput", "tpot:1", "ttft:150")
    for metric in ("tpot", "itl"):
        assert {report[f"{name}_{metric}_ms"] for name in ("mean", "median", "std", "p50", "p99")} == {None}
    assert report["mean_ttft_ms"] == pytest.approx(100)
    assert report["request_goodput"] == report["request_throughput"]


def test_ben_07_one_request_has_no_spread() -> None:
    report, _ = bench(lambda *_: steady(8), "--num-prompts", "1")
    assert (report["completed"], report["std_ttft_ms"]) == (1, 0)
    assert (report["mean_itl_ms"], report["p99_itl_ms"]) == (pytest.approx(20), pytest.approx(20))


def test_ben_07_zero_requests_write_a_report_of_nulls(tmp_path: Path) -> None:
    report, stub = bench(lambda *_: steady(8), "--num-prompts", "0", "--save-detailed", "--goodput", "ttft:1")
    assert stub.bodies == report["requests"] == []
    assert (report["completed"], report["failed"], report["duration"]) == (0, 0, 0)
    names = ("mean_ttft_ms", "p99_itl_ms", "request_throughput", "output_throughput", "request_goodput")
    assert {report[name] for name in names} == {None}


def test_percentiles_follow_the_flags() -> None:
    flags = ["--num-prompts", "4", "--max-concurrency", "1"]
    flags += ["--percentile-metrics", "ttft", "--metric-percentiles", "25,99.9"]
    report, _ = bench(lambda n, _: steady(8, ttft_s=0.1 * (n + 1)), *flags)
    figures = {key: value for key, value in report.items() if key.endswith("_ms") and "client" not in key}
    assert figures.pop("goodput_slos_ms") == {}
    assert figures == pytest.approx(
        {
            "mean_ttft_ms": 250,
            "median_ttft_ms": 250,
            "std_ttft_ms": np.std([100, 200, 300, 400]),
            "p25_ttft_ms": 175,
            "p99.9_ttft_ms": 399.7,
        }
    )


def test_goodput_counts_requests_that_meet_every_slo() -> None:
    replies = [steady(8), steady(8, ttft_s=0.6), steady(8, itl_s=0.06), steady(8, ttft_s=0.6, itl_s=0.06)]
    flags = ["--num-prompts", "4", "--max-concurrency", "1", "--goodput", "ttft:500", "tpot:50"]
    report, _ = bench(lambda n, _: replies[n], *flags)
    assert report["request_goodput"] * report["duration"] == pytest.approx(1)
    assert "goodput" in report["shown"]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_between_sends_are_gamma_distributed(burstiness: float) -> None:
    """Mean 1/rate and coefficient of variation 1/sqrt(burstiness), as sent on a clock that jumps."""
    num_requests, rate, sent_s = 4000, 50.0, []
    rng = np.random.default_rng(5)

    async def main() -> None:
        async def send(_: int) -> None:
            sent_s.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.0)

        offsets_s = arrival_offsets_s(num_requests, request_rate=rate, burstiness=burstiness, rng=rng)
        await run_load(send, range(num_requests), offsets_s=offsets_s, max_concurrency=None, on_result=lambda _: None)

    run_virtual(main(), settle_s=0)
    gaps = np.diff(sent_s)
    assert sent_s[0] == 0
    standard_error = 1 / np.sqrt(burstiness * num_requests)
    assert gaps.mean() * rate == pytest.approx(1, abs=4 * standard_error)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / np.sqrt(burstiness), rel=0.1)
    if burstiness == 1.0:  # memoryless: the share of gaps beyond t is exp(-rate t)
        for share in (0.9, 0.5, 0.1):
            assert (gaps > -np.log(share) / rate).mean() == pytest.approx(share, abs=0.03)


def test_an_infinite_rate_sends_all_at_once() -> None:
    _, stub = bench(lambda *_: steady(8), "--num-prompts", "20")
    assert stub.peak_in_flight == 20
    assert set(stub.arrivals_s) == {stub.arrivals_s[0]}


@pytest.mark.parametrize("flags", [[], ["--request-rate", "100"]])
def test_a_closed_loop_keeps_its_slots_full_and_never_above_the_cap(flags: list[str]) -> None:
    def reply(number: int, _: dict[str, Any]) -> Reply:
        return Reply([(0.1, b"{}")], status=503) if number % 5 == 0 else steady(8, itl_s=0.01 * (number % 3))

    flags = [*flags, "--num-prompts", "40", "--num-warmups", "7", "--max-concurrency", "4"]
    report, stub = bench(reply, *flags)
    assert stub.peak_in_flight == report["max_concurrent_requests"] == 4
    assert report["completed"] + report["failed"] == 40


def test_seed_and_extra_fields_reach_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    flags = ["--num-prompts", "3", "--extra-body", '{"top_k": 3, "temperature": 0.5}', "--random-range-ratio", "0.5"]
    report, stub = bench(lambda *_: steady(8), *flags, "--seed", "3")
    _, again = bench(lambda *_: steady(8), *flags, "--seed", "3")
    assert sorted(map(json.dumps, stub.bodies)) == sorted(map(json.dumps, again.bodies))
    for body in stub.bodies:
        assert (body["top_k"], body["temperature"], body["model"]) == (3, 0.5, "stub-model")
        assert 16 <= len(body["prompt"].split()) <= 48
        assert 4 <= body["max_tokens"] <= 12
    assert stub.headers[0]["authorization"] == "Bearer sk-test"
    assert "sk-test" not in json.dumps(report)


def test_a_tokenizer_makes_prompts_of_ids_with_exact_lengths() -> None:
    _, stub = bench(lambda *_: steady(8), "--num-prompts", "3", "--tokenizer", "demo")
    assert [len(body["prompt"]) for body in stub.bodies] == [32] * 3
    assert all(isinstance(id_, int) for id_ in stub.bodies[0]["prompt"])
    _, stub = bench(lambda *_: steady(8), "--num-prompts", "1", "--tokenizer", "demo", "--backend", "openai-chat")
    assert isinstance(stub.bodies[0]["messages"][0]["content"], str)


def test_random_prompts_that_are_longer_than_asked_for_are_noted() -> None:
    longer, exact = steady(8, prompt_tokens=70), steady(8, prompt_tokens=33)
    report, _ = bench(lambda *_: longer, "--num-prompts", "3")
    assert report["warnings"] == ["prompts have 70 tokens on average, not 32; --tokenizer makes lengths exact"]
    report, _ = bench(lambda *_: exact, "--num-prompts", "3")
    assert report["warnings"] == []


def test_datasets_from_files(tmp_path: Path) -> None:
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 5}\n')
    flags = ["--dataset-path", str(custom), "--dataset-name", "custom", "--custom-output-len", "8"]
    report, stub = bench(lambda *_: steady(8), *flags, "--max-concurrency", "1", "--num-warmups", "1")
    assert [(b["prompt"], b["max_tokens"]) for b in stub.bodies] == [("one", 8), ("one", 8), ("two", 5)]
    assert "custom.jsonl has 2 prompts; 1000 were asked for" in report["warnings"][0]
    assert "warm-ups used measured prompts" in report["warnings"][1]

    talk = [{"from": "human", "value": "How are you today?"}, {"from": "gpt", "value": "I am very well, thank you."}]
    sharegpt = tmp_path / "sharegpt.json"
    sharegpt.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))
    flags = ["--dataset-path", str(sharegpt), "--dataset-name", "sharegpt", "--num-prompts", "1"]
    _, stub = bench(lambda *_: steady(8), *flags, "--tokenizer", "demo")
    assert [body["prompt"] for body in stub.bodies] == ["How are you today?"]
    assert stub.bodies[0]["max_tokens"] > 4
    with pytest.raises(ConfigError, match="sharegpt-output-len"):
        bench(lambda *_: steady(8), *flags)


def test_prefix_repetition_uses_each_prefix_equally_often() -> None:
    lengths = ["--prefix-repetition-prefix-len", "6", "--prefix-repetition-suffix-len", "9"]
    flags = ["--dataset-name", "prefix_repetition", *lengths, "--prefix-repetition-num-prefixes", "3"]
    _, stub = bench(lambda *_: steady(8), *flags, "--num-prompts", "12")
    prompts = [body["prompt"].split() for body in stub.bodies]
    assert {len(prompt) for prompt in prompts} == {15}
    prefixes = [tuple(prompt[:6]) for prompt in prompts]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--goodput", "itl:5"], "like ttft:500, not 'itl:5'"),
        (["--goodput", "ttft:soon"], "like ttft:500, not 'ttft:soon'"),
        (["--num-prompts", "-1"], "--num-prompts is -1; it must be at least 0"),
        (["--request-rate", "0"], "--request-rate is 0.0; it must be above 0"),
        (["--random-range-ratio", "1"], "below 1"),
        (["--max-concurrency", "0"], "--max-concurrency is 0; it must be at least 1"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], "cannot read the dataset /nowhere"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_virtual(serve.benchmark(parse("--model", "m", *flags)))
    assert message in str(caught.value)


EVENTS = b': ping\r\n\r\ndata: {"a": 1}\r\ndata: 2\r\n\r\n'
EVENTS += b"data:x\ndata: y\n\nevent: z\nid: 3\n\rdata: \xe4\xbd\xa0\r\rdata\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_are_read_from_bytes_cut_anywhere(size: int) -> None:
    decoder = SseDecoder()
    found = [item for i in range(0, len(EVENTS), size) for item in decoder.feed(EVENTS[i : i + size])]
    assert found == [b'{"a": 1}\n2', b"x\ny", "你".encode(), b"", b"[DONE]"]
    assert decoder.feed(b"data: never closed\n") == []


def test_an_event_is_complete_with_its_last_line_end_even_if_that_is_a_carriage_return() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\r\n\r") == [b"a"]
    assert decoder.feed(b"\ndata: b\n\n") == [b"b"]


def test_a_cancelled_run_reports_what_is_done() -> None:
    async def main() -> dict[str, Any]:
        async with StubServer(lambda n, _: steady(8, itl_s=0.01 if n < 3 else 50.0)) as stub:
            flags = ["--base-url", stub.url, "--num-prompts", "10", "--max-concurrency", "5"]
            task = asyncio.create_task(serve.benchmark(parse(*flags)))
            await asyncio.sleep(5.0)
            task.cancel()
            return await task

    report = flat(run_virtual(main()))
    assert (report["completed"], report["failed"], report["unfinished"]) == (3, 0, 7)
    assert report["status"] == "interrupted"
    assert report["duration"] == pytest.approx(0.17)
    assert "7 unfinished (interrupted)" in report["shown"]


@pytest.fixture
def live_stub() -> Iterator[StubServer]:
    """A stub in real time on a thread: three requests end at once, the fourth and later never do."""
    stub = StubServer(lambda n, _: steady(8, ttft_s=0.01, itl_s=0.001 if n < 3 else 3600))
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def main() -> None:
        async with stub:
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(60)
    yield stub
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    loop.close()


def command(url: str, folder: Path, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        CLI,
        "--base-url",
        url,
        "--result-dir",
        str(folder),
        "--save-detailed",
        *SMALL,
        *flags,
    ]


SMI = "0, GPU-a, 580.1, 143771, 132000, NVIDIA H200\n1, GPU-b, 580.1, 143771, 4, NVIDIA H200\n"


@pytest.mark.parametrize(
    ("flags", "name", "count", "num_gpus"),
    [
        ([], "NVIDIA H200", 1, 1),  # the other one is idle
        (["--server-device", "2 x MI300X"], "2 x MI300X", None, 0),
        (["--base-url", "http://192.0.2.1:9"], None, None, 0),  # another host: nothing of this one
    ],
)
def test_the_device_is_the_servers_and_never_guessed(flags, name, count, num_gpus, make_nvidia_smi) -> None:
    make_nvidia_smi(SMI)
    facts = serve._server_facts(parse("--port", "9", *flags))
    assert (facts["device"]["name"], facts["device"]["count"]) == (name, count)
    assert len(facts["memory"]["gpus"]) == num_gpus
    make_nvidia_smi("")
    assert serve._server_facts(parse("--port", "9"))["device"]["name"] is None


def test_figures_keep_vllms_names_and_rows_are_short_unless_asked(tmp_path: Path) -> None:
    report, _ = bench(lambda *_: steady(8), "--num-prompts", "3", "--label", "vllm-0.24", "--goodput", "ttft:500")
    keys = "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
    keys += "output_throughput total_token_throughput mean_ttft_ms median_tpot_ms std_itl_ms p99_e2el_ms "
    keys += "max_concurrent_requests backend model_id tokenizer_id num_prompts request_rate burstiness max_concurrency"
    assert set(keys.split()) <= set(report)
    assert report["label"] == "vllm-0.24"
    assert not {"generated_text", "itl_ms"} & set(report["requests"][0])
    assert len(report["distributions"]["ttft_s"]) == 101
    assert report["distributions"]["itl_s"][50] == pytest.approx(0.02)


def test_ctrl_c_keeps_what_is_done(live_stub: StubServer, tmp_path: Path) -> None:
    flags = ["--num-prompts", "6", "--max-concurrency", "1"]
    process = subprocess.Popen(
        command(live_stub.url, tmp_path, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 120
    while len(live_stub.bodies) < 4 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "3 completed, 0 failed, 3 unfinished (interrupted)" in out
    (path,) = tmp_path.iterdir()
    result = read_result(path)
    assert result["status"] == "interrupted"
    assert (result["metrics"]["completed"], len(result["requests"])) == (3, 3)


def test_a_run_prints_its_table_and_writes_one_result(live_stub: StubServer, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    done = subprocess.run(
        command(live_stub.url, folder, "--num-prompts", "3"), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    result = read_result(path)
    assert path.name == f"{result['created'][:10]}-unknown-stub-model-serve.json"
    assert result["metrics"]["completed"] == 3
    assert f"result: {path}" in done.stdout
    assert "3 completed, 0 failed" in done.stdout


def test_a_folder_that_cannot_be_written_is_refused_before_any_load(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    args = parse_args(["bench", "serve", "--result-dir", str(tmp_path / "taken")])
    with pytest.raises(ResultError, match="cannot write results into"):
        serve.run(args)
    assert [item.name for item in tmp_path.iterdir()] == ["taken"]


def test_the_http_client_is_imported_only_when_used() -> None:
    code = "import sys; import qwen_engine.bench.serve; sys.exit('aiohttp' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_clock_of_these_tests_jumps() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(asyncio.sleep(3600))
        assert runner.get_loop().time() == pytest.approx(3600)
