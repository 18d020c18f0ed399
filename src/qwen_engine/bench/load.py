"""Puts a batch of random prompts through an engine and measures it; what the offline benchmarks have in common.

Method of a decode step: t1 is the wall time of a batch that ends at its first token (best of some), t2 that of an equal
batch that goes on to `output_tokens`; a step takes (t2 - t1) / (output_tokens - 1). Prompts are never used twice unless
sharing is the point, so that the prefix cache does not answer for the model.
"""

from __future__ import annotations

import logging
import secrets
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from qwen_engine.bench.results import DISTRIBUTION_POINTS, Check
from qwen_engine.bench.roofline import decode_work
from qwen_engine.errors import EngineDeadError, RequestError, summary
from qwen_engine.frontend.output_processor import RequestState
from qwen_engine.llm import LLM
from qwen_engine.request import SamplingParams

logger = logging.getLogger(__name__)

MAX_RANDOM_CACHED_SHARE = 0.01
"""Random prompts of which more than this share came from the prefix cache were not random, or not new."""
STALL_TIMEOUT_S = 60.0
ENGINE_ALIVE = "engine alive"
_SPARE_STEPS = 16
_LARGEST_TOKEN_ID = 150_000  # Qwen's special tokens lie above

Row = dict[str, Any]


class PromptSource:
    """Random prompts. Every call draws new ones, and so do sources of another `label`; `seed` None differs from run to
    run, and is then chosen here."""

    def __init__(self, vocab_size: int, seed: int | None = None, *, label: str = "") -> None:
        self.seed = secrets.randbits(32) if seed is None else seed
        self._label = label
        self._num_ids = min(vocab_size, _LARGEST_TOKEN_ID)
        self._num_calls = 0

    def draw(self, name: str, lengths: Sequence[int], prefix: Sequence[int] = ()) -> list[list[int]]:
        """Prompts of these lengths in tokens, `prefix` at the head of each."""
        rng = np.random.default_rng([self.seed, self._num_calls, zlib.crc32(f"{self._label}/{name}".encode())])
        self._num_calls += 1
        return [[*prefix, *rng.integers(self._num_ids, size=length - len(prefix)).tolist()] for length in lengths]


@dataclass(slots=True)
class BatchRun:
    """What one batch did. `rows` has one object a request, in order; an interrupt or a failure leaves what there was.

    total_s: until the last token. gaps_s: spans between outputs of one request, all completed requests together.
    """

    phase: str
    rows: list[Row] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    max_silent_s: float = 0.0
    max_silent_steps: int = 0
    stall: str | None = None
    failure: str | None = None
    interrupted: bool = False

    @property
    def ended_early(self) -> bool:
        return self.interrupted or self.stall is not None or self.failure is not None


class _Recorder:
    """Follows a batch step by step: when each request moved, and how long nothing came out at all."""

    def __init__(self, run: BatchRun, *, stall_timeout_s: float, max_silent_steps: int) -> None:
        self.run = run
        self.start = self.last_output = time.perf_counter()
        self.times: dict[str, list[float]] = {}
        self._stall_timeout_s = stall_timeout_s
        self._max_silent_steps = max_silent_steps
        self._silent_steps = 0

    def take(self, moved: Sequence[RequestState]) -> bool:
        """Notes a step that moved these requests; False if the batch stalls."""
        now = time.perf_counter()
        run, silent_s = self.run, now - self.last_output
        self._silent_steps = 0 if moved else self._silent_steps + 1
        run.max_silent_steps = max(run.max_silent_steps, self._silent_steps)
        run.max_silent_s = max(run.max_silent_s, silent_s)
        if silent_s > self._stall_timeout_s or self._silent_steps > self._max_silent_steps:
            run.stall = f"no output for {silent_s:.1f} s and {self._silent_steps} steps"
            return False
        if moved:
            self.last_output = now
            for state in moved:
                self.times.setdefault(state.request_id, []).append(now)
        return True

    def finish(self, states: Sequence[RequestState], output_tokens: Sequence[int]) -> None:
        """Sums up what was noted of all requests."""
        run = self.run
        run.total_s = (time.perf_counter() if run.ended_early else self.last_output) - self.start
        for index, (state, expected) in enumerate(zip(states, output_tokens)):
            row, gaps_s = self._row(index, state, expected)
            run.rows.append(row)
            if row["finish_reason"] == "length":
                run.gaps_s += gaps_s.tolist()

    def _row(self, index: int, state: RequestState, expected_tokens: int) -> tuple[Row, np.ndarray]:
        times = self.times.get(state.request_id, [])
        gaps_s = np.diff(times)
        num_output, metrics = state.num_output_tokens, state.metrics
        row = {
            "phase": self.run.phase,
            "index": index,
            "prompt_tokens": len(state.prompt_token_ids),
            "expected_output_tokens": expected_tokens,
            "output_tokens": num_output,
            "cached_tokens": state.num_cached_tokens,
            "finish_reason": state.finish_reasons[0],
            "preemptions": metrics.num_preemptions,
            "ttft_s": times[0] - self.start if times else None,
            "e2e_s": times[-1] - self.start if times else None,
            "tpot_s": (times[-1] - times[0]) / (num_output - 1) if num_output > 1 else None,
            "max_itl_s": float(gaps_s.max()) if gaps_s.size else None,
        }
        return row, gaps_s


def run_batch(
    llm: LLM,
    phase: str,
    prompts: Sequence[Sequence[int] | str],
    output_tokens: Sequence[int],
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    show_progress: bool | None = False,
) -> BatchRun:
    """Completes prompts greedily to exactly `output_tokens` each, end-of-sequence tokens ignored.

    Token ids are answered with token ids; what is text is tokenized, within the measured time, and answered with text.
    Raises RequestError if one of them can never run. It ends early on Ctrl-C, when the engine fails, and when nothing
    comes out for `stall_timeout_s` or for more steps than computing every prompt four times would take.
    show_progress: None shows a bar on a terminal only.
    """
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=isinstance(prompt, str))
        for prompt, count in zip(prompts, output_tokens)
    ]
    inputs = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
    run = BatchRun(phase)
    prefill_steps = -(-sum(map(len, prompts)) // llm.config.max_num_batched_tokens)
    disable = None if show_progress is None else not show_progress
    bar = tqdm(total=sum(output_tokens), desc=phase, unit="tok", leave=False, disable=disable)
    states: list[RequestState] = []
    recorder = _Recorder(run, stall_timeout_s=stall_timeout_s, max_silent_steps=_SPARE_STEPS + 4 * prefill_steps)
    with bar, ExitStack() as stack:
        try:
            states, steps = llm.track(inputs, params)
            stack.enter_context(closing(steps))
            for moved in steps:
                if not recorder.take(moved):
                    break
                bar.update(len(moved))
        except KeyboardInterrupt:
            run.interrupted = True
        except RequestError:
            raise
        except Exception as error:  # whatever it is, what was measured is kept and the failure written down
            if not isinstance(error, EngineDeadError):  # which the engine itself has logged
                logger.exception("%s failed", phase)
            run.failure = summary(error)
    recorder.finish(states, output_tokens)
    return run


def run_random(
    llm: LLM,
    phase: str,
    source: PromptSource,
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    *,
    prefix: Sequence[int] = (),
    **options: Any,
) -> BatchRun:
    """`run_batch`, whose `options` these are, with new prompts. An interrupt, whenever it comes, is in the run."""
    try:
        return run_batch(llm, phase, source.draw(phase, prompt_tokens, prefix), output_tokens, **options)
    except KeyboardInterrupt:  # before or after the batch
        return BatchRun(phase, interrupted=True)


@dataclass(slots=True)
class Measurement:
    """A load measured by the method above: the batches that ended at the first token, and the whole one."""

    runs: list[BatchRun]
    whole: BatchRun | None

    @property
    def rows(self) -> list[Row]:
        return [row for run in self.runs for row in run.rows]


def measure(
    llm: LLM,
    name: str,
    source: PromptSource,
    *,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    prefix: Sequence[int] = (),
    num_first_runs: int = 2,
    **options: Any,
) -> Measurement:
    """Runs `num_first_runs` batches to the first token, then one to the end. `options` are `run_batch`'s."""
    runs: list[BatchRun] = []
    for index in range(num_first_runs + 1):
        is_whole = index == num_first_runs
        phase = name if is_whole else f"{name}/first-token-{index + 1}"
        lengths = [prompt_tokens] * num_requests
        outputs = [output_tokens if is_whole else 1] * num_requests
        runs.append(run_random(llm, phase, source, lengths, outputs, prefix=prefix, **options))
        if runs[-1].ended_early:
            return Measurement(runs, runs[-1] if is_whole else None)
    return Measurement(runs, runs[-1])


def metrics_of(llm: LLM, measurement: Measurement) -> dict[str, float | None]:
    """Flat figures of a measured load; null where its runs do not define one.

    prefill_tok_s counts the prompt tokens that were computed, not those that came from the prefix cache.
    """
    firsts = [run.total_s for run in measurement.runs if run is not measurement.whole and not run.ended_early]
    whole = measurement.whole
    t1 = min(firsts) if firsts else None
    metrics: dict[str, float | None] = {"first_token_s": t1, "total_s": None}
    rows = whole.rows if whole is not None else []
    if firsts:
        num_computed = sum(row["prompt_tokens"] - row["cached_tokens"] for row in measurement.runs[0].rows)
        metrics["prefill_tok_s"] = ratio(num_computed, t1)
    if whole is None or whole.ended_early:
        return metrics
    num_output = sum(row["output_tokens"] for row in rows)
    metrics |= {
        "total_s": whole.total_s,
        "output_tok_s": ratio(num_output, whole.total_s),
        "requests_per_s": ratio(len(rows), whole.total_s),
    }
    num_steps = max(row["output_tokens"] for row in rows) - 1
    if t1 is not None and num_steps > 0 and whole.total_s > t1:
        step_s = (whole.total_s - t1) / num_steps
        metrics["decode_step_ms"] = 1e3 * step_s
        metrics["decode_tok_s"] = (num_output - len(rows)) / (whole.total_s - t1)
        num_context = sum(row["prompt_tokens"] + row["output_tokens"] / 2 for row in rows)
        work = decode_work(
            llm.core.model_config,
            num_rows=len(rows),
            context_tokens=num_context,
            dtype_bytes=llm.core.setup.dtype.itemsize,
            num_ranks=llm.config.tensor_parallel_size,
        )
        metrics["decode_flop_per_byte"] = work.flops / work.num_bytes
        metrics["decode_tflop_s_per_rank"] = work.flops / step_s / 1e12
        metrics["decode_tb_s_per_rank"] = work.num_bytes / step_s / 1e12
    metrics |= latencies(whole)
    return metrics


def latencies(run: BatchRun) -> dict[str, float | None]:
    """mean, median, std, p90, p95 and p99 of ttft, tpot, itl and e2el in ms, of requests that completed."""
    rows = completed(run.rows)
    spans = {
        "ttft": [row["ttft_s"] for row in rows],
        "tpot": [row["tpot_s"] for row in rows],
        "itl": run.gaps_s,
        "e2el": [row["e2e_s"] for row in rows],
    }
    metrics: dict[str, float | None] = {}
    for name, values in spans.items():
        metrics |= statistics_of(name, [value for value in values if value is not None])
    return metrics


def statistics_of(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    """Statistics of spans in seconds as `<statistic>_<name>_ms`; all null without values."""
    keys = [f"{statistic}_{name}_ms" for statistic in ("mean", "median", "std", "p90", "p95", "p99")]
    if not len(values_s):
        return dict.fromkeys(keys)
    values = 1e3 * np.asarray(values_s)
    figures = [values.mean(), np.median(values), values.std(), *np.percentile(values, [90, 95, 99])]
    return dict(zip(keys, map(float, figures)))


def distributions(run: BatchRun) -> dict[str, list[float]]:
    """Quantiles 0, 0.01, … 1 of time to first token and of the gaps between outputs, in seconds."""
    spans = {"ttft_s": [row["ttft_s"] for row in completed(run.rows)], "itl_s": run.gaps_s}
    points = np.linspace(0, 1, DISTRIBUTION_POINTS)
    return {name: np.quantile(values, points).tolist() for name, values in spans.items() if len(values)}


def completed(rows: Iterable[Row]) -> list[Row]:
    """Rows of requests that ended because they had all their tokens."""
    return [row for row in rows if row["finish_reason"] == "length"]


def check_batches(runs: Sequence[BatchRun]) -> list[Check]:
    """That every request ended with exactly the tokens asked for, and that outputs kept coming."""
    rows = [row for run in runs for row in run.rows]
    wrong = [
        row for row in rows if row["finish_reason"] != "length" or row["output_tokens"] != row["expected_output_tokens"]
    ]
    detail = f"{len(rows) - len(wrong)} of {len(rows)} requests have exactly the tokens asked for"
    if wrong:
        row = wrong[0]
        detail += (
            f"; {row['phase']} request {row['index']} ended as {row['finish_reason']} "
            f"with {row['output_tokens']} of {row['expected_output_tokens']}"
        )
    failure = next((run.failure for run in runs if run.failure is not None), None)
    stall = next((f"{run.phase}: {run.stall}" for run in runs if run.stall is not None), None)
    longest_s = max((run.max_silent_s for run in runs), default=0.0)
    longest_steps = max((run.max_silent_steps for run in runs), default=0)
    silence = f"at most {longest_s:.2f} s and {longest_steps} steps without output"
    return [
        Check("requests complete", not wrong and bool(rows), detail),
        Check("no stall", stall is None, stall or silence),
        Check(ENGINE_ALIVE, failure is None, failure or "no failure"),
    ]


def pool_checks(llm: LLM, runs: Sequence[BatchRun]) -> list[Check]:
    """`check_pool`, unless the engine failed: then it has no pool that could be whole."""
    return [] if any(run.failure for run in runs) else [check_pool(llm)]


def check_pool(llm: LLM) -> Check:
    """That the engine holds nothing any more: every block free, every invariant of the scheduler true."""
    scheduler = llm.core.scheduler
    manager = scheduler.block_manager
    detail = f"{manager.num_free_blocks} of {manager.num_blocks} blocks free, {len(scheduler.requests)} requests left"
    try:
        scheduler.check()
    except AssertionError as error:
        return Check("pool whole", False, f"{detail}; {error}")
    whole = manager.num_free_blocks == manager.num_blocks and not scheduler.requests
    return Check("pool whole", whole, detail)


def check_fresh(rows: Iterable[Mapping[str, Any]]) -> Check:
    """That the prefix cache did not answer random prompts."""
    share = cached_share(rows)
    detail = f"{100 * (share or 0):.2f} % of the random prompt tokens came from the prefix cache"
    return Check("prompts fresh", share is not None and share <= MAX_RANDOM_CACHED_SHARE, detail)


def cached_share(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Cached tokens over prompt tokens; None without requests."""
    rows = list(rows)
    return ratio(sum(row["cached_tokens"] for row in rows), sum(row["prompt_tokens"] for row in rows))


def ratio(value: float | None, base: float | None) -> float | None:
    """value / base, None where it is not defined."""
    return None if value is None or not base else value / base
