"""This engine beside vLLM on the same loads: decode steps, prefill, first tokens, start, KV cache, prefix cache.

    python benchmarks/compare.py --model configs/Qwen3-32B --tensor-parallel-size 2 --time-limit-s 540
    python benchmarks/compare.py --model configs/Qwen3-0.6B --gpu 0 &       two models side by side, a GPU each
    python benchmarks/compare.py --model configs/Qwen3-8B --gpu 1; wait
    python benchmarks/compare.py --model demo --device cpu --scale 0.01 --engines ours       small, on a CPU

A model is a folder with config.json; weights are random in every engine (their values do not change the speed). Each
engine runs in a process of its own, one after the other, with the same prompts. Floors come from the model's shape and
from what the device reads and multiplies a second, measured first (or --bandwidth-tb-s, --tflop-s). The targets and
the loads are in compare_cases.py. vLLM is left out where it is not installed (--vllm-path: where it is).

--time-limit-s: of the whole run; each engine gets its share, and what does not fit is left out and named. Whatever ends
the run (the limit, Ctrl-C, SIGTERM), what was measured is in the table and in one result file a model in --results-dir.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compare_cases import (
    CASES,
    FIGURE_ORDER,
    START_FIGURES,
    TARGET_DEVICE,
    Case,
    Machine,
    cases_of,
    targets_of,
)
from compare_engine import ENGINES, Job

from qwen_engine.bench.facts import engine_facts
from qwen_engine.bench.output import add_results_dir_argument, exit_code
from qwen_engine.bench.results import Check, check_writable, new_result, write_result
from qwen_engine.bench.roofline import Ceiling, decode_work
from qwen_engine.bench.standing import rows_of, summarize, text_table
from qwen_engine.config import ModelConfig
from qwen_engine.engine_args import HelpFormatter, add_engine_arguments, engine_options
from qwen_engine.errors import ConfigError, QwenEngineError
from qwen_engine.models.hub import resolve_model

ENGINE_SCRIPT = Path(__file__).with_name("compare_engine.py")
MAX_MODEL_LEN = 40_960
END_GRACE_S = 20.0
POLL_S = 0.1
# NVLink multicast is not there on every machine with NVLink, and asking for it fails there.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "HF_HUB_OFFLINE": "1"}
VLLM_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


@dataclass(slots=True)
class EngineRun:
    """What one engine did on one model. failure: why it did not start; ended: why it was stopped before its end."""

    engine: str
    version: str | None = None
    facts: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # figure -> value
    took_s: dict[str, float] = field(default_factory=dict)  # case -> seconds of all its batches
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ended: str | None = None


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    start = time.monotonic()
    deadline = None if args.time_limit_s is None else start + args.time_limit_s
    code = 0
    try:
        check_writable(args.results_dir)
        folders = [resolve_model(name, with_weights=False) for name in args.model]
        ceiling = find_ceiling(args)
        for index, folder in enumerate(folders):
            share = (
                None if deadline is None else time.monotonic() + (deadline - time.monotonic()) / (len(folders) - index)
            )
            code = max(code, compare(args, args.model[index], folder, ceiling, share))
            if code == 130:
                break
    except QwenEngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--model", "--config-folder", nargs="+", required=True, help="folders with config.json, or 'demo'; one by one"
    )
    parser.add_argument("--engines", default="ours,vllm", type=_engines, help="of ours and vllm, in order")
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="NAME",
        help=f"names or patterns of: startup, {', '.join(CASES)} (default: those the model has targets for)",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks every length and count, e.g. 0.01 on a CPU")
    parser.add_argument("--gpu", help="CUDA_VISIBLE_DEVICES of the engines, like 1 or 0,1")
    parser.add_argument("--time-limit-s", type=float, help="of the whole run (none)")
    parser.add_argument("--bandwidth-tb-s", type=float, help="of one device's memory (measured)")
    parser.add_argument("--tflop-s", type=float, help="of one device in bf16 (measured)")
    parser.add_argument("--prompt-seed", type=int, help="of the random prompts (default: another one each run)")
    parser.add_argument("--vllm-path", type=Path, help="folder of vLLM's packages, for its process alone")
    add_results_dir_argument(parser)
    add_engine_arguments(parser)
    parser.set_defaults(engine_load_format="dummy")
    args = parser.parse_args()
    if not 0 < args.scale <= 1:
        parser.error(f"--scale is {args.scale}; it must be in (0, 1]")
    if args.engine_device == "auto":
        args.engine_device = "cuda" if torch.cuda.is_available() else "cpu"
    args.prompt_seed = secrets.randbits(32) if args.prompt_seed is None else args.prompt_seed
    args.names = None if args.cases is None else _select(args.cases)
    return args


def _engines(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(ENGINES):
        raise argparse.ArgumentTypeError(f"unknown engine {min(unknown)!r}; known: {', '.join(ENGINES)}")
    return names


def _select(patterns: Sequence[str]) -> list[str]:
    """Names of the cases that a pattern matches, in the order they are run."""
    known = ["startup", *CASES]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise SystemExit(f"error: no case is named {pattern!r}; there are {', '.join(known)}")
    return [name for name in CASES if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def find_ceiling(args: argparse.Namespace) -> Ceiling:
    """The limits of one device: those given, the rest measured in a process of its own."""
    given = {"bytes_s": args.bandwidth_tb_s, "flop_s": args.tflop_s}
    known = {name: value * 1e12 for name, value in given.items() if value is not None}
    if len(known) < len(given):
        with tempfile.TemporaryDirectory() as folder:
            with Worker(Path(folder), {"ceilings_of": args.engine_device}, _environment(args, "ours")) as worker:
                measured = list(worker.events(None))
            if not measured:
                raise ConfigError(f"cannot measure {args.engine_device}: {worker.last_words()}")
        known = {**measured[0], **known}
    return Ceiling(**known)


def compare(args: argparse.Namespace, name: str, folder: Path, ceiling: Ceiling, deadline: float | None) -> int:
    """Runs every engine on one model, prints the table and writes the result; returns its exit code."""
    model = ModelConfig.from_folder(folder)
    options = {"skip_tokenizer_init": True, **engine_options(args)}
    options["max_model_len"] = options["max_model_len"] or min(MAX_MODEL_LEN, model.max_context_tokens)
    if options["dtype"] == "auto":
        options["dtype"] = model.dtype if options["device"] != "cpu" else "float32"
    num_ranks = options["tensor_parallel_size"]
    machine = Machine(model, ceiling, getattr(torch, options["dtype"]).itemsize, num_ranks)
    names = args.names if args.names is not None else cases_of(model, num_ranks)
    cases = {case: CASES[case].scaled(args.scale) for case in names}
    for case_name, case in cases.items():
        if case.num_context_tokens > options["max_model_len"]:
            raise ConfigError(
                f"case {case_name} needs {case.num_context_tokens} tokens of context; max_model_len is "
                f"{options['max_model_len']}: lower --scale or leave the case out with --cases"
            )
    runs: list[EngineRun] = []
    interrupted = False
    absent = [engine for engine in args.engines if not _is_installed(engine, args.vllm_path)]
    present = [engine for engine in args.engines if engine not in absent]
    for index, engine in enumerate(present):
        now = time.monotonic()
        share = None if deadline is None else now + (deadline - now) / (len(present) - index)
        runs.append(EngineRun(engine))
        try:
            run_engine(runs[-1], args, folder, options, cases, machine, share)
        except KeyboardInterrupt:
            interrupted = True
            break
    runs += [EngineRun(engine, notes=["not installed"]) for engine in absent]
    result = to_result(args, name, cases, machine, runs, interrupted=interrupted)
    rows = rows_of(result)
    device = result["device"]["name"]
    print(
        f"\n{name} on {num_ranks} × {device}, {options['dtype']}, random weights; floors at "
        f"{ceiling.bytes_s / 1e12:.3g} TB/s and {ceiling.flop_s / 1e12:.3g} TFLOP/s"
    )
    print("\n".join(text_table(rows)))
    print("\n".join([summarize(rows), *(f"note: {note}" for note in result["notes"])]))
    for check in result["checks"]:
        print(f"{'ok  ' if check['passed'] else 'FAIL'} {check['name']}: {check['detail']}")
    print(f"-> {write_result(result, args.results_dir)}", flush=True)
    return exit_code(result)


def run_engine(
    run: EngineRun,
    args: argparse.Namespace,
    folder: Path,
    options: dict[str, Any],
    cases: dict[str, Case],
    machine: Machine,
    deadline: float | None,
) -> None:
    """Runs the cases on one engine in a process of its own; fills `run` as things become known."""
    with tempfile.TemporaryDirectory() as temporary:
        job = Job(
            engine=run.engine,
            model=str(folder),
            options=options,
            cases=list(cases),
            floors_s={name: case.floor_s(machine) for name, case in cases.items()},
            scale=args.scale,
            prompt_seed=args.prompt_seed,
            started_at=time.monotonic(),
            deadline=deadline,
        )
        doing = "the start"
        with Worker(Path(temporary), dataclasses.asdict(job), _environment(args, run.engine)) as worker:
            for event in worker.events(deadline):
                doing = event.get("begins", doing)
                take(run, event)
        if worker.was_stopped:
            run.notes.append(f"stopped at its time limit during {doing}")
        elif worker.exit_code:
            run.errors.append(f"{doing}: {worker.last_words()}")


def take(run: EngineRun, event: dict[str, Any]) -> None:
    """Notes what compare_engine.py told."""
    if "ready_s" in event:
        run.version, run.facts = event["version"], event.get("facts")
        run.metrics |= {figure: event[figure] for figure in START_FIGURES}
        print(f"{run.engine} {run.version}: ready in {event['ready_s']:.1f} s", flush=True)
    elif "failed" in event:
        run.errors.append(event["failed"])
    elif "left_out" in event:
        run.notes.append(f"{event['left_out']} was left out: {event['why']}")
    elif "error" in event:
        run.errors.append(f"{event['case']}: {event['error']}")
    elif "case" in event:
        case = event["case"]
        run.took_s[case] = event["took_s"]
        run.metrics |= {f"{case}_{figure}": value for figure, value in event["metrics"].items()}
        print(f"{run.engine} {case}: {event['took_s']:.1f} s", flush=True)


class Worker:
    """A process of compare_engine.py, in a group of its own so that nothing of an engine outlives it."""

    def __init__(self, folder: Path, job: dict[str, Any], environment: dict[str, str]) -> None:
        self._events, self._log = folder / "events", folder / "log"
        (folder / "job.json").write_text(json.dumps(job))
        self._events.touch()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ENGINE_SCRIPT), str(folder / "job.json"), str(self._events)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.was_stopped = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process, gently if it lets itself be, and whatever it has started."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                self._process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def events(self, deadline: float | None) -> Iterator[dict[str, Any]]:
        """What the process tells, as it tells it, until it ends or the deadline has passed."""
        with self._events.open("rb") as file:
            while True:
                has_ended = self._process.poll() is not None
                while (line := file.readline()).endswith(b"\n"):
                    yield json.loads(line)
                file.seek(-len(line), os.SEEK_CUR)  # half a line comes again
                if has_ended:
                    return
                if deadline is not None and time.monotonic() > deadline:
                    self.was_stopped = True
                    return
                time.sleep(POLL_S)

    def last_words(self) -> str:
        """How it ended, and the last line it wrote."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"exit code {self.exit_code}" + (f": {lines[-1]}" if lines else "")


def _is_installed(engine: str, vllm_path: Path | None) -> bool:
    if engine == "ours":
        return True
    return (vllm_path / engine).is_dir() if vllm_path is not None else importlib.util.find_spec(engine) is not None


def _environment(args: argparse.Namespace, engine: str) -> dict[str, str]:
    environment = {**ENVIRONMENT, **os.environ}
    if args.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = args.gpu
    if engine == "vllm":
        environment = {**VLLM_ENVIRONMENT, **environment}
        if args.vllm_path is not None:
            paths = [str(args.vllm_path), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def to_result(
    args: argparse.Namespace,
    name: str,
    cases: dict[str, Case],
    machine: Machine,
    runs: Sequence[EngineRun],
    *,
    interrupted: bool,
) -> dict[str, Any]:
    """The result of one model in the common schema; `bench/standing.py` says what its metrics are called."""
    metrics: dict[str, float | None] = {}
    for run in runs:
        metrics |= {
            ("" if run.engine == "ours" else f"{run.engine}_") + key: value for key, value in run.metrics.items()
        }
    ours = next((run for run in runs if run.engine == "ours"), None)
    facts = engine_facts(None) if ours is None or ours.facts is None else ours.facts
    figures = {
        f"{case_name}_{kind}": f"{case.label}: {case.figures[kind]}"
        for kind in FIGURE_ORDER
        for case_name, case in cases.items()
        if kind in case.figures
    } | START_FIGURES
    for case_name, case in cases.items():
        metrics |= {f"floor_{case_name}_{kind}": value for kind, value in case.floors(machine).items()}
    is_reference = args.scale == 1 and facts["device"]["name"] == TARGET_DEVICE
    targets = targets_of(machine.model, machine.num_ranks) if is_reference else {}
    for figure, target in targets.items():
        if figure in figures:
            metrics |= {f"target_{figure}": target.target, f"stretch_{figure}": target.stretch}
            metrics |= {f"recorded_{figure}": target.best[0], f"recorded_vllm_{figure}": target.vllm}
    metrics |= roofline_metrics(cases, machine, metrics)
    metrics |= {"floor_read_tb_s": machine.ceiling.bytes_s / 1e12, "floor_tflop_s": machine.ceiling.flop_s / 1e12}
    result = new_result(
        "compare",
        metrics=metrics,
        checks=[] if interrupted or ours is None else [ours_check(ours)],
        requests=[
            {"engine": run.engine, "case": case, "took_s": took_s}
            for run in runs
            for case, took_s in run.took_s.items()
        ],
        parameters={
            "model_id": Path(name).name,
            "engines": args.engines,
            "cases": list(cases),
            "figures": figures,
            "recorded": {figure: target.best[1] for figure, target in targets.items()},
            "scale": args.scale,
            "num_ranks": machine.num_ranks,
            "prompt_seed": args.prompt_seed,
        },
        times_s={f"{run.engine}_{case}": took_s for run in runs for case, took_s in run.took_s.items()},
        notes=[
            f"{run.engine}: {note}" for run in runs for note in [*run.notes, *(run.errors if run is not ours else [])]
        ],
        facts=facts,
        interrupted=interrupted,
    )
    result["libraries"] |= {run.engine: run.version for run in runs if run is not ours}
    return result


def ours_check(run: EngineRun) -> Check:
    """That every case of this engine that was begun has ended with exactly its tokens."""
    detail = f"{len(run.took_s)} cases, every request with exactly its tokens"
    return Check("cases complete", not run.errors, "; ".join(run.errors) or detail)


def roofline_metrics(cases: dict[str, Case], machine: Machine, metrics: dict[str, Any]) -> dict[str, float]:
    """Arithmetic and traffic of the measured decode steps, for the roofline plot."""
    found = {}
    for name in cases:
        step_ms = metrics.get(f"{name}_decode_step_ms")
        if step_ms:
            case = cases[name]
            work = decode_work(
                machine.model,
                num_rows=case.num_requests,
                context_tokens=case.num_requests * (case.prompt_tokens + case.output_tokens / 2),
                dtype_bytes=machine.dtype_bytes,
                num_ranks=machine.num_ranks,
            )
            found[f"{name}_decode_flop_per_byte"] = work.flops / work.num_bytes
            found[f"{name}_decode_tflop_s_per_rank"] = work.flops / step_ms / 1e9
            found[f"{name}_decode_tb_s_per_rank"] = work.num_bytes / step_ms / 1e9
    return found


if __name__ == "__main__":
    sys.exit(main())
