"""What sampling parameters cost: the time of a decode step with each kind of them, beside that of greedy requests.

    python benchmarks/sampling_cost.py --model FOLDER --load-format dummy [--num-requests 256] [--context 512]
        [--kinds seeded,filters,penalties,bias,logprobs,everything]

Every request of a batch has the parameters of the kind. Prints milliseconds per step (mean of --steps, after a warm-up)
and their ratio to greedy. Leaves a result file in --results-dir.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from contextlib import closing
from typing import Any

from qwen_engine import LLM, SamplingParams
from qwen_engine.bench.facts import engine_facts
from qwen_engine.bench.load import PromptSource
from qwen_engine.bench.output import add_common_arguments, at_least
from qwen_engine.bench.results import check_writable, new_result, write_result
from qwen_engine.engine_args import HelpFormatter, engine_options
from qwen_engine.errors import ConfigError, QwenEngineError

WARM_UP_TOKENS = 8
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8},
    "filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "bias": {"temperature": 0.0, "logit_bias": {5: 1.0, 7: -1.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
KINDS["everything"] = {name: value for kind in KINDS.values() for name, value in kind.items()} | KINDS["filters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--num-requests", type=at_least(1), default=256, help="requests that write at once")
    parser.add_argument("--context", type=at_least(1), default=512, help="prompt tokens of each request")
    parser.add_argument("--steps", type=at_least(1), default=50, help="steps that are measured")
    parser.add_argument("--kinds", default=",".join(KINDS), help="what to measure; greedy comes first in any case")
    add_common_arguments(parser)
    args = parser.parse_args()
    check_writable(args.results_dir)
    kinds = ["greedy", *(kind for kind in args.kinds.split(",") if kind != "greedy")]
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"--kinds names {', '.join(unknown)}; there are {', '.join(KINDS)}")
    with LLM(args.model, skip_tokenizer_init=True, **engine_options(args)) as llm:
        source = PromptSource(llm.core.model_config.vocab_size, args.prompt_seed)
        step_ms = {
            kind: 1e3 * step_s(llm, source.draw(kind, [args.context] * args.num_requests), kind, args.steps)
            for kind in kinds
        }
        facts = engine_facts(llm)
    metrics: dict[str, float] = {"concurrency": args.num_requests}
    for kind, took_ms in step_ms.items():
        metrics[f"{kind}_step_ms"] = took_ms
        metrics[f"{kind}_to_greedy_ratio"] = took_ms / step_ms["greedy"]
        print(f"{kind:12s}{took_ms:9.3f} ms a step{100 * (took_ms / step_ms['greedy'] - 1):+8.1f} %")
    parameters = {name: getattr(args, name) for name in ("num_requests", "context", "steps")}
    result = new_result("sampling-cost", metrics=metrics, parameters=parameters, facts=facts)
    print(f"-> {write_result(result, args.results_dir)}")


def step_s(llm: LLM, prompts: list[list[int]], kind: str, num_steps: int) -> float:
    """Mean seconds of a decode step of these prompts."""
    gc.collect()  # what the kinds before have left behind is not paid for in this one
    params = [
        SamplingParams(**KINDS[kind], seed=seed, max_tokens=None, ignore_eos=True) for seed in range(len(prompts))
    ]
    states, steps = llm.track(prompts, params)
    with closing(steps):
        while min(state.num_output_tokens for state in states) < WARM_UP_TOKENS:
            next(steps)
        start = time.perf_counter()
        for _ in range(num_steps):
            next(steps)
        return (time.perf_counter() - start) / num_steps


if __name__ == "__main__":
    try:
        main()
    except QwenEngineError as error:
        sys.exit(f"error: {error}")
