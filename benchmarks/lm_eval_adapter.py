"""Scores tasks of the lm-evaluation-harness with this engine, in this process.

    pip install lm-eval
    python benchmarks/lm_eval_adapter.py --model Qwen/Qwen3-8B --tasks arc_easy gsm8k [--num-fewshot 5] [--limit 100]

`Scorer` answers the harness's three kinds of request and needs nothing of it, so that other programs can use it too:
each request has `args`, as the harness's have. All requests of a call go to the engine at once, which batches them.
Leaves a result file in --results-dir.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from qwen_engine import LLM, SamplingParams
from qwen_engine.bench.facts import engine_facts
from qwen_engine.bench.output import add_results_dir_argument, number
from qwen_engine.bench.results import check_writable, new_result, write_result
from qwen_engine.engine_args import HelpFormatter, add_engine_arguments, engine_options
from qwen_engine.errors import RequestError
from qwen_engine.outputs import RequestOutput

logger = logging.getLogger(__name__)

DEFAULT_MAX_GEN_TOKENS = 256
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class HarnessRequest(Protocol):
    """args: (context, continuation), (text,) or (context, generation options), by the kind of request."""

    args: tuple[Any, ...]


class Scorer:
    """The harness's model interface on an engine. It closes nothing: the engine is its maker's."""

    def __init__(self, llm: LLM, *, show_progress: bool = True) -> None:
        super().__init__()  # the harness's own base class, where there is one
        self._llm = llm
        self._show_progress = show_progress
        # A text without context is scored behind the token that ends texts, as there is none that begins them.
        self._prefix_token = llm.core.model_config.eos_token_ids[0]

    def loglikelihood(self, requests: Sequence[HarnessRequest]) -> list[tuple[float, bool]]:
        """For each (context, continuation): the continuation's log-probability, and whether greedy would write it."""
        pairs = [self._encode_pair(*request.args) for request in requests]
        scored = self._score([self._fit(context, continuation) for context, continuation in pairs])
        return [(sum(logprobs), is_greedy) for logprobs, is_greedy in scored]

    def loglikelihood_rolling(self, requests: Sequence[HarnessRequest]) -> list[float]:
        """For each (text,): its log-probability, every token counted once behind as much of the text as fits."""
        windows = [self._windows(self._llm.encode(request.args[0])) for request in requests]
        scored = iter(self._score([window for of_one in windows for window in of_one]))
        return [sum(sum(next(scored)[0]) for _ in of_one) for of_one in windows]

    def generate_until(self, requests: Sequence[HarnessRequest]) -> list[str]:
        """For each (context, options): what follows, without the stop text. Greedy unless do_sample is set.

        Raises RequestError for an option that is not known.
        """
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            params.append(_sampling_params(options))
            room = self._llm.max_model_len - params[-1].max_tokens
            token_ids = self._llm.encode(context)
            if room < 1:
                raise RequestError(
                    f"max_gen_toks is {params[-1].max_tokens}; max_model_len is {self._llm.max_model_len}",
                    "max_gen_toks",
                )
            if len(token_ids) > room:
                logger.warning("a context of %d tokens loses its beginning: %d fit", len(token_ids), room)
            prompts.append({"prompt_token_ids": token_ids[-room:] or [self._prefix_token]})
        outputs = self._llm.generate(prompts, params, use_tqdm=self._show_progress)
        return [output.outputs[0].text for output in outputs]

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text; without a generation prompt, the last message stays open."""
        return self._llm.tokenizer.chat_template_text(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    @property
    def tokenizer_name(self) -> str:
        """What the harness tells caches of requests apart by."""
        return self._llm.config.model.replace("/", "__")

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both, as the harness's own models take them: the context's, and what the whole has beyond as many.

        Spaces at the end of the context belong to the continuation, because tokens begin with their space. Where a
        token reaches across the border (":" and a line end), the context keeps its own tokens.
        """
        if not context:
            return [self._prefix_token], self._llm.encode(continuation)
        head = context.rstrip()
        continuation = context[len(head) :] + continuation
        whole, before = self._llm.encode(head + continuation), self._llm.encode(head)
        return before or [self._prefix_token], whole[len(before) :]

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """(prompt, how many of its last tokens are scored), without the beginning of a context that is too long."""
        room = self._llm.max_model_len - 1
        if len(continuation) >= room:
            raise RequestError(f"a continuation of {len(continuation)} tokens does not fit; {room - 1} do", "prompt")
        return (context + continuation)[-room:], len(continuation)

    def _windows(self, token_ids: list[int]) -> list[tuple[list[int], int]]:
        """Prompts that together score every token once: the last one reaches back, so that its context is long."""
        room = self._llm.max_model_len - 1
        sequence = [self._prefix_token, *token_ids]
        windows, end = [], 1
        while end < len(sequence):
            start, end = end, min(end + room - 1, len(sequence))
            windows.append((sequence[max(0, end - room) : end], end - start))
        return windows

    def _score(self, prompts: Sequence[tuple[list[int], int]]) -> list[tuple[list[float], bool]]:
        """Log-probabilities of the last tokens of each prompt, and whether each is the likeliest."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        inputs = [{"prompt_token_ids": token_ids} for token_ids, _ in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=self._show_progress)
        return [_last(output, count) for output, (_, count) in zip(outputs, prompts)]


def _last(output: RequestOutput, count: int) -> tuple[list[float], bool]:
    rows = list(zip(output.prompt_token_ids, output.prompt_logprobs))[len(output.prompt_token_ids) - count :]
    found = [row[token_id] for token_id, row in rows]
    return [one.logprob for one in found], all(one.rank == 1 for one in found)


def _sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    options = dict(options)
    until = options.pop("until", None) or []
    max_tokens = options.pop("max_gen_toks", DEFAULT_MAX_GEN_TOKENS)
    do_sample = options.pop("do_sample", None)
    sampling = {name: options.pop(name) for name in _SAMPLING if name in options}
    if options:
        name = min(options)
        raise RequestError(
            f"generation option {name!r} is not known; known are until, max_gen_toks, do_sample, "
            f"{', '.join(_SAMPLING)}",
            name,
        )
    if not do_sample:
        sampling["temperature"] = 0.0
    return SamplingParams(max_tokens=max_tokens, stop=[until] if isinstance(until, str) else list(until), **sampling)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", default="demo", help="folder, Hugging Face repository, or demo")
    parser.add_argument("--tasks", nargs="+", required=True, help="names of the harness's tasks")
    parser.add_argument("--include-path", type=Path, help="folder with more tasks")
    parser.add_argument("--num-fewshot", type=int, help="examples in each prompt (the task's own number)")
    parser.add_argument("--limit", type=int, help="documents of each task (all)")
    parser.add_argument("--apply-chat-template", action="store_true")
    add_results_dir_argument(parser)
    add_engine_arguments(parser)
    args = parser.parse_args()
    if importlib.util.find_spec("lm_eval") is None:
        parser.error("the harness is not installed: pip install lm-eval")
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class QwenEngineLM(Scorer, LM):
        pass

    check_writable(args.results_dir)
    with LLM(args.model, **engine_options(args)) as llm:
        evaluated = lm_eval.simple_evaluate(
            model=QwenEngineLM(llm),
            tasks=args.tasks,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            apply_chat_template=args.apply_chat_template,
            task_manager=TaskManager(include_path=None if args.include_path is None else str(args.include_path)),
            log_samples=False,
        )
        facts = engine_facts(llm)
    metrics = flat_metrics(evaluated["results"])
    names = ("tasks", "num_fewshot", "limit", "apply_chat_template")
    result = new_result(
        "lm-eval", metrics=metrics, parameters={name: getattr(args, name) for name in names}, facts=facts
    )
    result["libraries"]["lm_eval"] = lm_eval.__version__
    width = max(map(len, metrics))
    print("\n".join(f"{name:{width}}  {number(value)}" for name, value in metrics.items()))
    print(f"-> {write_result(result, args.results_dir)}")
    return 0


def flat_metrics(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The harness's figures as `<task>_<metric>`, the filter after it where it is not "none"."""
    return {
        f"{task}_{key.replace(',none', '').replace(',', '_')}": value
        for task, figures in results.items()
        for key, value in figures.items()
        if isinstance(value, int | float) and "," in key
    }


if __name__ == "__main__":
    sys.exit(main())
