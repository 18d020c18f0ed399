"""Measure how long a fresh process takes until the model is ready, and until its first token.

Each iteration is a process of its own: imports, weights, KV cache and compilation are all in the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from qwen_engine.bench.facts import FACTS
from qwen_engine.bench.figures import save_and_describe
from qwen_engine.bench.load import PromptSource, check_batches, check_pool, run_batch
from qwen_engine.bench.output import add_common_arguments, at_least
from qwen_engine.bench.results import Check, check_writable, new_result
from qwen_engine.engine_args import engine_options
from qwen_engine.errors import ConfigError, QwenEngineError
from qwen_engine.llm import LLM

SPANS = ("import_s", "load_s", "ready_s", "first_output_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-iters", type=at_least(1), default=3, help="processes to start, one after the other")
    parser.add_argument("--input-len", type=at_least(1), default=128, help="prompt tokens of the first request")
    # Marks one of the processes that are started: when that was, on the clock that all processes share.
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """`bench startup`: one result file, its table on stdout."""
    if args.started_at is not None:
        sys.stdout.write(json.dumps(_start_here(args)) + "\n")
        return 0
    check_writable(args.results_dir)
    result = measure_startup(args.argv, args.num_iters, show_progress=None)
    return save_and_describe(result, args.results_dir)


def measure_startup(argv: Sequence[str], num_iters: int, *, show_progress: bool | None = False) -> dict[str, Any]:
    """Starts `num_iters` processes of `python -m qwen_engine` with `argv` one after the other; the result of all.

    Raises ConfigError if not even one starts. Ctrl-C keeps those that are done.
    """
    started: list[dict[str, Any]] = []
    failure, interrupted = None, False
    disable = None if show_progress is None else not show_progress
    try:
        for _ in tqdm(range(num_iters), desc="startup", unit="process", leave=False, disable=disable):
            started.append(_start_process(argv))
    except KeyboardInterrupt:
        interrupted = True
    except QwenEngineError as error:
        if not started:
            raise
        failure = str(error)
    if not started:
        raise KeyboardInterrupt
    result = started[-1]
    metrics: dict[str, float | None] = {}
    for span in SPANS:
        values = [one["metrics"][span] for one in started]
        metrics[span] = statistics.median(values)
        metrics[f"max_{span}"] = max(values)
    found = [Check(**check) for one in started for check in one["checks"]]
    # Of each check the first that failed, or else the last.
    checks = list({check.name: check for check in sorted(found, key=lambda check: not check.passed)[::-1]}.values())
    checks.append(Check("every process starts", failure is None, failure or f"{len(started)} of {num_iters}"))
    # Device, engine and memory are those the process found; what was run and came out is ours.
    return new_result(
        "startup",
        metrics=metrics,
        checks=checks,
        requests=[{"process": index, **one["metrics"]} for index, one in enumerate(started)],
        parameters={**result["parameters"], "num_iters": num_iters},
        facts={name: result[name] for name in FACTS},
        interrupted=interrupted,
    )


def _start_process(argv: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "qwen_engine", *argv, "--started-at", repr(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        raise ConfigError(said[-1].removeprefix("error: ") if said else f"it ended with {done.returncode}")
    return json.loads(lines[-1])


def _start_here(args: argparse.Namespace) -> dict[str, Any]:
    """Starts an engine in this process, which was started at `args.started_at`, and returns the result."""
    imported = time.monotonic()
    with LLM(args.model, **{"skip_tokenizer_init": True, **engine_options(args)}) as llm:
        ready = time.monotonic()
        source = PromptSource(llm.core.model_config.vocab_size, args.prompt_seed)
        first = run_batch(llm, "first", source.draw("first", [args.input_len]), [1])
        moments = (imported, ready, ready, ready + first.total_s)
        starts = (args.started_at, imported, args.started_at, args.started_at)
        return new_result(
            "startup",
            metrics={span: end - start for span, start, end in zip(SPANS, starts, moments)},
            checks=[*check_batches([first]), check_pool(llm)],
            parameters={"input_len": args.input_len, "prompt_seed": source.seed},
            llm=llm,
        )
