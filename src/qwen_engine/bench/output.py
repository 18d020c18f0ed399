"""What a benchmark shows its user: figures and checks as a table on stdout, and where the result file is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen_engine.bench.results import ResultError, device_label
from qwen_engine.engine_args import add_engine_arguments

# Most readers want these; all others are in the file.
_SHOWN = (
    "concurrency",
    "first_token_s",
    "prefill_tok_s",
    "total_s",
    "decode_step_ms",
    "decode_tok_s",
    "output_tok_s",
    "total_tok_s",
    "requests_per_s",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "prefix_hit_rate",
    "prefill_speedup",
    "cached_token_share",
    "preemptions",
    "ready_s",
    "import_s",
    "load_s",
    "first_output_s",
)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every benchmark that loads a model: the model, the folder, the prompts' seed, the engine."""
    add_results_dir_argument(parser)
    parser.add_argument("--model", default="demo", help="folder, Hugging Face repository, or 'demo' (default)")
    parser.add_argument("--prompt-seed", type=int, help="of the random prompts (default: another one each run)")
    parser.add_argument("--verbose", action="store_true", help="log each phase of the start")
    add_engine_arguments(parser)


def add_results_dir_argument(parser: argparse.ArgumentParser) -> None:
    """--results-dir, also under vLLM's name."""
    parser.add_argument(
        "--results-dir", "--result-dir", type=Path, default=Path("results"), help="folder of result files (./results)"
    )


def at_least(minimum: int) -> Any:
    """An argparse type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least {minimum}")
        return value

    return parse


def exit_code(result: Mapping[str, Any]) -> int:
    """0 completed, 1 a check failed, 130 interrupted."""
    return {"completed": 0, "failed": 1, "interrupted": 130}[result["status"]]


def describe(result: Mapping[str, Any], path: Path) -> str:
    """Headline, the main figures, the checks and the file of a result, as text for a terminal."""
    engine = result["engine_config"] or {}
    lines = [f"{result['name']}: {engine.get('model', '')} on {device_label(result)}, {result['status']}"]
    metrics = result["metrics"]
    prefixes = load_prefixes(metrics)
    if len(prefixes) > 1:
        lines.append(" " * 24 + "".join(f"{prefix.rstrip('_'):>12}" for prefix in prefixes))
    for name in _SHOWN:
        values = [metrics.get(prefix + name) for prefix in prefixes if prefix + name in metrics]
        values = values or [metrics[name]] if name in metrics else values
        if any(value is not None for value in values):
            lines.append(f"  {name:22}" + "".join(f"{number(value):>12}" for value in values))
    for check in result["checks"]:
        lines.append(f"  {'ok  ' if check['passed'] else 'FAIL'} {check['name']}: {check['detail']}")
    lines += [f"  note: {text}" for text in result["notes"]]
    return "\n".join([*lines, f"  -> {path}"])


def load_prefixes(metrics: Mapping[str, Any]) -> list[str]:
    """What the metrics of each measured load begin with: "" for the only one, or "cold_" and "hot_"."""
    prefixes = [key.removesuffix("concurrency") for key in metrics if re.fullmatch(r"(\w+_)?concurrency", key)]
    return prefixes or [""]


def number(value: float | None) -> str:
    """Four significant digits, thousands apart; an en dash for null."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def fraction(text: str) -> float:
    """ "3%" or "0.03" → 0.03. Raises ResultError."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise ResultError(f"tolerance is {text!r}; give a share such as 3% or 0.03")
    return value
