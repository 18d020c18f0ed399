"""What `bench serve` says about a run: the figures, the rows of single requests, checks, notes and the table.

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

from qwen_engine.bench.results import DISTRIBUTION_POINTS, Check
from qwen_engine.bench.serve_client import ServeResult

METRICS = ("ttft", "tpot", "itl", "e2el")
MAX_CACHED_SHARE = 0.01  # of random prompts, beyond the prefix they are meant to share
MAX_CLIENT_LAG_MS = 10.0
LENGTH_TOLERANCE = 0.1  # of the mean length of random prompts; what is off by more is noted
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


def distributions(results: Sequence[ServeResult]) -> dict[str, list[float]]:
    """Quantiles 0, 0.01, … 1 of time to first token and of the gaps between outputs, in seconds."""
    good = [result for result in results if result.error is None]
    spans = {name: [value / 1e3 for r in good for value in _values_ms(r, name)] for name in ("ttft", "itl")}
    points = np.linspace(0, 1, DISTRIBUTION_POINTS)
    return {f"{name}_s": np.quantile(values, points).tolist() for name, values in spans.items() if values}


def request_rows(results: Sequence[ServeResult], *, detailed: bool) -> list[dict[str, Any]]:
    """One row per request in the order of sending; times in ms from the first send."""
    rows = []
    ordered = sorted(results, key=lambda result: result.start_s)
    for result in ordered:
        latencies = {f"{name}_ms": next(iter(_values_ms(result, name)), None) for name in ("ttft", "tpot", "e2el")}
        row = {
            "start_ms": (result.start_s - ordered[0].start_s) * 1e3,
            **latencies,
            "input_tokens": result.num_prompt_tokens,
            "cached_tokens": result.num_cached_tokens,
            "requested_output_tokens": result.max_tokens,
            "output_tokens": result.num_output_tokens,
            "finish_reason": result.finish_reason,
            "error": result.error,
        }
        if detailed:
            row["itl_ms"] = _values_ms(result, "itl")
            # Half a surrogate pair is no Unicode, and strict readers refuse it.
            row["generated_text"] = result.text.encode(errors="replace").decode()
        rows.append(row)
    return rows


def checks(args: argparse.Namespace, metrics: Mapping[str, Any], results: Sequence[ServeResult]) -> list[Check]:
    """That every request succeeded, with as many tokens as `--ignore-eos` promises, and without help from a cache."""
    num_good = metrics["completed"]
    errors = collections.Counter(result.error for result in results if result.error).most_common(1)
    detail = f"{num_good} of {len(results)} requests succeeded"
    detail += f"; {errors[0][1]} x {errors[0][0][:MAX_SHOWN_ERROR_CHARS]}" if errors else ""
    found = [Check("requests complete", not errors, detail)]
    if args.ignore_eos:
        mismatches = metrics["num_length_mismatches"]
        detail = f"{mismatches} of {num_good} outputs have another length than asked for, for all --ignore-eos"
        found.append(Check("lengths as asked", not mismatches, detail))
    share = metrics["cached_token_share"]
    if args.dataset_name == "random" and share is not None:
        expected = args.random_prefix_len / (args.random_prefix_len + args.random_input_len)
        again = "the seed was used before: leave out --seed" if args.seed is not None else "reset its prefix cache"
        is_fresh = share <= expected + MAX_CACHED_SHARE
        detail = f"{share:.1%} of the prompt tokens came from the server's cache"
        found.append(Check("prompts fresh", is_fresh, detail if is_fresh else f"{detail}; {again} for cold figures"))
    return found


def find_notes(
    args: argparse.Namespace,
    parameters: Mapping[str, Any],
    metrics: Mapping[str, Any],
    results: Sequence[ServeResult],
    *,
    reused_warmups: bool,
) -> list[str]:
    """What a reader must know before quoting the figures, beside the checks."""
    found = []
    num_good = metrics["completed"]
    if parameters["num_prompts"] < args.num_prompts:
        found.append(f"{args.dataset_path} has {parameters['num_prompts']} prompts; {args.num_prompts} were asked for")
    if metrics["warmups_failed"]:
        found.append(f"{metrics['warmups_failed']} of {parameters['num_warmups']} warm-ups failed")
    if reused_warmups:
        found.append("warm-ups used measured prompts, the file has no others: the prefix cache may hold them")
    if (mismatches := metrics["num_length_mismatches"]) and not args.ignore_eos:
        found.append(
            f"{mismatches} of {num_good} outputs have another length than asked for; pass --ignore-eos for equal work"
        )
    if uncounted := sum(r.error is None and not r.usage_counted for r in results):
        found.append(f"{uncounted} of {num_good} responses had no usage; their output tokens are numbers of chunks")
    if num_good and metrics["total_input_tokens"] is None:
        found.append("input tokens are unknown: the server sends no usage and there is no --tokenizer")
    elif num_good and args.dataset_name == "random" and args.tokenizer is None:
        mean, asked = metrics["total_input_tokens"] / num_good, args.random_prefix_len + args.random_input_len
        if abs(mean - asked) > LENGTH_TOLERANCE * asked:
            found.append(f"prompts have {mean:.0f} tokens on average, not {asked}; --tokenizer makes lengths exact")
    if (lag_ms := metrics["client_lag_p99_ms"]) is not None and lag_ms > MAX_CLIENT_LAG_MS:
        found.append(f"this client was up to {lag_ms:.0f} ms late (p99), and latencies include that")
    return found


def render(result: Mapping[str, Any]) -> str:
    """The table a user sees."""
    p, m = result["parameters"], result["metrics"]

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    load = f"rate {p['request_rate']}" + (f", at most {p['max_concurrency']} at once" if p["max_concurrency"] else "")
    origin = "new prompts for this run" if p["new_prompts"] else "the prompts of every run with this seed"
    if p["dataset_name"] in ("custom", "sharegpt"):
        origin = "the prompts of the file"
    share = m["cached_token_share"]
    cached = "cached share not reported" if share is None else f"{share:.1%} cached"
    unfinished = f", {m['unfinished']} unfinished (interrupted)" if result["status"] == "interrupted" else ""
    lines = [
        f"{p['model_id']} at {p['url']}",
        f"{p['num_prompts']} {p['dataset_name']} prompts, {load}, {p['num_warmups']} warm-ups",
        f"seed {p['prompt_seed']}: {origin}",
        "",
        f"requests    {m['completed']} completed, {m['failed']} failed{unfinished} in {m['duration']:.2f} s, "
        f"at most {m['max_concurrent_requests']} in flight",
        f"tokens      {number(m['total_input_tokens'], 0)} in ({cached}), {number(m['total_output_tokens'], 0)} out "
        f"of {number(m['total_requested_output_tokens'], 0)} asked for",
        f"throughput  {number(m['request_throughput'])} req/s, {number(m['output_throughput'], 1)} output tok/s, "
        f"{number(m['total_token_throughput'], 1)} total tok/s",
    ]
    if slos := p["goodput_slos_ms"]:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in slos.items())
        lines.append(f"goodput     {number(m['request_goodput'])} req/s ({limits})")
    shown_metrics = [metric for metric in METRICS if f"mean_{metric}_ms" in m]
    if shown_metrics:
        suffix = f"_{shown_metrics[0]}_ms"
        columns = [key.removesuffix(suffix) for key in m if key.endswith(suffix)]
        lines += ["", "ms    " + "".join(f"{name:>11}" for name in columns)]
        for metric in shown_metrics:
            lines.append(f"{metric:<6}" + "".join(f"{number(m[f'{name}_{metric}_ms']):>11}" for name in columns))
    errors = collections.Counter(row["error"] for row in result["requests"] if row["error"])
    # A server's words may hold anything; repr makes one printable line of them.
    remarks = [f"failed: {n} x {text[:MAX_SHOWN_ERROR_CHARS]!r}" for text, n in errors.most_common(MAX_SHOWN_ERRORS)]
    remarks += [
        f"check failed: {check['name']}: {check['detail']!r}" for check in result["checks"] if not check["passed"]
    ]
    remarks += [f"note: {text}" for text in result["notes"]]
    return "\n".join([*lines, *([""] if remarks else []), *remarks]) + "\n"
