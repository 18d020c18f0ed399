"""Put many random requests through the engine at once and report requests and tokens per second.

With fixed lengths, or lengths spread evenly (--random-range-ratio), or spread as conversations are (--dataset-name
chat: log-normal around the given lengths, so that a few are several times as long).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from qwen_engine.bench.figures import save_and_describe
from qwen_engine.bench.load import (
    PromptSource,
    cached_share,
    check_batches,
    check_fresh,
    distributions,
    latencies,
    pool_checks,
    ratio,
    run_random,
)
from qwen_engine.bench.output import add_common_arguments, at_least
from qwen_engine.bench.results import check_writable, new_result
from qwen_engine.engine_args import engine_options
from qwen_engine.errors import ConfigError
from qwen_engine.llm import LLM

CHAT_SPREAD = 0.7  # sigma of the logarithm of a length: 90 % lie within a factor of 3.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", "--num-seqs", type=at_least(1), default=256, help="requests, all sent at once")
    parser.add_argument("--dataset-name", choices=["random", "chat"], default="random", help="spread of the lengths")
    parser.add_argument(
        "--input-len", "--random-input-len", type=at_least(1), default=1024, help="prompt tokens of each"
    )
    parser.add_argument(
        "--output-len", "--random-output-len", type=at_least(1), default=128, help="output tokens of each"
    )
    parser.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="r: lengths lie evenly in [len * (1 - r), len * (1 + r)]",
    )
    parser.add_argument(
        "--random-prefix-len", type=at_least(0), default=0, help="tokens that all prompts share, added in front"
    )
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """`bench throughput`: one result file, its table on stdout."""
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"random-range-ratio is {args.random_range_ratio}; it must be in [0, 1)")
    check_writable(args.results_dir)
    with LLM(args.model, **{"skip_tokenizer_init": True, **engine_options(args)}) as llm:
        result = measure_throughput(llm, args, show_progress=None)
    return save_and_describe(result, args.results_dir)


def measure_throughput(llm: LLM, args: argparse.Namespace, *, show_progress: bool | None = False) -> dict[str, Any]:
    """Warms up, runs all requests once, and returns the result."""
    source = PromptSource(llm.core.model_config.vocab_size, args.prompt_seed)
    rng = np.random.default_rng(source.seed)
    spread = (args.dataset_name, args.random_range_ratio)
    outputs = draw_lengths(rng, args.output_len, args.num_prompts, *spread, most=llm.max_model_len - 1)
    most_inputs = llm.max_model_len - args.random_prefix_len - max(outputs)
    if most_inputs < 1:
        raise ConfigError(
            f"outputs of up to {max(outputs)} tokens behind a prefix of {args.random_prefix_len} do not fit; "
            f"max_model_len is {llm.max_model_len}"
        )
    inputs = draw_lengths(rng, args.input_len, args.num_prompts, *spread, most=most_inputs)
    (prefix,) = source.draw("prefix", [args.random_prefix_len])
    llm.reset_prefix_cache()
    # As many requests as will be measured, of which a few are as long.
    warm_up_lengths = [*inputs[:8], *(min(length, 16) for length in inputs[8:])]
    warm_up = run_random(llm, "warm-up", source, warm_up_lengths, [2] * len(inputs))
    runs = [warm_up]
    start = time.perf_counter()
    if not warm_up.ended_early:
        lengths = [args.random_prefix_len + length for length in inputs]
        runs.append(run_random(llm, "throughput", source, lengths, outputs, prefix=prefix, show_progress=show_progress))
    measured = runs[-1]
    interrupted = measured.interrupted
    checks = check_batches(runs)
    if not args.random_prefix_len:
        checks.append(check_fresh(measured.rows))
    checks += pool_checks(llm, runs)
    num_output = sum(row["output_tokens"] for row in measured.rows)
    num_total = num_output + sum(row["prompt_tokens"] for row in measured.rows)
    metrics: dict[str, float | None] = {
        "concurrency": min(args.num_prompts, llm.config.max_num_seqs),
        "total_s": measured.total_s,
        "requests_per_s": ratio(sum(row["finish_reason"] == "length" for row in measured.rows), measured.total_s),
        "output_tok_s": ratio(num_output, measured.total_s),
        "total_tok_s": ratio(num_total, measured.total_s),
        "cached_token_share": cached_share(measured.rows),
        "preemptions": sum(row["preemptions"] for row in measured.rows),
        **latencies(measured),
    }
    if interrupted:
        metrics["total_tok_s"] = None  # how many prompt tokens had been computed is not known
    names = ("num_prompts", "dataset_name", "input_len", "output_len", "random_range_ratio", "random_prefix_len")
    return new_result(
        "throughput",
        metrics=metrics,
        checks=pool_checks(llm, runs) if interrupted else checks,
        requests=measured.rows,
        parameters={**{name: getattr(args, name) for name in names}, "prompt_seed": source.seed},
        times_s={run.phase: run.total_s for run in runs} | {"measured": time.perf_counter() - start},
        distributions=distributions(measured),
        llm=llm,
        interrupted=interrupted,
    )


def draw_lengths(
    rng: np.random.Generator, mean: int, count: int, dataset_name: str, range_ratio: float, *, most: int
) -> Sequence[int]:
    """`count` lengths in [1, most], around `mean` as the data set spreads them."""
    if dataset_name == "chat":
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        values = rng.lognormal(np.log(mean) - CHAT_SPREAD**2 / 2, CHAT_SPREAD, count).round().astype(int)
    else:
        values = rng.integers(int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio)), count, endpoint=True)
        if mean * (1 + range_ratio) >= most + 1:
            raise ConfigError(f"lengths of up to {int(mean * (1 + range_ratio))} tokens do not fit: {most} is the most")
    return np.clip(values, 1, most).tolist()
