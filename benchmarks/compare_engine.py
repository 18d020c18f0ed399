"""One engine of `compare.py`, in a process of its own: starts it, runs cases, writes what came out as JSON lines.

    python benchmarks/compare_engine.py JOB EVENTS

JOB is a JSON file: a `Job`, or `{"ceilings_of": DEVICE}`. EVENTS is a file that gets a line as soon as something is
known: the start, each case, each case that was left out for want of time, or why the engine did not start. SIGINT ends
it; what was written stays.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from compare_cases import CASES

from qwen_engine.bench.load import PromptSource
from qwen_engine.config import ModelConfig
from qwen_engine.errors import summary

FIRST_GUESS = 4.0
"""How many times its floor the first case is taken to need; the next one, as many times as the one before it did."""
READ_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True, slots=True)
class Job:
    """cases: names, in order; floors_s: least time of each. started_at, deadline: on time.monotonic's clock."""

    engine: str  # of ENGINES
    model: str
    options: dict[str, Any]
    cases: list[str]
    floors_s: dict[str, float]
    scale: float
    prompt_seed: int
    started_at: float
    deadline: float | None


class Offline:
    """An engine behind the offline API that both share: `LLM.generate` and `SamplingParams`."""

    def __init__(self, llm: Any, make_params: Any, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._llm = llm
        self._make_params = make_params

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int], *, temperature: float = 0.0) -> float:
        """Seconds until every prompt has exactly its output tokens. Raises RuntimeError if one has not."""
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [
            self._make_params(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in output_tokens
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        took_s = time.perf_counter() - start
        for index, (output, expected) in enumerate(zip(outputs, output_tokens, strict=True)):
            found = len(output.outputs[0].token_ids)
            if found != expected:
                raise RuntimeError(f"request {index} ended with {found} of {expected} tokens")
        return took_s


def start_ours(model: str, options: dict[str, Any]) -> tuple[Offline, dict[str, Any]]:
    """This engine, and what is known of it once it is ready."""
    import qwen_engine
    from qwen_engine.bench.facts import engine_facts

    llm = qwen_engine.LLM(model, **options)
    facts = engine_facts(llm)
    known = {
        "version": qwen_engine.__version__,
        "kv_cache_tokens": facts["memory"]["kv_cache_tokens"],
        "facts": facts,
    }
    return Offline(llm, qwen_engine.SamplingParams, llm.core.model_config.vocab_size), known


def start_vllm(model: str, options: dict[str, Any]) -> tuple[Offline, dict[str, Any]]:
    """vLLM with the same options, as far as it knows them; what is left out is its default."""
    import vllm

    llm = vllm.LLM(model=model, disable_log_stats=True, **{name: options[name] for name in VLLM_OPTIONS})
    cache = llm.llm_engine.vllm_config.cache_config
    known = {"version": vllm.__version__, "kv_cache_tokens": cache.num_gpu_blocks * cache.block_size}
    return Offline(llm, vllm.SamplingParams, ModelConfig.from_folder(Path(model)).vocab_size), known


ENGINES = {"ours": start_ours, "vllm": start_vllm}
VLLM_OPTIONS = (
    "tensor_parallel_size",
    "dtype",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "skip_tokenizer_init",
)


def run_job(job: Job, events: TextIO) -> None:
    """Starts the engine and runs the cases; a line in `events` for each, as soon as it is known."""

    def tell(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    try:
        engine, known = ENGINES[job.engine](job.model, job.options)
    except Exception as error:  # whatever it is, the other engine is measured all the same
        tell(failed=summary(error))
        return
    tell(ready_s=time.monotonic() - job.started_at, **known)
    slowness = FIRST_GUESS
    for name in job.cases:
        guess_s = slowness * job.floors_s[name]
        left_s = float("inf") if job.deadline is None else job.deadline - time.monotonic()
        if guess_s > left_s:
            tell(left_out=name, why=f"it takes about {guess_s:.0f} s, {max(0, left_s):.0f} s were left")
            continue
        tell(begins=name)
        begin = time.monotonic()
        try:
            source = PromptSource(engine.vocab_size, job.prompt_seed, label=name)  # or cases would share prefixes
            metrics = CASES[name].scaled(job.scale).measure(engine, source)
        except Exception as error:  # the next case may work
            tell(case=name, error=summary(error))
            continue
        took_s = time.monotonic() - begin
        slowness = took_s / job.floors_s[name]
        tell(case=name, metrics=metrics, took_s=took_s)


def measure_ceilings(device: str) -> dict[str, float]:
    """Bytes read a second (a sum) and bf16 operations a second (a square product, random numbers) of a device."""
    kind = device.split(":")[0]
    numbers = torch.ones(READ_BYTES[kind] // 4, dtype=torch.float32, device=device)
    read_s = _best_s(lambda: numbers.sum(), kind)
    size = MATRIX_SIZE[kind]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    matrix_s = _best_s(lambda: left @ right, kind)
    return {"bytes_s": numbers.nbytes / read_s, "flop_s": 2 * size**3 / matrix_s}


def _best_s(call: Callable[[], Any], kind: str, repeats: int = 20) -> float:
    def timed() -> float:
        start = time.perf_counter()
        call()
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed()
    return min(timed() for _ in range(repeats))


def main() -> int:
    job_path, events_path = map(Path, sys.argv[1:])
    content = json.loads(job_path.read_text())
    try:
        with events_path.open("a") as events:
            if "ceilings_of" in content:
                events.write(json.dumps(measure_ceilings(content["ceilings_of"])) + "\n")
            else:
                run_job(Job(**content), events)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
