"""`benchmarks/compare.py`: its loads and floors, what goes wrong and is written down, a run beside a stub vLLM."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qwen_engine.bench import report
from qwen_engine.bench.compare import direction
from qwen_engine.bench.load import PromptSource
from qwen_engine.bench.results import read_result
from qwen_engine.bench.roofline import Ceiling
from qwen_engine.bench.standing import newest_rows, rows_of, summarize
from qwen_engine.config import ModelConfig

ROOT = Path(__file__).parents[2]
# The public shape of Qwen3-32B.
QWEN3_32B = ModelConfig(
    vocab_size=151_936,
    hidden_size=5120,
    intermediate_size=25_600,
    num_layers=64,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
    attention_bias=False,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def modules():
    """(compare, compare_cases, compare_engine)."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import compare
        import compare_cases
        import compare_engine
    finally:
        sys.path.pop(0)
    return compare, compare_cases, compare_engine


@pytest.fixture
def compare(modules):
    return modules[0]


@pytest.fixture
def cases(modules):
    return modules[1]


@pytest.fixture
def engine_script(modules):
    return modules[2]


@pytest.fixture
def machine(cases):
    """Qwen3-32B on two H200, at the figures the table of floors was made with."""
    return cases.Machine(QWEN3_32B, Ceiling(bytes_s=4.3e12, flop_s=790e12), dtype_bytes=2, num_ranks=2)


@pytest.mark.parametrize(
    ("batch", "context", "step_ms"),
    [(1, 1024, 7.47), (1, 40_960, 8.69), (8, 4096, 8.44), (16, 40_960, 27.4), (64, 4096, 15.4), (256, 1024, 18.4)],
)
def test_decode_floors_are_those_of_the_design(batch: int, context: int, step_ms: float, machine):
    assert 1e3 * machine.decode_s(batch, batch * context) == pytest.approx(step_ms, rel=0.005)


@pytest.mark.parametrize(("length", "prefill_ms"), [(1024, 41), (4096, 173), (16_384, 825), (40_960, 2731)])
def test_prefill_floors_are_those_of_the_design(length: int, prefill_ms: float, machine):
    assert 1e3 * machine.prefill_s(1, length) == pytest.approx(prefill_ms, rel=0.005)
    behind = machine.prefill_s(1, length, cached_tokens=length)
    assert machine.prefill_s(1, length) < behind < machine.prefill_s(1, 2 * length)


def test_nano_vllms_benchmark_is_drawn_as_nano_vllm_draws_it(cases):
    prompts, output_tokens = cases.CASES["nano_bench"].draw(151_936)
    assert sum(output_tokens) == 133_966  # what nano-vllm itself publishes
    assert len(prompts) == len(output_tokens) == 256
    assert all(100 <= len(prompt) <= 1024 for prompt in prompts)
    assert max(map(max, prompts)) <= 10_000


class ScriptedEngine:
    """Takes the seconds it is told to; remembers what it was given."""

    vocab_size = 500

    def __init__(self, *seconds: float) -> None:
        self.seconds = iter(seconds)
        self.batches: list[tuple[list[list[int]], list[int]]] = []

    def run(self, prompts: Sequence[list[int]], output_tokens: list[int], *, temperature: float = 0.0) -> float:
        self.batches.append((list(prompts), output_tokens))
        return next(self.seconds)


def test_a_load_is_measured_by_the_method(cases):
    engine = ScriptedEngine(9.0, 3.0, 2.0, 5.0)
    metrics = cases.Load(4, 10, 7).measure(engine, PromptSource(500, 1))
    assert metrics["decode_step_ms"] == pytest.approx(1e3 * (5 - 2) / 6)
    assert metrics["decode_tok_s"] == pytest.approx(4 * 6 / 3)
    assert (metrics["prefill_tok_s"], metrics["first_token_ms"]) == (20, 2000)
    assert [batch[1] for batch in engine.batches] == [[2] * 4, [1] * 4, [1] * 4, [7] * 4]
    prompts = [tuple(prompt) for batch, _ in engine.batches for prompt in batch]
    assert len(set(prompts)) == 16
    again = ScriptedEngine(9.0, 3.0, 2.0, 1.0)
    assert cases.Load(4, 10, 7).measure(again, PromptSource(500, 1))["decode_step_ms"] is None
    assert again.batches == engine.batches, "both engines must get the same prompts"


def test_the_prefix_case_shares_its_prefix_only_where_it_should(cases):
    engine = ScriptedEngine(1.0, 8.0, 1.0, 0.3, 0.2, 0.4)
    metrics = cases.Prefix(3, 64, 5).measure(engine, PromptSource(500, 1))
    assert metrics == {"cold_s": 8.0, "warm_s": 0.2, "speedup": 40.0}
    heads = [{tuple(prompt[:64]) for prompt in batch} for batch, _ in engine.batches]
    assert [len(group) for group in heads] == [1, 3, 1, 1, 1, 1]
    assert heads[2] == heads[3] == heads[4] == heads[5]
    assert not heads[2] & (heads[0] | heads[1])
    tails = [tuple(prompt[64:]) for batch, _ in engine.batches for prompt in batch]
    assert len(set(tails)) == len(tails)


def events_of(engine_script, monkeypatch, start: Any, names: list[str], **changes: Any) -> list[dict[str, Any]]:
    monkeypatch.setitem(engine_script.ENGINES, "ours", start)
    job = engine_script.Job(
        engine="ours",
        model="demo",
        options={},
        cases=names,
        floors_s=dict.fromkeys(names, 1.0),
        scale=0.01,
        prompt_seed=1,
        started_at=time.monotonic(),
        deadline=None,
    )
    events = io.StringIO()
    engine_script.run_job(dataclasses.replace(job, **changes), events)
    return [json.loads(line) for line in events.getvalue().splitlines()]


def test_cases_share_no_prefix(engine_script, monkeypatch):
    engine = ScriptedEngine(*[1.0] * 8)
    known = {"version": "1", "kv_cache_tokens": 9}
    names = ["64x1024_256", "16x4096_256"]
    events_of(engine_script, monkeypatch, lambda model, options: (engine, known), names, scale=0.02)
    prompts = [prompt for batch, _ in engine.batches for prompt in batch]
    assert len({len(prompt) for prompt in prompts}) == 2
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)


def test_a_case_that_fails_does_not_end_the_others(engine_script, monkeypatch):
    class Failing(ScriptedEngine):
        def run(self, prompts: Any, output_tokens: Any, *, temperature: float = 0.0) -> float:
            if len(self.batches) == 1:
                self.batches.append(([], []))
                raise RuntimeError("request 0 ended with 3 of 4 tokens")
            return super().run(prompts, output_tokens, temperature=temperature)

    engine = Failing(*[1.0] * 9)
    known = {"version": "1", "kv_cache_tokens": 9}
    names = ["1x128_512", "prefix"]
    events = events_of(engine_script, monkeypatch, lambda model, options: (engine, known), names)
    assert [event.get("case") for event in events] == [None, None, "1x128_512", None, "prefix"]
    assert events[2]["error"] == "RuntimeError: request 0 ended with 3 of 4 tokens"
    assert events[4]["metrics"]["speedup"] == 1


def test_what_does_not_fit_the_time_is_left_out_by_name(engine_script, monkeypatch):
    known = {"version": "1", "kv_cache_tokens": 9}

    def start(model: str, options: dict[str, Any]) -> Any:
        return ScriptedEngine(*[1.0] * 99), known

    floors = {"prefix": 1e6, "1x128_512": 1e-9}
    deadline = time.monotonic() + 1000
    events = events_of(engine_script, monkeypatch, start, list(floors), floors_s=floors, deadline=deadline)
    (left_out,) = [event for event in events if "left_out" in event]
    assert left_out["left_out"] == "prefix"
    assert "4000000 s" in left_out["why"]
    assert events[-1]["case"] == "1x128_512"


def test_limits_of_a_device_are_measured_in_bytes_and_operations(engine_script, monkeypatch):
    monkeypatch.setattr(engine_script, "READ_BYTES", {"cpu": 4000})
    monkeypatch.setattr(engine_script, "MATRIX_SIZE", {"cpu": 10})
    monkeypatch.setattr(engine_script, "_best_s", lambda call, kind: call() is None or 0.5)
    assert engine_script.measure_ceilings("cpu") == {"bytes_s": 8000, "flop_s": 4000}


def test_an_engine_that_does_not_start_says_why(engine_script, monkeypatch):
    def start(model: str, options: dict[str, Any]) -> Any:
        raise MemoryError("32 GiB are missing")

    assert events_of(engine_script, monkeypatch, start, ["prefix"]) == [{"failed": "MemoryError: 32 GiB are missing"}]


def test_outputs_of_another_length_are_refused(engine_script, llm):
    import qwen_engine

    def lazy(**options: Any) -> Any:
        return qwen_engine.SamplingParams(**{**options, "max_tokens": min(options["max_tokens"], 3)})

    assert engine_script.Offline(llm, lazy, 503).run([[1, 2], [3]], [3, 2]) > 0
    with pytest.raises(RuntimeError, match="request 1 ended with 3 of 4 tokens"):
        engine_script.Offline(llm, lazy, 503).run([[1, 2], [3]], [3, 4])


def run_of(compare, engine: str, figures: dict[str, float], facts: dict[str, Any] | None = None) -> Any:
    run = compare.EngineRun(engine, version="1.0", facts=facts, metrics=figures, took_s={"1x128_512": 1.0})
    if engine == "vllm":
        run.errors.append("prefix: out of memory")
    return run


def facts_of(name: str) -> dict[str, Any]:
    engine = {
        "model": "Qwen3-32B",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "tensor_parallel_size": 2,
        "max_model_len": 40_960,
    }
    memory = {"gpus": [], "host_peak_bytes": 1}
    device = {"name": name, "count": 2, "driver": "580.1"}
    return {"device": device, "engine_config": engine, "model_config": None, "memory": memory}


def result_of(compare, cases, machine, device: str = "NVIDIA H200", **figures: float) -> dict[str, Any]:
    """A result of one case on Qwen3-32B: ours 8 ms a decode step, vLLM 11.2."""
    ours = {"1x128_512_decode_step_ms": 8.0, "1x128_512_prefill_tok_s": 9000.0, "ready_s": 30.0, **figures}
    theirs = {"1x128_512_decode_step_ms": 11.2, "1x128_512_prefill_tok_s": 10_000.0}
    return compare.to_result(
        argparse.Namespace(engines=["ours", "vllm"], scale=1.0, prompt_seed=1),
        "configs/Qwen3-32B",
        {"1x128_512": cases.CASES["1x128_512"]},
        machine,
        [run_of(compare, "ours", ours, facts_of(device)), run_of(compare, "vllm", theirs)],
        interrupted=False,
    )


def test_figures_stand_beside_vllm_the_floor_and_the_targets(compare, cases, machine):
    result = result_of(compare, cases, machine)
    rows = {row.figure: row for row in rows_of(result)}
    step = rows["1x128_512_decode_step_ms"]
    assert step.speedup == pytest.approx(1.4)
    assert step.floor == pytest.approx(7.45, rel=0.01)
    assert step.share_of_floor == pytest.approx(step.floor / 8)
    assert (step.target, step.stretch, step.reached) == (8.9, 8.4, "stretch")
    assert rows["1x128_512_prefill_tok_s"].speedup == pytest.approx(0.9)
    assert (rows["ready_s"].reached, rows["ready_s"].speedup) == ("no", None)
    assert rows["ready_s"].speedup_over_recorded == pytest.approx(132 / 30)
    sentence = summarize(list(rows.values()))
    assert "better than vLLM in the same run in 1 of 2 figures" in sentence
    assert "1 of 2 targets reached" in sentence
    assert "decode steps at 93 % of the floor" in sentence
    assert result["status"] == "completed"
    assert result["notes"] == ["vllm: prefix: out of memory"]


def test_targets_are_of_the_reference_machine_only(compare, cases, machine):
    result = result_of(compare, cases, machine, device="NVIDIA B200")
    assert not [key for key in result["metrics"] if key.startswith(("target_", "recorded_"))]
    assert {row.reached for row in rows_of(result)} == {""}


def test_every_target_is_a_figure_of_some_case(cases):
    figures = {f"{name}_{kind}" for name, case in cases.CASES.items() for kind in case.figures}
    for target in cases.TARGETS:
        assert target.figure in figures | set(cases.START_FIGURES)
        sign = direction(target.figure)
        assert sign * target.stretch >= sign * target.target
        assert sign * target.target > sign * target.best[0], "a target that a peer has reached is none"


def test_an_own_failure_fails_and_a_failure_of_vllm_is_a_note(compare, cases, machine):
    ours = run_of(compare, "ours", {}, facts_of("NVIDIA H200"))
    ours.errors.append("prefix: RuntimeError: request 0 ended with 3 of 4 tokens")
    assert not compare.ours_check(ours).passed
    assert "3 of 4" in compare.ours_check(ours).detail


def test_of_each_figure_the_newest_run_speaks_as_a_whole(compare, cases, machine):
    old = result_of(compare, cases, machine)
    new = result_of(compare, cases, machine)
    for key in [key for key in new["metrics"] if "prefill" in key]:
        del new["metrics"][key]
    new["metrics"] |= {"1x128_512_decode_step_ms": 9.0, "vllm_1x128_512_decode_step_ms": None}
    rows = {row.figure: row for row in newest_rows([old, new])}
    assert (rows["1x128_512_decode_step_ms"].ours, rows["1x128_512_decode_step_ms"].vllm) == (9.0, None)
    assert rows["1x128_512_prefill_tok_s"].ours == 9000.0


def test_the_report_opens_with_the_standing(compare, cases, machine):
    entry = report.Entry("a.json", result_of(compare, cases, machine))
    page = report.render([entry], [], None)
    assert page.index("## Standing") < page.index("## What was run")
    assert "| 1 × (128 + 512): decode step, ms | 8 | 11.2 | 1.40 | 7.45 | 93 | 10.56 (SGLang 0.5.14) | 8.9 |" in page
    assert "| (132) | (4.40) |" in page
    assert "- **Qwen3-32B on h200x2, bfloat16, TP=2**: better than vLLM in the same run in 1 of 2 figures" in page
    assert "- vllm: prefix: out of memory" in page


SCRIPT = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[2], "a") as events:
    for event in ({"ready_s": 1.0, "version": "1", "kv_cache_tokens": 5}, {"begins": "prefix"}, {"child": child.pid}):
        events.write(json.dumps(event) + "\\n")
time.sleep(600)
"""


@pytest.fixture
def stuck_worker(compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker that has begun a case, heeds no SIGINT, has a child, and never ends."""
    script = tmp_path / "stuck.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(compare, "ENGINE_SCRIPT", script)
    monkeypatch.setattr(compare, "END_GRACE_S", 0.2)
    return lambda: compare.Worker(tmp_path, {}, dict(os.environ))


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_at_the_time_limit_an_engine_is_ended_with_all_it_started(stuck_worker):
    with stuck_worker() as worker:
        events = worker.events(None)
        child = next(event["child"] for event in events if "child" in event)
        assert list(worker.events(time.monotonic()))[:1] == [{"ready_s": 1.0, "version": "1", "kv_cache_tokens": 5}]
        assert worker.was_stopped
    assert worker.exit_code == -signal.SIGKILL
    assert is_gone(child)


def test_ctrl_c_ends_the_engine_and_keeps_what_it_told(compare, cases, machine, stuck_worker, monkeypatch):
    run, children = compare.EngineRun("ours"), []

    def take(run: Any, event: dict[str, Any]) -> None:
        if "child" in event:
            children.append(event["child"])
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        else:
            original(run, event)

    original = compare.take
    monkeypatch.setattr(compare, "take", take)
    args = argparse.Namespace(scale=1.0, prompt_seed=1, gpu=None, vllm_path=None)
    with pytest.raises(KeyboardInterrupt):
        compare.run_engine(run, args, Path("x"), {}, {"prefix": cases.CASES["prefix"]}, machine, None)
    assert run.metrics == {"ready_s": 1.0, "kv_cache_tokens": 5}
    assert is_gone(children[0])


def test_cases_are_chosen_by_name_and_pattern_and_unknown_ones_refused(compare, cases):
    assert compare._select(["16x*", "prefix"]) == ["prefix", "16x4096_256"]
    assert compare._select(["startup"]) == []
    with pytest.raises(SystemExit, match="no case is named '17x"):
        compare._select(["17x*"])
    assert cases.cases_of(QWEN3_32B, 2) == [
        "1x128_512",
        "prefix",
        "64x1024_256",
        "16x4096_256",
        "2x8192_1024",
        "256x1024_256",
    ]
    assert cases.cases_of(QWEN3_32B, 4) == list(cases.CASES)


STUB_VLLM = '''
"""vLLM's offline API as far as the comparison uses it, in front of this project's engine."""
import types
import qwen_engine
__version__ = "0.0-stub"
SamplingParams = qwen_engine.SamplingParams


class LLM:
    def __init__(self, model, disable_log_stats, **options):
        assert disable_log_stats is True
        assert options["load_format"] == "dummy" and options["enable_prefix_caching"] is True
        self.engine = qwen_engine.LLM(model, device="cpu", kv_cache_bytes=1 << 20, **options)
        cache = types.SimpleNamespace(num_gpu_blocks=7, block_size=16)
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(cache_config=cache))

    def generate(self, prompts, sampling_params, use_tqdm):
        assert all(set(prompt) == {"prompt_token_ids"} for prompt in prompts)
        return self.engine.generate(prompts, sampling_params, use_tqdm=use_tqdm)
'''


def test_both_engines_run_the_same_case_and_leave_one_result(
    compare, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    stub = tmp_path / "site" / "vllm"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(STUB_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # what main does to SIGTERM is for its own process
    argv = ["compare.py", "--model", str(tiny_model), "--device", "cpu", "--scale", "0.01", "--cases", "1x128_512"]
    argv += ["--bandwidth-tb-s", "0.01", "--tflop-s", "0.1", "--vllm-path", str(tmp_path / "site")]
    argv += ["--kv-cache-bytes", str(1 << 20), "--time-limit-s", "1000", "--results-dir", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", argv)
    assert compare.main() == 0
    (path,) = (tmp_path / "results").iterdir()
    result = read_result(path)
    assert result["status"] == "completed"
    assert result["libraries"]["vllm"] == "0.0-stub"
    assert result["engine_config"]["load_format"] == "dummy"
    metrics = result["metrics"]
    assert metrics["vllm_kv_cache_tokens"] == 7 * 16
    for prefix in ("", "vllm_"):
        assert metrics[f"{prefix}1x128_512_prefill_tok_s"] > 0
        assert metrics[f"{prefix}ready_s"] > 0
    out = capsys.readouterr().out
    assert "1 × (1 + 5): prefill, tok/s" in out
    assert "vllm 0.0-stub: ready in" in out
    assert "ok   cases complete" in out


def test_an_engine_that_is_not_installed_is_named_and_takes_no_time(compare, tmp_path: Path):
    assert compare._is_installed("ours", tmp_path)
    assert not compare._is_installed("vllm", tmp_path)
    (tmp_path / "vllm").mkdir()
    assert compare._is_installed("vllm", tmp_path)
