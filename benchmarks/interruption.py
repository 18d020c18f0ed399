"""A long prompt arrives while others write: how much longer do these wait for their next token?

    python benchmarks/interruption.py --model FOLDER --load-format dummy [--tensor-parallel-size 2]
        [--num-writers 64] [--context 1024] [--prompt-tokens 32000] [--max-late-chunk-tokens 256]

Prints the time of a step before the prompt comes, the gaps between tokens until it has its first one, and that time. A
larger --max-late-chunk-tokens makes the gaps longer and the wait shorter. Leaves a result file in --results-dir.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from qwen_engine import LLM, SamplingParams
from qwen_engine.bench.facts import engine_facts
from qwen_engine.bench.load import PromptSource
from qwen_engine.bench.output import add_common_arguments, at_least
from qwen_engine.bench.results import check_writable, new_result, write_result
from qwen_engine.engine_args import HelpFormatter, engine_options
from qwen_engine.errors import ConfigError, QwenEngineError
from qwen_engine.frontend.output_processor import RequestState

WARM_UP_TOKENS = 8
PARAMETERS = ("num_writers", "context", "steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--num-writers", type=at_least(1), default=64)
    parser.add_argument("--context", type=at_least(1), default=1024, help="prompt tokens of each writer")
    parser.add_argument(
        "--prompt-tokens",
        type=at_least(2),
        help="of the prompt that interrupts (default: 32000, less if it does not fit)",
    )
    parser.add_argument("--steps", type=at_least(2), default=100, help="steps that are measured before it comes")
    add_common_arguments(parser)
    args = parser.parse_args()
    check_writable(args.results_dir)
    with LLM(args.model, skip_tokenizer_init=True, **engine_options(args)) as llm:
        longest = llm.core.setup.max_model_len - 1
        num_tokens = min(32000, longest) if args.prompt_tokens is None else args.prompt_tokens
        needed = args.context + WARM_UP_TOKENS + args.steps + -(-num_tokens // llm.config.max_late_chunk_tokens) + 1
        if max(needed, num_tokens) > longest:
            raise ConfigError(
                f"the prompt takes {num_tokens} tokens and each writer about {needed}; max_model_len is {longest + 1}: "
                "lower --prompt-tokens, --context or --steps"
            )
        source = PromptSource(llm.core.model_config.vocab_size, args.prompt_seed)
        (prompt,) = source.draw("interruption", [num_tokens])
        writers = source.draw("writers", [args.context] * args.num_writers)
        before_s, gaps_s, first_token_s = interrupted(llm, writers, prompt, num_steps=args.steps)
        facts = engine_facts(llm)
    metrics = {
        "concurrency": args.num_writers,
        "median_step_ms": 1e3 * float(np.median(before_s)),
        "median_itl_ms": 1e3 * float(np.median(gaps_s)),
        "p99_itl_ms": 1e3 * float(np.quantile(gaps_s, 0.99)),
        "max_itl_ms": 1e3 * max(gaps_s),
        "p99_itl_to_step_ratio": float(np.quantile(gaps_s, 0.99) / np.median(before_s)),
        "first_token_s": first_token_s,
    }
    for name, value in metrics.items():
        print(f"{name:24s}{value:10.3f}")
    print(
        f"While {num_tokens} tokens arrived, {args.num_writers} writers waited {metrics['p99_itl_ms']:.1f} ms for a "
        f"token (99th percentile), {metrics['p99_itl_to_step_ratio']:.1f} times as long as before; the first token of "
        f"the new prompt took {first_token_s:.2f} s."
    )
    parameters = {"prompt_tokens": num_tokens, **{name: getattr(args, name) for name in PARAMETERS}}
    result = new_result("interruption", metrics=metrics, parameters=parameters, facts=facts)
    print(f"-> {write_result(result, args.results_dir)}")


def interrupted(
    llm: LLM, writers: list[list[int]], prompt: list[int], *, num_steps: int
) -> tuple[list[float], list[float], float]:
    """Seconds of each step before `prompt` comes, between the tokens of a writer until it has its first token, and
    until then."""
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    states, steps = llm.track(writers, endless)
    with closing(steps):
        while min(state.num_output_tokens for state in states) < WARM_UP_TOKENS:
            next(steps)
        before_s = gaps_of(steps, time.perf_counter(), until=lambda count: count == num_steps)
        # Its own iterator would run the engine as well; this way each step is seen from the writers' side.
        (late,), late_steps = llm.track([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        with closing(late_steps):
            start = time.perf_counter()
            next(late_steps)  # queues it and runs a step, whose outputs `steps` brings at once
            gaps_s = gaps_of(steps, start, until=lambda _: late.finished)
            return before_s, gaps_s, time.perf_counter() - start


def gaps_of(steps: Iterator[list[RequestState]], last: float, *, until: Callable[[int], bool]) -> list[float]:
    """Seconds between outputs, the first one since `last`, until the condition on their number holds."""
    gaps_s: list[float] = []
    while not until(len(gaps_s)):
        if next(steps):
            now = time.perf_counter()
            gaps_s.append(now - last)
            last = now
    return gaps_s


if __name__ == "__main__":
    try:
        main()
    except QwenEngineError as error:
        sys.exit(f"error: {error}")
