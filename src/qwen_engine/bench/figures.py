"""Which figures of a result a reader is shown, under which name and unit, and what each counts.

The table on a terminal and the report's read the same lists; all other figures are in the file only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_engine.bench.output import exit_code, number
from qwen_engine.bench.results import device_label, write_result


@dataclass(frozen=True, slots=True)
class Figure:
    """One or two metrics of a load under a name. In `metrics` the load's prefix goes in front, or where {} is."""

    label: str
    metrics: tuple[str, ...]
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """A measured load. prefix: of its metrics. is_cached: its prompts came from the prefix cache on purpose."""

    label: str
    prefix: str = ""
    is_cached: bool = False


_TTFT = Figure("TTFT median / p99, ms", ("median_ttft_ms", "p99_ttft_ms"), "of a request, from when the batch starts")
_ITL = Figure("ITL median / p99, ms", ("median_itl_ms", "p99_itl_ms"), "between two tokens of a request")
_OUTPUT = Figure("output, tok/s", ("output_tok_s",), "all output tokens over the whole time, prefill included")
LOAD_FIGURES = (
    Figure(
        "first token, s",
        ("first_token_s",),
        "until every request has its first token; the best of the batches that stop there",
    ),
    Figure(
        "prefill, tok/s",
        ("prefill_tok_s",),
        "prompt tokens of all requests over that time, unless they were in the prefix cache",
    ),
    Figure(
        "decode step, ms",
        ("decode_step_ms",),
        "a further token for every request: (whole batch - first token) / (output tokens - 1)",
    ),
    Figure(
        "decode, tok/s", ("decode_tok_s",), "all output tokens but the first ones, over the time of the decode steps"
    ),
    _TTFT,
    _ITL,
    _OUTPUT,
)
_OTHER_FIGURES = {
    "throughput": (
        Figure("requests/s", ("requests_per_s",)),
        _OUTPUT,
        Figure("prompt + output, tok/s", ("total_tok_s",), "all tokens over the whole time, cached ones too"),
        _TTFT,
        _ITL,
    ),
    "startup": (
        Figure("imports, s", ("import_s",), "of a fresh process"),
        Figure("load, s", ("load_s",), "from then until the model is ready: weights, KV cache, compilation, graphs"),
        Figure("ready, s", ("ready_s",), "both"),
        Figure("first token out, s", ("first_output_s",), "from the start of the process"),
    ),
    "serve": (
        Figure("requests/s", ("request_throughput",)),
        Figure("output, tok/s", ("output_throughput",), "of all requests together"),
        Figure("TTFT median / p99, ms", ("median_ttft_ms", "p99_ttft_ms"), "of a request, from when it is sent"),
        Figure("TPOT median / p99, ms", ("median_tpot_ms", "p99_tpot_ms"), "a request's mean time for a further token"),
        Figure("ITL median / p99, ms", ("median_itl_ms", "p99_itl_ms"), "between two pieces of a stream"),
    ),
    "server-cost": (
        Figure("TTFT: engine / added, ms", ("engine_median_ttft_ms", "ttft_ms_added")),
        Figure("TPOT: engine / added, ms", ("engine_median_tpot_ms", "tpot_ms_added")),
        Figure("ITL: engine / added, ms", ("engine_median_itl_ms", "itl_ms_added")),
        Figure("CPU of the API process, us a token", ("server_api_cpu_us_per_token",)),
    ),
    "interruption": (
        Figure("step before, ms", ("median_step_ms",), "median while nobody arrives"),
        Figure("ITL median / p99, ms", ("median_itl_ms", "p99_itl_ms"), "of the writers, until the new prompt is in"),
        Figure("first token, s", ("first_token_s",), "of the new prompt"),
    ),
    "sampling-cost": tuple(
        Figure(f"{kind}, ms", (f"{kind}_step_ms",), meaning)
        for kind, meaning in (
            ("greedy", "a step in which every request takes the likeliest token; the others have all requests"),
            ("seeded", "sample with a seed"),
            ("filters", "with top-k and top-p"),
            ("penalties", "with three penalties"),
            ("bias", "with a logit bias"),
            ("logprobs", "ask for log-probabilities"),
            ("everything", "all of it"),
        )
    ),
    "deterministic": (
        Figure(
            "prefill, tok/s: default / deterministic",
            ("default_{}prefill_tok_s", "deterministic_{}prefill_tok_s"),
            "of the whole batch",
        ),
        Figure(
            "decode step, ms: default / deterministic", ("default_{}decode_step_ms", "deterministic_{}decode_step_ms")
        ),
    ),
    "long-context": (
        Figure("first token / floor, s", ("first_token_s", "floor_first_token_s"), "of all layers"),
        Figure("decode step / floor, ms", ("decode_step_ms", "floor_decode_step_ms"), "of all layers"),
        Figure(
            "error / with shifted positions",
            ("error_mean", "shifted_error_mean"),
            "mean error of log-probabilities of a few layers; the second, a control, has to be much larger",
        ),
    ),
    "validate": (
        Figure("first token, s", ("first_token_s",), "of the whole batch"),
        Figure("Transformers, s", ("transformers_{}first_token_s",)),
        Figure("decode, tok/s", ("decode_tok_s",), "of the whole batch"),
        Figure("Transformers, tok/s", ("transformers_{}decode_tok_s",)),
    ),
    "load": (
        Figure("checkpoint, bytes", ("checkpoint_bytes",)),
        Figure("ready at first / at best, s", ("first_ready_s", "ready_s")),
        Figure("read, GB/s", ("load_gb_per_s",)),
        Figure("host memory of a rank, GB: peak / anonymous", ("host_peak_gb", "host_anonymous_gb")),
    ),
}


def save_and_describe(result: Mapping[str, Any], folder: Path) -> int:
    """Writes a result and prints what came out; returns the exit code."""
    sys.stdout.write(describe(result, write_result(result, folder)) + "\n")
    return exit_code(result)


def describe(result: Mapping[str, Any], path: Path) -> str:
    """Headline, figures of each load with what they mean, remarks, checks and file of a result, for a terminal."""
    engine, loads, figures = result["engine_config"] or {}, loads_of(result), figures_of(result["name"])
    rows = [[cell(result["metrics"], figure, load) for load in loads] for figure in figures]
    label_width = max(len(figure.label) for figure in figures)
    width = max(len(text) for row in [[load.label for load in loads], *rows] for text in row)

    def line(label: str, cells: Sequence[str], meaning: str = "") -> str:
        return f"  {label:{label_width}}{''.join(f'  {text:>{width}}' for text in cells)}  {meaning}".rstrip()

    lines = [f"{result['name']}: {engine.get('model', '')} on {device_label(result)}, {result['status']}"]
    lines.append(line("", [load.label for load in loads]))
    lines += [line(figure.label, row, figure.meaning) for figure, row in zip(figures, rows)]
    lines += [f"  {text}" for text in remarks(result)]
    for check in result["checks"]:
        lines.append(f"  {'ok  ' if check['passed'] else 'FAIL'} {check['name']}: {check['detail']}")
    lines += [f"  note: {text}" for text in result["notes"]]
    return "\n".join([*lines, f"  -> {path}"])


def figures_of(name: str) -> tuple[Figure, ...]:
    """What to show of results of this name."""
    return _OTHER_FIGURES.get(name, LOAD_FIGURES)


def cell(metrics: Mapping[str, float | None], figure: Figure, load: Load) -> str:
    """The figure of a load as text, dashes for what it does not have."""
    if load.is_cached and figure.metrics == ("prefill_tok_s",):
        return number(None)
    keys = [name.replace("{}", load.prefix) if "{}" in name else load.prefix + name for name in figure.metrics]
    return " / ".join(number(metrics.get(key)) for key in keys)


def legend(figures: Sequence[Figure]) -> str:
    """What the figures mean, as a list in Markdown."""
    return "\n".join(f"- *{figure.label}*: {figure.meaning}." for figure in figures if figure.meaning)


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What the prefix cache and the scheduler did, in a sentence each, where they did anything."""
    metrics, found = result["metrics"], []
    if metrics.get("prefix_hit_rate") is not None:
        found.append(
            f"{100 * metrics['prefix_hit_rate']:.2f} % of the hot prompts' tokens came from the prefix cache; their "
            f"first tokens came {number(metrics.get('prefill_speedup'))} times sooner (after "
            f"{number(metrics.get('hot_first_token_s'))} s, cold {number(metrics.get('cold_first_token_s'))} s)."
        )
    elif metrics.get("cached_token_share"):
        found.append(f"{100 * metrics['cached_token_share']:.2f} % of the prompt tokens came from the prefix cache.")
    if metrics.get("preemptions"):
        found.append(f"{number(metrics['preemptions'])} times a request lost its KV blocks and was computed again.")
    return found


def loads_of(result: Mapping[str, Any]) -> list[Load]:
    """The measured loads of a result; equal requests as their number × (prompt + output tokens)."""
    parameters = result["parameters"]
    if "phases" in parameters:
        measured = [phase for phase in parameters["phases"] if phase["num_first_runs"]]
        return [
            Load(
                f"{phase['num_requests']} × ({parameters['prompt_tokens']} + {phase['output_tokens']})"
                + (f", {phase['name']}" if len(measured) > 1 else ""),
                f"{phase['name']}_" if len(measured) > 1 else "",
                is_cached=phase["shares_prefix"],
            )
            for phase in measured
        ]
    if "batches" in parameters:
        return [Load(f"{batch} × {parameters['prompt_len']}", f"batch{batch}_") for batch in parameters["batches"]]
    if "streams" in parameters:
        lengths = f"({parameters['input_len']} + {parameters['output_len']})"
        return [Load(f"{count} × {lengths}", f"streams{count}_") for count in parameters["streams"]]
    if "request_rate" in parameters:
        return [Load(_serve_load(parameters))]
    if "num_writers" in parameters:
        return [Load(f"{parameters['prompt_tokens']} tokens amid {parameters['num_writers']} writers")]
    if "loads" in parameters:
        sizes = [(load, *load.split("x")) for load in parameters["loads"]]
        return [Load(f"{count} × ({tokens} + {parameters['output_len']})", f"{load}_") for load, count, tokens in sizes]
    if "num_requests" in parameters and "context" in parameters:
        return [Load(f"{parameters['num_requests']} × {parameters['context']}, {parameters['steps']} steps")]
    count = parameters.get(
        "batch_size", parameters.get("num_prompts", parameters.get("num_iters", parameters.get("repeats")))
    )
    if "output_len" in parameters:
        spread = parameters.get("random_range_ratio")
        around = f" ± {100 * spread:g} %" if spread else ""
        kind = ", chat" if parameters.get("dataset_name") == "chat" else ""
        prompt = parameters["input_len"]
        if parameters.get("random_prefix_len"):
            prompt = f"{parameters['random_prefix_len']} shared + {prompt}"
        return [Load(f"{count} × ({prompt} + {parameters['output_len']}){around}{kind}")]
    return [Load("" if count is None else "once" if count == 1 else f"{count} times")]


def _serve_load(parameters: Mapping[str, Any]) -> str:
    lengths = [
        f"{name.removeprefix('random_').removeprefix('prefix_repetition_').replace('_', ' ')} {value}"
        for name, value in parameters.items()
        if name.endswith(("_len", "_ratio", "_num_prefixes")) and value
    ]
    rate, most = parameters["request_rate"], parameters["max_concurrency"]
    arrival = "all at once" if rate == "inf" else f"{rate:g} a second"
    limit = "" if most is None else f", at most {most} at once"
    kind = f"{parameters['num_prompts']} × {parameters['dataset_name']}"
    return f"{kind}{' (' + ', '.join(lengths) + ')' if lengths else ''}, {arrival}{limit}"
