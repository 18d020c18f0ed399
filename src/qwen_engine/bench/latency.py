"""Run one batch again and again and report its latency: the whole, the first token, and the decode step between.

Each iteration has new prompts. A decode step is (t2 - t1) / (output length - 1), where t1 is the best of the batches
that ended at their first token and t2 the median of those that went on to the end.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from qwen_engine.bench.figures import save_and_describe
from qwen_engine.bench.load import (
    BatchRun,
    Measurement,
    PromptSource,
    cached_share,
    check_batches,
    check_fresh,
    distributions,
    metrics_of,
    pool_checks,
    run_random,
    statistics_of,
)
from qwen_engine.bench.output import add_common_arguments, at_least
from qwen_engine.bench.results import check_writable, new_result
from qwen_engine.engine_args import engine_options
from qwen_engine.llm import LLM

NUM_FIRST_RUNS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=at_least(1), default=8, help="requests in the batch")
    parser.add_argument("--input-len", type=at_least(1), default=32, help="prompt tokens of each")
    parser.add_argument("--output-len", type=at_least(1), default=128, help="output tokens of each")
    parser.add_argument("--num-iters-warmup", type=at_least(0), default=10, help="iterations before the measured ones")
    parser.add_argument("--num-iters", type=at_least(1), default=30, help="measured iterations")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """`bench latency`: one result file, its table on stdout."""
    check_writable(args.results_dir)
    with LLM(args.model, **{"skip_tokenizer_init": True, **engine_options(args)}) as llm:
        result = measure_latency(llm, args, show_progress=None)
    return save_and_describe(result, args.results_dir)


def measure_latency(llm: LLM, args: argparse.Namespace, *, show_progress: bool | None = False) -> dict[str, Any]:
    """Warms up, runs the iterations, and returns the result."""
    source = PromptSource(llm.core.model_config.vocab_size, args.prompt_seed)
    plan = [("warm-up", args.output_len)] * args.num_iters_warmup
    plan += [("first-token", 1)] * NUM_FIRST_RUNS
    plan += [("iteration", args.output_len)] * args.num_iters
    llm.reset_prefix_cache()
    runs: list[BatchRun] = []
    for index, (phase, output_len) in enumerate(plan):
        name = f"{phase} {index + 1}/{len(plan)}"
        lengths, outputs = [args.input_len] * args.batch_size, [output_len] * args.batch_size
        runs.append(run_random(llm, name, source, lengths, outputs, show_progress=show_progress))
        if runs[-1].ended_early:
            break
    interrupted = runs[-1].interrupted
    checks = [*check_batches(runs), check_fresh(row for run in runs for row in run.rows)]
    checks += pool_checks(llm, runs)
    measured = [run for run in runs if run.phase.startswith("iteration") and not run.ended_early]
    firsts = [run for run in runs if run.phase.startswith("first-token") and not run.ended_early]
    measured.sort(key=lambda run: run.total_s)
    median = measured[(len(measured) - 1) // 2] if measured else None
    totals_s = [run.total_s for run in measured]
    metrics = {
        "concurrency": args.batch_size,
        "avg_latency_s": statistics.fmean(totals_s) if totals_s else None,
        **statistics_of("latency", totals_s),
        "cached_token_share": cached_share(row for run in runs for row in run.rows),
        **metrics_of(llm, Measurement([*firsts, *([median] if median else [])], median)),
    }
    names = ("batch_size", "input_len", "output_len", "num_iters_warmup", "num_iters")
    return new_result(
        "latency",
        metrics=metrics,
        checks=pool_checks(llm, runs) if interrupted else checks,
        requests=[row for run in runs for row in run.rows],
        parameters={**{name: getattr(args, name) for name in names}, "prompt_seed": source.seed},
        times_s={run.phase: run.total_s for run in runs},
        distributions={} if median is None else distributions(median),
        llm=llm,
        interrupted=interrupted,
    )
