"""The stress suites: loads that a serving engine must survive, as data, with what has to hold at their end.

One engine serves all suites of a run; each suite leaves one result file, whatever becomes of it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen_engine.bench.load import (
    ENGINE_ALIVE,
    STALL_TIMEOUT_S,
    BatchRun,
    Measurement,
    PromptSource,
    Row,
    cached_share,
    check_batches,
    check_fresh,
    distributions,
    measure,
    metrics_of,
    pool_checks,
    ratio,
    run_random,
)
from qwen_engine.bench.results import Check, check_writable, new_result, write_result
from qwen_engine.errors import ConfigError
from qwen_engine.llm import LLM

MIN_PREFIX_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """A batch of equal requests. num_first_runs: batches to the first token before it, 0 where it is not measured."""

    name: str
    num_requests: int
    output_tokens: int
    shares_prefix: bool = False
    num_first_runs: int = 2


@dataclass(frozen=True, slots=True)
class Suite:
    """prompt_tokens: of every request, of which the first `prefix_tokens` are common to the phases that share them."""

    name: str
    purpose: str
    prompt_tokens: int
    phases: tuple[Phase, ...]
    prefix_tokens: int = 0

    @property
    def num_context_tokens(self) -> int:
        """Prompt and output of the longest request."""
        return self.prompt_tokens + max(phase.output_tokens for phase in self.phases)

    def scaled(self, scale: float, block_size: int) -> Suite:
        """The same with every length and count multiplied by `scale`.

        A length is at least 1, a common prefix whole blocks and several of them, and several requests stay two.
        """
        if scale == 1:
            return self
        suffix = _shrunk(self.prompt_tokens - self.prefix_tokens, scale)
        prefix = 0
        if self.prefix_tokens:
            prefix = max(MIN_PREFIX_BLOCKS, round(self.prefix_tokens * scale / block_size)) * block_size
        phases = tuple(
            dataclasses.replace(
                phase,
                num_requests=_shrunk(phase.num_requests, scale, minimum=min(phase.num_requests, 2)),
                output_tokens=_shrunk(phase.output_tokens, scale, minimum=min(phase.output_tokens, 2)),
            )
            for phase in self.phases
        )
        return dataclasses.replace(self, prompt_tokens=prefix + suffix, prefix_tokens=prefix, phases=phases)


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "prefix-cache",
            "requests behind one long shared prefix, cold and from the cache",
            prompt_tokens=16_384 + 200,
            prefix_tokens=16_384,
            phases=(
                Phase("cold", num_requests=8, output_tokens=256),
                Phase("seed", num_requests=1, output_tokens=256, shares_prefix=True, num_first_runs=0),
                Phase("hot", num_requests=8, output_tokens=256, shares_prefix=True),
            ),
        ),
        Suite(
            "high-concurrency",
            "many requests at once",
            prompt_tokens=4096,
            phases=(Phase("load", num_requests=16, output_tokens=256),),
        ),
        Suite(
            "long-decode",
            "few requests with long outputs",
            prompt_tokens=8192,
            phases=(Phase("load", num_requests=2, output_tokens=4096),),
        ),
        Suite(
            "max-output",
            "one request up to the model's longest context",
            prompt_tokens=8192,
            phases=(Phase("load", num_requests=1, output_tokens=32_768),),
        ),
    )
}


@dataclass(slots=True)
class SuiteRun:
    """A suite under way: what `run_suite` has measured so far."""

    suite: Suite
    runs: list[BatchRun] = field(default_factory=list)
    measurements: dict[str, Measurement] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def fresh_rows(self) -> list[Row]:
        """Requests that share nothing, those of the warm-up among them."""
        sharing = [phase.name for phase in self.suite.phases if phase.shares_prefix and phase.name in self.measurements]
        inside = {id(run) for name in sharing for run in self.measurements[name].runs}
        return [row for run in self.runs if id(run) not in inside for row in run.rows]

    @property
    def hot_rows(self) -> list[Row]:
        """Requests that should find the prefix in the cache; the phase that puts it there is not measured."""
        hot = [phase.name for phase in self.suite.phases if phase.shares_prefix and phase.num_first_runs]
        return [row for name in hot if name in self.measurements for row in self.measurements[name].rows]

    @property
    def prefixes(self) -> dict[str, str]:
        """What the metrics of each measured phase begin with: its name where there are several, else nothing."""
        measured = [phase.name for phase in self.suite.phases if phase.num_first_runs]
        return {name: f"{name}_" if len(measured) > 1 else "" for name in measured if name in self.measurements}


def run_suites(
    suites: Sequence[Suite],
    model: str,
    options: Mapping[str, Any],
    *,
    scale: float = 1.0,
    results_dir: Path = Path("results"),
    prompt_seed: int | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    show_progress: bool | None = None,
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Runs suites on one engine; yields each one's file and result. An interrupt or a dead engine ends the list.

    options: of `LLM`. Raises ConfigError, before any work, if a suite does not fit the engine.
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"scale is {scale}; it must be in (0, 1]")
    check_writable(results_dir)
    start = time.perf_counter()
    with LLM(model, **{"skip_tokenizer_init": True, **options}) as llm:
        ready_s = time.perf_counter() - start
        scaled = [suite.scaled(scale, llm.config.block_size) for suite in suites]
        for suite in scaled:
            _check_fits(llm, suite)
        source = PromptSource(llm.core.model_config.vocab_size, prompt_seed)
        for suite in scaled:
            result = run_suite(
                llm,
                suite,
                source,
                scale=scale,
                ready_s=ready_s,
                stall_timeout_s=stall_timeout_s,
                show_progress=show_progress,
            )
            yield write_result(result, results_dir), result
            if result["status"] == "interrupted" or not is_alive(result):
                return


def run_suite(
    llm: LLM,
    suite: Suite,
    source: PromptSource,
    *,
    scale: float = 1.0,
    ready_s: float | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    show_progress: bool | None = False,
) -> dict[str, Any]:
    """Runs one suite and returns its result, failed checks included. Ctrl-C ends it and keeps its rows."""
    run = SuiteRun(suite)
    start = time.perf_counter()
    try:
        if not llm.core.is_closed:
            llm.reset_prefix_cache()
        _run_phases(llm, run, source, stall_timeout_s=stall_timeout_s, show_progress=show_progress)
    except KeyboardInterrupt:  # between two batches
        run.interrupted = True
    run.interrupted |= any(batch.interrupted for batch in run.runs)
    times_s = {batch.phase: batch.total_s for batch in run.runs}
    return new_result(
        suite.name,
        metrics=_metrics(llm, run),
        checks=_checks(llm, run),
        requests=[row for batch in run.runs for row in batch.rows],
        parameters={
            **dataclasses.asdict(suite),
            "scale": scale,
            "prompt_seed": source.seed,
            "stall_timeout_s": stall_timeout_s,
        },
        times_s={"engine_ready": ready_s, **times_s, "suite": time.perf_counter() - start},
        distributions=_distributions(run),
        llm=llm,
        interrupted=run.interrupted,
    )


def _run_phases(llm: LLM, run: SuiteRun, source: PromptSource, **options: Any) -> None:
    suite = run.suite
    (prefix,) = source.draw(f"{suite.name}/prefix", [suite.prefix_tokens])
    count = suite.phases[0].num_requests
    run.runs.append(run_random(llm, "warm-up", source, [suite.prompt_tokens] * count, [2] * count, **options))
    for phase in suite.phases:
        if run.runs[-1].ended_early:
            return
        measurement = measure(
            llm,
            phase.name,
            source,
            num_requests=phase.num_requests,
            prompt_tokens=suite.prompt_tokens,
            output_tokens=phase.output_tokens,
            prefix=prefix if phase.shares_prefix else (),
            num_first_runs=phase.num_first_runs,
            **options,
        )
        run.runs += measurement.runs
        run.measurements[phase.name] = measurement


def _metrics(llm: LLM, run: SuiteRun) -> dict[str, float | None]:
    """Of each measured phase, under its name where there are several; of the prefix cache where it is the point."""
    metrics: dict[str, float | None] = {
        "cached_token_share": cached_share(run.fresh_rows),
        "preemptions": sum(row["preemptions"] for batch in run.runs for row in batch.rows),
    }
    for phase in run.suite.phases:
        if phase.name in run.prefixes:
            prefix = run.prefixes[phase.name]
            metrics[f"{prefix}concurrency"] = phase.num_requests
            figures = metrics_of(llm, run.measurements[phase.name])
            metrics |= {prefix + name: value for name, value in figures.items()}
    if run.suite.prefix_tokens:
        metrics["prefix_hit_rate"] = cached_share(run.hot_rows)
        metrics["prefill_speedup"] = ratio(metrics.get("cold_first_token_s"), metrics.get("hot_first_token_s"))
    return metrics


def _distributions(run: SuiteRun) -> dict[str, list[float]]:
    """Of each measured phase, under its name where there are several."""
    found: dict[str, list[float]] = {}
    for name, prefix in run.prefixes.items():
        whole = run.measurements[name].whole
        if whole is not None:
            found |= {prefix + key: values for key, values in distributions(whole).items()}
    return found


def _checks(llm: LLM, run: SuiteRun) -> list[Check]:
    suite = run.suite
    if run.interrupted:  # nothing else can be expected of it
        return pool_checks(llm, run.runs)
    checks = [*check_batches(run.runs), check_fresh(run.fresh_rows), *pool_checks(llm, run.runs)]
    if suite.prefix_tokens:
        rate = cached_share(run.hot_rows) or 0.0
        block_size = llm.config.block_size
        possible = suite.prefix_tokens // block_size * block_size / suite.prompt_tokens
        detail = f"{100 * rate:.2f} % of the prompt tokens came from the cache; {100 * possible:.2f} % are shared"
        checks.append(Check("prefix hit", rate >= possible, detail))
    return checks


def _check_fits(llm: LLM, suite: Suite) -> None:
    """Raises ConfigError if the longest request of the suite can never run on this engine."""
    manager = llm.core.scheduler.block_manager
    limit = min(llm.max_model_len, manager.num_blocks * manager.block_size + 1)
    if suite.num_context_tokens > limit:
        raise ConfigError(
            f"suite {suite.name} needs {suite.num_context_tokens} tokens of context; this engine holds {limit}: "
            "lower --scale, or raise --max-model-len or --kv-cache-bytes where the model allows"
        )


def is_alive(result: Mapping[str, Any]) -> bool:
    """Whether the engine survived the run that this result tells of."""
    return all(check["passed"] for check in result["checks"] if check["name"] == ENGINE_ALIVE)


def _shrunk(value: int, scale: float, minimum: int = 1) -> int:
    return max(minimum, round(value * scale))
