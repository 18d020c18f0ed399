"""What the benchmarks share on the command line: flags, exit codes, and how a number is written."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen_engine.bench.results import ResultError
from qwen_engine.engine_args import add_engine_arguments


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every benchmark that loads a model: the model, the folder, the prompts' seed, the engine."""
    add_results_dir_argument(parser)
    parser.add_argument("--model", default="demo", help="folder, Hugging Face repository, or demo")
    parser.add_argument(
        "--prompt-seed", type=int, metavar="N", help="seed of the random prompts (default: a new one for each run)"
    )
    parser.add_argument("--verbose", action="store_true", help="log each phase of the start")
    add_engine_arguments(parser)


def add_results_dir_argument(parser: argparse.ArgumentParser) -> None:
    """--results-dir, also under vLLM's name."""
    parser.add_argument(
        "--results-dir",
        "--result-dir",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="folder of result files",
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
