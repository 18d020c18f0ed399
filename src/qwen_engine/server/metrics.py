"""Prometheus metrics under vLLM's names, so that existing dashboards and routers work with `--metrics-prefix vllm`.

Every metric has the labels model_name and engine (always "0"). Gauges are read from the engine's last report when
someone scrapes; the rest is counted where it happens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from qwen_engine.frontend.output_processor import RequestState
from qwen_engine.server.wire import EngineFacts, EngineStats

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_COUNT_BUCKETS = tuple(factor * 10**power for power in range(7) for factor in (1, 2, 5))
_STEP_BUCKETS = (1, *(2**power for power in range(3, 16)))
_PREEMPTION_BUCKETS = (0, 1, 2, 5, 10, 20, 50)
_LABELS = ("model_name", "engine")


class _TokenHistogram(Collector):
    """A histogram for what every token adds to: prometheus_client's takes many times as long, with a lock for each sum.

    For one thread; `collect` is for a registry.
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float], labels: Mapping[str, str]) -> None:
        self._name = name
        self._text = text
        self._bounds = [*buckets, math.inf]
        self._labels = labels
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts))
        family.add_metric(tuple(self._labels.values()), list(buckets), self._sum)
        yield family


class Metrics:
    """All metrics of one server. `prefix` stands before the colon of every name."""

    def __init__(self, *, prefix: str, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self._num_known_preemptions = 0
        self._running = self._gauge("num_requests_running", "Sequences in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences waiting for a slot or for KV blocks.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks held by live requests, 0 to 1.")
        self._healthy = self._gauge("engine_healthy", "1 while the engine is ready and its loop moves.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of sequences that got a first token.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Sequences sent back to the queue for lack of KV blocks.")
        self._success = Counter(
            f"{prefix}:request_success",
            "Samples that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        histogram = self._histogram
        self._first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS)
        gap_name = f"{prefix}:inter_token_latency_seconds"
        self._gap = _TokenHistogram(gap_name, "Between two tokens of a sample.", _TOKEN_BUCKETS, self._labels)
        self._registry.register(self._gap)
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Decode time of a request over its tokens but the first.",
            _TOKEN_BUCKETS,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to last token.", _REQUEST_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first slot.", _REQUEST_BUCKETS)
        self._inference = histogram("request_inference_time_seconds", "From slot to last token.", _REQUEST_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "From slot to first token.", _REQUEST_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "From first to last token.", _REQUEST_BUCKETS)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _COUNT_BUCKETS)
        self._request_output = histogram("request_generation_tokens", "Tokens a request got.", _COUNT_BUCKETS)
        self._request_longest = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest sample.", _COUNT_BUCKETS
        )
        self._request_prefilled = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not in the prefix cache.",
            _COUNT_BUCKETS,
        )
        self._request_preemptions = histogram(
            "request_num_preemptions",
            "Preemptions of a request's samples up to their last tokens.",
            _PREEMPTION_BUCKETS,
        )
        self._request_n = histogram("request_params_n", "Samples asked for.", _COUNT_BUCKETS)
        self._request_max_tokens = histogram("request_params_max_tokens", "max_tokens asked for.", _COUNT_BUCKETS)
        self._step = histogram("iteration_tokens_total", "Tokens that a step of the engine computed.", _STEP_BUCKETS)

    def set_facts(self, facts: EngineFacts) -> None:
        """The engine's cache, as labels of a metric that is always 1."""
        names = ("block_size", "num_gpu_blocks", "cache_dtype")
        gauge = Gauge(f"{self._prefix}:cache_config_info", "The KV cache.", (*_LABELS, *names), registry=self._registry)
        values = dict(zip(names, (facts.block_size, facts.num_kv_blocks, facts.dtype)))
        gauge.labels(**self._labels, **values).set(1)

    def observe_gap(self, gap_s: float) -> None:
        """Between two tokens of one sample."""
        self._gap.observe(gap_s)

    def observe_step(self, num_tokens: int) -> None:
        """A step of the engine: prompt tokens and one for each sample that was decoded, none from the cache."""
        self._step.observe(num_tokens)

    def observe_request(self, state: RequestState) -> None:
        """A request that has ended, in whatever way."""
        metrics, num_prompt, num_output = state.metrics, len(state.prompt_token_ids), state.num_output_tokens
        for reason in state.finish_reasons:
            self._success.labels(**self._labels, finished_reason=reason).inc()
        if metrics.first_token_s is None or metrics.scheduled_s is None or metrics.finished_s is None:
            return  # it never ran
        params = state.spec.params
        self._prompt_tokens.inc(num_prompt)
        self._generation_tokens.inc(num_output)
        self._prefix_queries.inc(num_prompt)
        self._prefix_hits.inc(state.num_cached_tokens)
        self._first_token.observe(metrics.first_token_s)
        self._e2e.observe(metrics.finished_s)
        self._queue.observe(max(0.0, metrics.scheduled_s))
        self._inference.observe(metrics.finished_s - metrics.scheduled_s)
        self._prefill.observe(metrics.first_token_s - metrics.scheduled_s)
        decode_s = metrics.finished_s - metrics.first_token_s
        self._decode.observe(decode_s)
        if num_output > params.n:
            self._per_token.observe(decode_s * params.n / (num_output - params.n))
        self._request_prompt.observe(num_prompt)
        self._request_output.observe(num_output)
        self._request_longest.observe(max(state.output_lengths))
        self._request_prefilled.observe(num_prompt - state.num_cached_tokens)
        self._request_preemptions.observe(metrics.num_preemptions)
        self._request_n.observe(params.n)
        if params.max_tokens is not None:
            self._request_max_tokens.observe(params.max_tokens)

    def exposition(self, stats: EngineStats, *, healthy: bool) -> bytes:
        """The text a scrape gets (format 0.0.4)."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_usage)
        self._healthy.set(healthy)
        # A new engine counts from zero again.
        self._preemptions.inc(max(0, stats.num_preemptions - self._num_known_preemptions))
        self._num_known_preemptions = stats.num_preemptions
        return prometheus_client.generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._labelled(Gauge(f"{self._prefix}:{name}", text, _LABELS, registry=self._registry).labels)

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled(Counter(f"{self._prefix}:{name}", text, _LABELS, registry=self._registry).labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"{self._prefix}:{name}", text, _LABELS, registry=self._registry, buckets=buckets)
        return self._labelled(metric.labels)

    def _labelled(self, labels: Callable[..., object]) -> object:
        return labels(**self._labels)
