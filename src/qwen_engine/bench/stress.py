"""Run stress suites on one engine. Every request must complete with exactly its tokens, outputs must keep coming, and
the KV pool must be whole at the end; each suite leaves a result file, and a failed check makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from qwen_engine.bench.figures import describe
from qwen_engine.bench.load import STALL_TIMEOUT_S
from qwen_engine.bench.output import add_common_arguments, exit_code
from qwen_engine.bench.suites import SUITES, run_suites
from qwen_engine.engine_args import engine_options


def add_suite_arguments(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """--suite, --scale and --stall-timeout."""
    parser.add_argument(
        "--suite",
        default=default,
        choices=[*SUITES, "all"],
        metavar="NAME",
        help="suite to run, one of those below, or all",
    )
    parser.epilog = "suites:\n" + "\n".join(f"  {suite.name:18}{suite.purpose}" for suite in SUITES.values())
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="multiplies every length and count, such as 0.02 on a CPU"
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=STALL_TIMEOUT_S,
        metavar="S",
        help="seconds without any output that fail a suite",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_suite_arguments(parser, default="all")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """`bench stress`."""
    return run_and_print(args, engine_options(args), prompt_seed=args.prompt_seed)


def run_and_print(args: argparse.Namespace, options: Mapping[str, Any], prompt_seed: int | None = None) -> int:
    """Runs args.suite of args.model and prints what came out; returns the exit code. options: of `LLM`."""
    code = 0
    for path, result in run_suites(
        list(SUITES.values()) if args.suite == "all" else [SUITES[args.suite]],
        args.model,
        options,
        scale=args.scale,
        results_dir=args.results_dir,
        prompt_seed=prompt_seed,
        stall_timeout_s=args.stall_timeout,
    ):
        sys.stdout.write(describe(result, path) + "\n")
        sys.stdout.flush()
        code = max(code, exit_code(result))
    return code
