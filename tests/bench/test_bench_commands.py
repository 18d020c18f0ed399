"""`bench …`, `main_qwen32.py --suite` and `benchmarks/stress.py` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_engine import LLM, cli
from qwen_engine.bench import latency, throughput
from qwen_engine.bench.cli import parse_args
from qwen_engine.bench.results import read_result
from qwen_engine.bench.throughput import draw_lengths
from qwen_engine.errors import ConfigError

ROOT = Path(__file__).parents[2]


def only_result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    return read_result(path)


def bench(model: Path, folder: Path, *args: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["bench", *args, "--model", str(model), "--device", "cpu", "--results-dir", str(folder)])
    return code, only_result(folder)


@pytest.mark.parametrize("flag", ["--num-prompts", "--num-seqs"])
def test_throughput_counts_every_token(flag: str, tiny_model: Path, tmp_path: Path, capsys):
    args = (flag, "12", "--input-len", "20", "--output-len", "6", "--random-range-ratio", "0.5")
    code, result = bench(tiny_model, tmp_path, "throughput", *args)
    assert code == 0
    rows, metrics = result["requests"], result["metrics"]
    assert len(rows) == 12
    assert all(10 <= row["prompt_tokens"] <= 30 and 3 <= row["output_tokens"] <= 9 for row in rows)
    num_output = sum(row["output_tokens"] for row in rows)
    assert metrics["output_tok_s"] == pytest.approx(num_output / metrics["total_s"])
    assert metrics["requests_per_s"] == pytest.approx(12 / metrics["total_s"])
    assert metrics["cached_token_share"] == 0
    out = capsys.readouterr().out
    assert re.search(
        r"12 × \(20 \+ 6\) ± 50 %\n +requests/s +[\d,.]+\n +output, tok/s +[\d,.]+  all output tokens", out
    )
    assert "ok   pool whole" in out
    assert result["command"]


def test_throughput_shares_a_prefix_when_asked(tiny_model: Path, tmp_path: Path):
    args = ("--num-prompts", "4", "--input-len", "8", "--output-len", "2", "--random-prefix-len", "64")
    code, result = bench(tiny_model, tmp_path, "throughput", *args)
    assert code == 0
    assert {row["prompt_tokens"] for row in result["requests"]} == {72}


def test_stress_shows_each_load_in_a_column_and_what_the_cache_did_in_a_sentence(tmp_path: Path, capsys):
    args = ["bench", "stress", "--suite", "prefix-cache", "--scale", "0.002", "--device", "cpu"]
    assert cli.main([*args, "--results-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n +2 × \(65 \+ 2\), cold +2 × \(65 \+ 2\), hot\n", out)
    # What is left to compute behind a cached prefix says nothing of the speed of a prefill.
    assert re.search(r"prefill, tok/s +[\d,.]+ +–  prompt tokens", out)
    assert only_result(tmp_path)["metrics"]["hot_prefill_tok_s"] > 0
    assert "98.46 % of the hot prompts' tokens came from the prefix cache; their first tokens came" in out
    assert "preemptions" not in out


def test_chat_lengths_keep_their_mean_and_have_a_long_tail():
    lengths = draw_lengths(np.random.default_rng(0), 200, 20_000, "chat", 0.0, most=10**6)
    assert np.mean(lengths) == pytest.approx(200, rel=0.03)
    assert max(lengths) > 1000
    assert max(draw_lengths(np.random.default_rng(0), 200, 1000, "chat", 0.0, most=300)) == 300


def test_lengths_that_do_not_fit_are_refused_with_both_numbers(tiny_model: Path, tmp_path: Path, capsys):
    args = ["bench", "throughput", "--model", str(tiny_model), "--device", "cpu", "--results-dir", str(tmp_path)]
    assert cli.main([*args, "--input-len", "600"]) == 2
    assert "600" in (error := capsys.readouterr().err)
    assert "512" in error or "384" in error
    assert cli.main([*args, "--random-range-ratio", "1"]) == 2
    with pytest.raises(ConfigError, match="600"):
        draw_lengths(np.random.default_rng(0), 400, 8, "random", 0.5, most=500)


def test_latency_follows_the_method(llm: LLM):
    args = parse_args(
        ["bench", "latency", "--batch-size", "2", "--input-len", "9", "--output-len", "5", "--num-iters", "3"]
    )
    args.num_iters_warmup = 1
    result = latency.measure_latency(llm, args)
    metrics, times = result["metrics"], result["times_s"]
    t1 = min(seconds for phase, seconds in times.items() if phase.startswith("first-token"))
    t2 = sorted(seconds for phase, seconds in times.items() if phase.startswith("iteration"))[1]
    assert metrics["first_token_s"] == t1
    assert metrics["decode_step_ms"] == pytest.approx(1e3 * (t2 - t1) / 4)
    assert metrics["decode_tok_s"] == pytest.approx(2 * 4 / (t2 - t1))
    assert len(result["requests"]) == 2 * (1 + 2 + 3)
    assert result["status"] == "completed"


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_an_interrupted_bench_keeps_what_is_done(name: str, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    step, calls = llm.core.step, iter(range(1, 1000))

    def counted() -> Any:
        if next(calls) == 14:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.core, "step", counted)
    args = parse_args(["bench", name, "--input-len", "8", "--output-len", "30"])
    measure = latency.measure_latency if name == "latency" else throughput.measure_throughput
    result = measure(llm, args)
    assert result["status"] == "interrupted"
    assert result["requests"]
    json.dumps(result, allow_nan=False)


def test_startup_measures_fresh_processes(tiny_model: Path, tmp_path: Path):
    code, result = bench(tiny_model, tmp_path, "startup", "--num-iters", "1", "--input-len", "4")
    metrics = result["metrics"]
    assert code == 0
    assert 0 < metrics["load_s"] < metrics["ready_s"] < metrics["first_output_s"]
    assert metrics["import_s"] + metrics["load_s"] == pytest.approx(metrics["ready_s"])
    assert result["engine_config"]["model"] == str(tiny_model)


def test_startup_passes_on_why_a_process_did_not_start(tmp_path: Path, capsys):
    args = ["bench", "startup", "--device", "cuda:99", "--results-dir", str(tmp_path)]
    assert cli.main(args) == 2
    assert "cuda:99" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_stress_script_runs_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = ["--suite", "long-decode", "--scale", "0.002", "--device", "cpu", "--results-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/stress.py", *args])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(ROOT / "benchmarks/stress.py"), run_name="__main__")
    assert exit_info.value.code == 0
    assert only_result(tmp_path)["command"].startswith("python benchmarks/stress.py --suite long-decode")


def test_a_failed_check_makes_the_exit_code_1_and_is_shown(tmp_path: Path, capsys):
    args = ["bench", "stress", "--suite", "prefix-cache", "--no-enable-prefix-caching", "--scale", "0.002"]
    assert cli.main([*args, "--device", "cpu", "--results-dir", str(tmp_path)]) == 1
    assert "FAIL prefix hit" in capsys.readouterr().out
    assert only_result(tmp_path)["status"] == "failed"


def test_the_32b_script_runs_a_suite_under_torchrun(tmp_path: Path):
    script = [str(ROOT / "main_qwen32.py"), "--suite", "prefix-cache", "--scale", "0.002"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    options = ["--model", "demo", "--device", "cpu", "--results-dir", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = only_result(tmp_path)
    assert result["status"] == "completed"
    assert result["engine_config"]["tensor_parallel_size"] == 2
    assert result["command"].startswith("torchrun --nproc-per-node 2 ")


ABSENT = ["zmq", "aiohttp", "matplotlib", "fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance", "openai"]
BLOCKER = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_present(cls, name, path=None, target=None):
    return None if name.split(".")[0] in {absent} else find(name, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(find_present)
"""


@pytest.fixture
def bare_machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a process, and of those it starts, in which none of ABSENT can be imported."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER.format(absent=ABSENT))
    paths = os.pathsep.join([str(site), str(ROOT / "src")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def test_suites_run_on_two_ranks_with_nothing_but_torch_and_what_the_engine_needs(
    bare_machine: dict[str, str], tmp_path: Path
):
    results = tmp_path / "results"
    command = [sys.executable, str(ROOT / "main_qwen32.py"), "--suite", "high-concurrency", "--scale", "0.002"]
    command += ["--model", "demo", "--device", "cpu", "--load-format", "dummy", "--results-dir", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, env=bare_machine, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert only_result(results)["status"] == "completed"
    code = f"""
from qwen_engine import cli
try:
    import zmq
except ImportError:
    raise SystemExit(cli.main(["results", "report", "--results-dir", {str(results)!r}]))
"""
    command = [sys.executable, "-c", code]
    reported = subprocess.run(command, capture_output=True, text=True, env=bare_machine, timeout=120, check=False)
    assert reported.returncode == 0, reported.stderr
    assert "(no plots: matplotlib is not installed" in reported.stdout, "the blocker did not block"


PROGRAMS = ("bench stress", "bench throughput", "bench latency", "bench startup", "bench serve", "results report")


def test_every_program_starts_with_nothing_but_torch_and_what_the_engine_needs(bare_machine: dict[str, str]):
    """All in one process: `--help` imports what each imports at its start."""
    scripts = [str(path) for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.stem not in NO_PROGRAMS]
    code = f"""
import contextlib, io, runpy, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from qwen_engine import cli
def ends_well(call, *args, **kwargs):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            call(*args, **kwargs)
    except SystemExit as end:
        return end.code in (0, None)
    return False
for program in {PROGRAMS!r}:
    assert ends_well(cli.main, [*program.split(), "--help"]), program
for script in {scripts!r}:
    sys.argv = [script, "--help"]
    assert ends_well(runpy.run_path, script, run_name="__main__"), script
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare_machine, timeout=120)
    assert done.returncode == 0, done.stderr


# Parts of compare.py, without a command line of their own; an HTTP client, which can do nothing without aiohttp.
NO_PROGRAMS = {"compare_cases", "compare_engine", "streams"}


@pytest.mark.parametrize("argv", [["bench"], ["bench", "nope"], ["results"], ["bench", "--", "stress"]])
def test_a_command_that_does_not_exist_is_refused_with_the_ones_that_do(argv: list[str], capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert ("stress" if argv[0] == "bench" else "compare") in capsys.readouterr().err
