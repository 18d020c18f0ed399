"""Spans as a collector receives them: one for each request, with vLLM's names, and no request waits for any of it."""

from __future__ import annotations

import contextlib
import http.server
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fault_tools import wait_until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from scripted import MODEL, ScriptedServer
from server_tools import serve

from qwen_engine import cli
from qwen_engine.server import tracing
from qwen_engine.server.tracing import RequestTracer

MESSAGES = [{"role": "user", "content": "a secret question"}]
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "a=b"}


class Collector:
    """Takes OTLP over HTTP on loopback. Answers only while `open` is set."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.num_asked = 0
        self.open = threading.Event()
        self.open.set()
        self.url = ""

    @property
    def spans(self) -> list[trace_pb2.Span]:
        return [
            span
            for body in list(self.bodies)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def service_names(self) -> set[str]:
        resources = [r for body in self.bodies for r in ExportTraceServiceRequest.FromString(body).resource_spans]
        return {values(resource.resource.attributes)["service.name"] for resource in resources}

    def wait_for(self, num_spans: int) -> list[trace_pb2.Span]:
        wait_until(lambda: len(self.spans) >= num_spans)
        assert len(self.spans) == num_spans
        return self.spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.num_asked += 1
            found.open.wait(60)
            if self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf":
                found.bodies.append(body)
            with contextlib.suppress(OSError):
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield found
    found.open.set()
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture
def traced(scripted: ScriptedServer, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    tracer = RequestTracer(collector.url)
    monkeypatch.setattr(scripted.service, "tracer", tracer)
    yield scripted
    collector.open.set()
    tracer.close()


def values(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as Python's values."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(item) for item in value.array_value.values]
        return getattr(value, kind)

    return {item.key: plain(item.value) for item in attributes}


def test_a_span_says_what_was_asked_and_how_long_each_part_took(traced, collector):
    traced.write("Some words of an answer.")
    before_ns = time.time_ns()
    answer = traced.openai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        n=2,
        max_completion_tokens=5,
        temperature=0.5,
        top_p=0.75,
        extra_headers={"X-Request-Id": "mine", **PARENT},
    )
    (span,) = collector.wait_for(1)
    assert (span.name, span.kind) == ("llm_request", trace_pb2.Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE_ID, SPAN_ID, "a=b")
    assert before_ns - 1e6 < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    assert span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    attributes = values(span.attributes)
    times = {name: attributes.pop(name) for name in list(attributes) if name.startswith("gen_ai.latency.")}
    assert attributes == {
        "gen_ai.request.id": answer.id,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert answer.id == "chatcmpl-mine"
    queue, first, prefill, decode, inference, e2e = (
        times.pop(f"gen_ai.latency.{name}")
        for name in (
            *("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode"),
            *("time_in_model_inference", "e2e"),
        )
    )
    assert not times
    assert 0 <= queue <= first <= e2e <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert (queue + prefill, prefill + decode, queue + inference) == pytest.approx((first, inference, e2e))
    assert collector.service_names == {"qwen-engine"}


def test_nothing_of_a_prompt_or_an_answer_is_sent(traced, collector):
    traced.write("a secret answer")
    traced.openai.chat.completions.create(model=MODEL, messages=MESSAGES)
    traced.openai.responses.create(model=MODEL, input="a secret question", instructions="a secret order")
    collector.wait_for(2)
    assert not any(b"secret" in body for body in collector.bodies)


def test_one_span_for_a_stream_and_for_a_batch_each_of_a_trace_of_its_own(traced, collector):
    traced.write("Some words.")
    list(traced.openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
    batch = traced.openai.completions.create(model=MODEL, prompt=["a", "b", "c"], max_tokens=2, temperature=0)
    stream, whole = collector.wait_for(2)
    assert stream.trace_id != whole.trace_id
    assert not stream.parent_span_id
    assert values(stream.attributes)["gen_ai.response.finish_reasons"] == ["stop"]
    attributes = values(whole.attributes)
    assert attributes["gen_ai.usage.prompt_tokens"] == batch.usage.prompt_tokens
    assert attributes["gen_ai.usage.completion_tokens"] == 6
    assert attributes["gen_ai.request.temperature"] == 0


def test_a_request_that_fails_is_an_error_with_its_code(traced, collector, monkeypatch):
    traced.write("Some words.")
    with pytest.raises(openai.BadRequestError):
        traced.openai.completions.create(model=MODEL, prompt="x", max_tokens=10**6)
    monkeypatch.setattr(traced.client, "fails_after", 2)
    chunks = traced.openai.completions.create(model=MODEL, prompt="x", max_tokens=9, stream=True)
    with pytest.raises(openai.APIError):
        list(chunks)
    refused, failed = collector.wait_for(2)
    for span, code in ((refused, "context_length_exceeded"), (failed, "engine_failed")):
        assert (span.status.code, span.status.message) == (trace_pb2.Status.STATUS_CODE_ERROR, code)
        assert values(span.attributes)["error.type"] == code
    assert "gen_ai.usage.prompt_tokens" not in values(refused.attributes)
    assert values(failed.attributes)["gen_ai.usage.completion_tokens"] == 2


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "nonsense"},
        {"traceparent": f"00-{TRACE_ID}-{'0' * 16}-01"},
        {"traceparent": "0" * 5000},
        {**PARENT, "tracestate": "=,=" * 5000},
        {**PARENT, "tracestate": "no state"},
    ],
)
def test_headers_that_make_no_sense_cost_neither_the_request_nor_the_log_anything(traced, collector, caplog, headers):
    traced.write("x")
    traced.openai.completions.create(model=MODEL, prompt="x", extra_headers=headers)
    (span,) = collector.wait_for(1)
    assert span.parent_span_id.hex() == (SPAN_ID if headers["traceparent"] == PARENT["traceparent"] else "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_parent_that_is_not_sampled_has_no_spans(traced, collector):
    traced.write("x")
    off = {"traceparent": PARENT["traceparent"][:-2] + "00"}
    traced.openai.completions.create(model=MODEL, prompt="x", extra_headers=off)
    traced.openai.completions.create(model=MODEL, prompt="x", extra_headers=PARENT)
    collector.wait_for(1)


def test_a_collector_that_does_not_answer_holds_up_no_request_and_the_end_only_briefly(
    scripted, collector, monkeypatch, caplog
):
    monkeypatch.setattr(tracing, "CLOSE_LIMIT_S", 0.3)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # longer than a test may take: what waits for it fails
    for name, value in (("SCHEDULE_DELAY", "10"), ("MAX_QUEUE_SIZE", "4"), ("MAX_EXPORT_BATCH_SIZE", "2")):
        monkeypatch.setenv("OTEL_BSP_" + name, value)
    tracer = RequestTracer(collector.url)
    monkeypatch.setattr(scripted.service, "tracer", tracer)
    collector.open.clear()
    scripted.write("x")
    scripted.openai.completions.create(model=MODEL, prompt="x")
    wait_until(lambda: collector.num_asked)
    answers = [scripted.openai.completions.create(model=MODEL, prompt="x") for _ in range(20)]
    assert {answer.choices[0].text for answer in answers} == {"x"}
    assert collector.num_asked == 1
    tracer.close()
    assert "did not take the last spans" in caplog.text
    collector.open.set()
    wait_until(lambda: len(collector.spans) >= 5)
    assert len(collector.spans) == 1 + 4, "what was under way, and what the queue had room for"
    sent = {values(span.attributes)["gen_ai.request.id"] for span in collector.spans}
    assert {answer.id for answer in answers[-3:]} <= sent, "the oldest ones are dropped"


def test_a_span_that_cannot_be_made_is_logged_and_the_request_answered(traced, monkeypatch, caplog):
    monkeypatch.setattr(traced.service.tracer, "_tracer", None)
    traced.write("x")
    assert traced.openai.completions.create(model=MODEL, prompt="x").choices[0].text == "x"
    wait_until(lambda: "a span could not be recorded" in caplog.text)


def test_serve_sends_what_waits_before_it_ends(chat_model, collector):
    environment = {"OTEL_SERVICE_NAME": "ours", "OTEL_BSP_SCHEDULE_DELAY": "600000"}
    with serve(chat_model, "--otlp-traces-endpoint", collector.url, environment=environment) as server:
        body = {"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True}
        server.stream("/v1/chat/completions", body)
        answer = server.ask("/v1/chat/completions", body, headers=PARENT).json
        assert not collector.bodies
        server.process.terminate()
        assert server.process.wait(120) == 0
        server.read_all()
        assert not [line for line in server.log if "WARNING" in line or "ERROR" in line]
    stream, whole = collector.wait_for(2)
    assert collector.service_names == {"ours"}
    assert whole.parent_span_id.hex() == SPAN_ID
    attributes = values(whole.attributes)
    assert attributes["gen_ai.request.id"] == answer["id"]
    assert (
        attributes["gen_ai.usage.completion_tokens"] == values(stream.attributes)["gen_ai.usage.completion_tokens"] == 3
    )
    assert attributes["gen_ai.latency.time_in_model_decode"] > 0


@pytest.mark.parametrize(
    "url", ["", "grpc://127.0.0.1:4317", "127.0.0.1:4318", "http://", "http://a:b/v1/traces", "http://[/"]
)
def test_a_url_that_is_none_ends_the_start_in_one_line(url, capsys):
    assert cli.main(["serve", f"--otlp-traces-endpoint={url}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--otlp-traces-endpoint is {url!r}" in line
    assert "http://127.0.0.1:4318/v1/traces" in line


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_without_the_packages_the_flag_ends_the_start_in_one_line(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["serve", "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --otlp-traces-endpoint needs OpenTelemetry")
    assert line.endswith("pip install 'qwen-engine[otel]'")


def test_without_the_flag_the_packages_are_not_imported():
    code = "import sys, qwen_engine.server.serve; print([n for n in sys.modules if n.startswith('opentelemetry.sdk')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
