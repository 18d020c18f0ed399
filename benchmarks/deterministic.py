"""What `deterministic=True` costs: decode steps and prefill of the same loads without it and with it.

    PYTHONPATH=src python benchmarks/deterministic.py --model FOLDER [--load-format dummy] [--tensor-parallel-size 2]
        [--loads 1x1024 16x4096 64x1024] [--output-len 64]

A load is requests x prompt tokens; its prefill is that of the whole batch, its decode step the mean of those behind.
Two engines run one after the other. Leaves a result file in --results-dir; the exit code is 1 if a check fails, one of
which is that a prompt has the same bits alone and in a batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from qwen_engine import LLM, SamplingParams
from qwen_engine.bench.facts import engine_facts
from qwen_engine.bench.load import BatchRun, PromptSource, check_batches, check_fresh, measure, metrics_of
from qwen_engine.bench.output import add_common_arguments, at_least, exit_code
from qwen_engine.bench.results import Check, check_writable, new_result, write_result
from qwen_engine.engine_args import HelpFormatter, engine_options
from qwen_engine.errors import ConfigError, QwenEngineError

FIGURES = {"prefill_tok_s": "prefill, tok/s", "decode_step_ms": "decode step, ms"}
COMPARED_PROMPTS = 4


def load(text: str) -> tuple[int, int]:
    """An argparse type: 16x4096."""
    requests, _, tokens = text.partition("x")
    return at_least(1)(requests), at_least(1)(tokens)


def measured(
    llm: LLM, loads: Sequence[tuple[int, int]], output_tokens: int, source: PromptSource
) -> tuple[dict[str, dict[str, float | None]], list[BatchRun]]:
    """FIGURES by load, behind a warm-up of each, and everything that ran."""
    figures, runs = {}, []
    for num_requests, prompt_tokens in loads:
        name = f"{num_requests}x{prompt_tokens}"
        sizes = {"num_requests": num_requests, "prompt_tokens": prompt_tokens}
        warm_up = measure(llm, f"warm-up-{name}", source, output_tokens=4, num_first_runs=0, **sizes)
        found = measure(llm, name, source, output_tokens=output_tokens, **sizes)
        metrics = metrics_of(llm, found)
        figures[name] = {figure: metrics.get(figure) for figure in FIGURES}
        runs += warm_up.runs + found.runs
    return figures, runs


def same_bits(llm: LLM, source: PromptSource, prompt_tokens: int) -> Check:
    """That tokens and log-probabilities of some prompts are the same alone and together."""
    prompts = source.draw("bits", [max(1, prompt_tokens - number) for number in range(COMPARED_PROMPTS)])
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)

    def bits(prompts: list[list[int]]) -> list[Any]:
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]

    together = bits(prompts)
    equal = sum(bits([prompt]) == [expected] for prompt, expected in zip(prompts, together))
    return Check("same bits", equal == len(prompts), f"{equal} of {len(prompts)} prompts alone are as in a batch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--loads",
        type=load,
        nargs="+",
        default=[(1, 1024), (16, 4096), (64, 1024)],
        metavar="NxTOKENS",
        help="requests x prompt tokens (default: 1x1024 16x4096 64x1024)",
    )
    parser.add_argument("--output-len", type=at_least(2), default=64, help="tokens of each request")
    add_common_arguments(parser)
    args = parser.parse_args()
    if args.engine_deterministic:
        parser.error("both modes are measured: leave out --deterministic")
    check_writable(args.results_dir)
    needed = max(prompt_tokens for _, prompt_tokens in args.loads) + args.output_len
    figures, runs = {}, []
    for deterministic in (False, True):
        options = {**engine_options(args), "deterministic": deterministic}
        with LLM(args.model, skip_tokenizer_init=True, **options) as llm:
            if needed > llm.max_model_len:
                raise ConfigError(f"a request takes {needed} tokens; max_model_len is {llm.max_model_len}")
            source = PromptSource(llm.core.model_config.vocab_size, args.prompt_seed)
            figures[deterministic], done = measured(llm, args.loads, args.output_len, source)
            runs += done
            if deterministic:
                checks = [same_bits(llm, source, args.loads[0][1])]
                facts = engine_facts(llm)
    checks += [*check_batches(runs), check_fresh(row for run in runs for row in run.rows)]
    metrics: dict[str, float | None] = {}
    print(f"{'':12s}{'':18s}{'default':>12s}{'deterministic':>15s}{'cost':>8s}")
    for name, without in figures[False].items():
        for figure, label in FIGURES.items():
            before, after = without[figure], figures[True][name][figure]
            metrics |= {f"default_{name}_{figure}": before, f"deterministic_{name}_{figure}": after}
            if before and after:
                cost = (before / after if figure.endswith("_tok_s") else after / before) - 1
                metrics[f"{figure.partition('_')[0]}_{name}_cost"] = cost
                print(f"{name:12s}{label:18s}{before:12.2f}{after:15.2f}{cost:8.1%}")
            else:
                print(f"{name:12s}{label:18s}no figure: the whole took no longer than the first tokens")
    for check in checks:
        print(f"{'ok' if check.passed else 'FAILED'}: {check.name} ({check.detail})")
    parameters = {"loads": ["x".join(map(str, pair)) for pair in args.loads], "output_len": args.output_len}
    result = new_result(
        "deterministic",
        metrics=metrics,
        checks=checks,
        requests=[row for run in runs for row in run.rows],
        parameters=parameters,
        facts=facts,
    )
    print(f"-> {write_result(result, args.results_dir)}")
    return exit_code(result)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QwenEngineError as error:
        sys.exit(f"error: {error}")
