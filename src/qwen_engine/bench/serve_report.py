"""What `bench serve` says about a run: the figures, the rows of single requests, warnings and the table.

Latency figures count successful requests only; throughput divides by the time from the first send to the end of the
last response. A figure without data is None. Keys are those of `vllm bench serve`.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qwen_engine.bench.serve_client import ServeResult

METRICS = ("ttft", "tpot", "itl", "e2el")
MAX_CACHED_SHARE = 0.01  # of random prompts, beyond the prefix they are meant to share
MAX_CLIENT_LAG_MS = 10.0
MAX_SHOWN_ERRORS = 5
MAX_SHOWN_ERROR_CHARS = 200


def summarize(
    results: Sequence[ServeResult],
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 95, 99),
    slos: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Every figure of a run, in ms, seconds, tokens and per second; None where there is nothing to count."""
    good = [result for result in results if result.error is None]
    duration_s = max(r.end_s for r in results) - min(r.start_s for r in results) if results else 0.0
    known_inputs = [r.num_prompt_tokens for r in good if r.num_prompt_tokens is not None]
    known_cached = [r.num_cached_tokens for r in good if r.num_cached_tokens is not None]
    num_input = sum(known_inputs) if len(known_inputs) == len(good) else None
    num_cached = sum(known_cached) if known_cached else None
    num_output = sum(r.num_output_tokens for r in good)

    def per_second(count: int | None) -> float | None:
        return count / duration_s if count is not None and duration_s > 0 else None

    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_requested_output_tokens": sum(r.max_tokens for r in good),
        "num_length_mismatches": sum(r.num_output_tokens != r.max_tokens for r in good),
        "cached_tokens": num_cached,
        "cached_token_share": num_cached / num_input if num_cached is not None and num_input else None,
        "request_throughput": per_second(len(good)),
        "output_throughput": per_second(num_output),
        "total_token_throughput": per_second(None if num_input is None else num_input + num_output),
        "request_goodput": per_second(sum(_meets(r, slos) for r in good)) if slos else None,
        "max_concurrent_requests": _peak_concurrency(results),
        "error_counts": dict(collections.Counter(r.error for r in results if r.error).most_common()),
    }
    for metric in metrics:
        values = [value for result in good for value in _values_ms(result, metric)]
        figures |= _distribution(metric, values, percentiles)
    return figures


def _values_ms(result: ServeResult, metric: str) -> list[float]:
    value = getattr(result, f"{metric}_s")
    values = value if isinstance(value, list) else [value]
    return [item * 1e3 for item in values if item is not None]


def _distribution(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    statistics = {"mean": np.mean, "median": np.median, "std": np.std}
    statistics |= {f"p{p:g}": functools.partial(np.percentile, q=p) for p in percentiles}
    return {f"{name}_{metric}_ms": float(f(values)) if values else None for name, f in statistics.items()}


def _meets(result: ServeResult, slos: Mapping[str, float]) -> bool:
    """Whether a successful request kept every SLO; one without the figure (TPOT of one token) keeps it."""
    return all(value <= limit for metric, limit in slos.items() for value in _values_ms(result, metric))


def _peak_concurrency(results: Sequence[ServeResult]) -> int:
    # At equal times an end (-1) sorts before a start (+1).
    changes = sorted([(r.start_s, 1) for r in results] + [(r.end_s, -1) for r in results])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def request_rows(results: Sequence[ServeResult]) -> list[dict[str, Any]]:
    """One row per request in the order of sending; times in ms from the first send."""
    rows = []
    ordered = sorted(results, key=lambda result: result.start_s)
    for result in ordered:
        latencies = {f"{name}_ms": next(iter(_values_ms(result, name)), None) for name in ("ttft", "tpot", "e2el")}
        row = {
            "start_ms": (result.start_s - ordered[0].start_s) * 1e3,
            **latencies,
            "itl_ms": _values_ms(result, "itl"),
            "input_tokens": result.num_prompt_tokens,
            "cached_tokens": result.num_cached_tokens,
            "requested_output_tokens": result.max_tokens,
            "output_tokens": result.num_output_tokens,
            "finish_reason": result.finish_reason,
            "error": result.error,
            # Half a surrogate pair is no Unicode, and strict readers refuse it.
            "generated_text": result.text.encode(errors="replace").decode(),
        }
        rows.append(row)
    return rows


def find_warnings(
    args: argparse.Namespace, report: Mapping[str, Any], results: Sequence[ServeResult], *, reused_warmups: bool
) -> list[str]:
    """What a reader must know before quoting the figures."""
    found = []
    num_good, share = report["completed"], report["cached_token_share"]
    if report["num_prompts"] < args.num_prompts:
        found.append(f"{args.dataset_path} has {report['num_prompts']} prompts; {args.num_prompts} were asked for")
    if report["warmups_failed"]:
        found.append(f"{report['warmups_failed']} of {report['num_warmups']} warm-ups failed")
    if reused_warmups:
        found.append("warm-ups used measured prompts, the file has no others: the prefix cache may hold them")
    if args.dataset_name == "random" and share is not None:
        expected = args.random_prefix_len / (args.random_prefix_len + args.random_input_len)
        if share > expected + MAX_CACHED_SHARE:
            again = "the seed was used before: leave out --seed" if args.seed is not None else "reset its prefix cache"
            found.append(f"{share:.1%} of the prompt tokens came from the server's cache; {again} for cold figures")
    if mismatches := report["num_length_mismatches"]:
        advice = "although --ignore-eos was sent" if args.ignore_eos else "pass --ignore-eos for equal work"
        found.append(f"{mismatches} of {num_good} outputs have another length than asked for; {advice}")
    if uncounted := sum(r.error is None and not r.usage_counted for r in results):
        found.append(f"{uncounted} of {num_good} responses had no usage; their output tokens are numbers of chunks")
    if num_good and report["total_input_tokens"] is None:
        found.append("input tokens are unknown: the server sends no usage and there is no --tokenizer")
    if (lag_ms := report["client_lag_p99_ms"]) is not None and lag_ms > MAX_CLIENT_LAG_MS:
        found.append(f"this client was up to {lag_ms:.0f} ms late (p99), and latencies include that")
    return found


def render(report: Mapping[str, Any]) -> str:
    """The table a user sees."""
    r = report

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    load = f"rate {r['request_rate']}" + (f", at most {r['max_concurrency']} at once" if r["max_concurrency"] else "")
    origin = "new prompts for this run" if r["new_prompts"] else "the prompts of every run with this seed"
    if r["dataset_name"] in ("custom", "sharegpt"):
        origin = "the prompts of the file"
    share = r["cached_token_share"]
    cached = "cached share not reported" if share is None else f"{share:.1%} cached"
    unfinished = f", {r['unfinished']} unfinished (interrupted)" if r["interrupted"] else ""
    lines = [
        f"{r['model_id']} at {r['url']}",
        f"{r['num_prompts']} {r['dataset_name']} prompts, {load}, {r['num_warmups']} warm-ups",
        f"seed {r['seed']}: {origin}",
        "",
        f"requests    {r['completed']} completed, {r['failed']} failed{unfinished} in {r['duration']:.2f} s, "
        f"at most {r['max_concurrent_requests']} in flight",
        f"tokens      {number(r['total_input_tokens'], 0)} in ({cached}), {number(r['total_output_tokens'], 0)} out "
        f"of {number(r['total_requested_output_tokens'], 0)} asked for",
        f"throughput  {number(r['request_throughput'])} req/s, {number(r['output_throughput'], 1)} output tok/s, "
        f"{number(r['total_token_throughput'], 1)} total tok/s",
    ]
    if slos := r["goodput_slos_ms"]:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in slos.items())
        lines.append(f"goodput     {number(r['request_goodput'])} req/s ({limits})")
    shown_metrics = [metric for metric in METRICS if f"mean_{metric}_ms" in r]
    if shown_metrics:
        suffix = f"_{shown_metrics[0]}_ms"
        columns = [key.removesuffix(suffix) for key in r if key.endswith(suffix)]
        lines += ["", "ms    " + "".join(f"{name:>11}" for name in columns)]
        for metric in shown_metrics:
            lines.append(f"{metric:<6}" + "".join(f"{number(r[f'{name}_{metric}_ms']):>11}" for name in columns))
    errors = list(r["error_counts"].items())[:MAX_SHOWN_ERRORS]
    # A server's words may hold anything; repr makes one printable line of them.
    notes = [f"failed: {count} x {text[:MAX_SHOWN_ERROR_CHARS]!r}" for text, count in errors]
    notes += [f"warning: {text}" for text in r["warnings"]]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"
