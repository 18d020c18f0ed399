"""OpenTelemetry traces: a span for each generating request, with vLLM's names, sent as OTLP over HTTP by a thread.

A span is made when its request is over, from the same times as the metrics; nothing of a prompt or an answer is in it.
Spans wait for the collector in a bounded queue that drops the oldest; no request waits for it or fails because of it.
The packages are optional (`qwen-engine[otel]`) and imported by `RequestTracer` alone. What is not an option here is
OpenTelemetry's environment: OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, OTEL_BSP_*.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers

from qwen_engine import __version__
from qwen_engine.errors import ConfigError, shown
from qwen_engine.frontend.output_processor import RequestState

logger = logging.getLogger(__name__)

SPAN_NAME = "llm_request"
SERVICE_NAME = "qwen-engine"
CLOSE_LIMIT_S = 2.0
"""For the last spans to leave when the server ends."""
_TRACE_HEADERS = ("traceparent", "tracestate")


class RequestTracer:
    """Turns requests that are over into spans and sends them to `endpoint`, a URL with its path.

    Raises ConfigError for a URL that is none, and where the packages are missing.
    """

    def __init__(self, endpoint: str) -> None:
        _check_endpoint(endpoint)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error}); pip install 'qwen-engine[otel]'"
            ) from None
        # It warns of headers that make no sense, which is nothing a client should be able to fill a log with.
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer(SERVICE_NAME, __version__)

    def record(
        self, attributes: Mapping[str, Any], *, headers: Headers, duration_s: float, error: str | None = None
    ) -> None:
        """A request that has just ended, after `duration_s`. headers: may name a parent. error: a code, if it failed.

        Never raises and never waits.
        """
        try:
            end_ns = time.time_ns()
            span = self._tracer.start_span(
                SPAN_NAME,
                context=self._propagator.extract({name: headers.getlist(name) for name in _TRACE_HEADERS}),
                kind=self._trace.SpanKind.SERVER,
                attributes=attributes,
                start_time=end_ns - round(duration_s * 1e9),
            )
            if error is not None:
                span.set_attribute("error.type", error)
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))
            span.end(end_ns)
        except Exception:
            logger.exception("a span could not be recorded")

    def close(self) -> None:
        """Sends what waits, for CLOSE_LIMIT_S at most."""
        # The exporter's own end may take half a minute if the collector does not answer.
        thread = threading.Thread(target=self._provider.shutdown, name="close-traces", daemon=True)
        thread.start()
        thread.join(CLOSE_LIMIT_S)
        if thread.is_alive():
            logger.warning("the collector of traces did not take the last spans within %g s", CLOSE_LIMIT_S)


def span_attributes(request_id: str, model: str, states: Sequence[RequestState]) -> dict[str, Any]:
    """What a span says of a request. Times are seconds, counts sums over its prompts; what is not known is left out.

    states: of its prompts, none if it never reached the engine.
    """
    attributes: dict[str, Any] = {"gen_ai.request.id": request_id, "gen_ai.response.model": model}
    if not states:
        return attributes
    params = states[0].spec.params
    metrics = [state.metrics for state in states]
    scheduled_s = min((m.scheduled_s for m in metrics if m.scheduled_s is not None), default=None)
    first_token_s = min((m.first_token_s for m in metrics if m.first_token_s is not None), default=None)
    finished_s = max((m.finished_s for m in metrics if m.finished_s is not None), default=None)
    attributes |= {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.prompt_tokens": sum(len(state.prompt_token_ids) for state in states),
        "gen_ai.usage.completion_tokens": sum(state.num_output_tokens for state in states),
        "gen_ai.response.finish_reasons": [
            reason for state in states for reason in state.finish_reasons if reason is not None
        ],
        "gen_ai.latency.time_in_queue": None if scheduled_s is None else max(0.0, scheduled_s),
        "gen_ai.latency.time_to_first_token": first_token_s,
        "gen_ai.latency.time_in_model_prefill": _between(scheduled_s, first_token_s),
        "gen_ai.latency.time_in_model_decode": _between(first_token_s, finished_s),
        "gen_ai.latency.time_in_model_inference": _between(scheduled_s, finished_s),
        "gen_ai.latency.e2e": finished_s,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _check_endpoint(endpoint: str) -> None:
    try:
        url = urllib.parse.urlsplit(endpoint)
        is_usable = url.scheme in ("http", "https") and url.hostname is not None and url.port != 0
    except ValueError:  # no port, no IPv6 address
        is_usable = False
    if not is_usable:
        raise ConfigError(
            f"--otlp-traces-endpoint is {shown(endpoint)}; it must be the URL of a collector of OTLP over HTTP, like "
            "http://127.0.0.1:4318/v1/traces"
        )
