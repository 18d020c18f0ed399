"""`benchmarks/server_cost.py` as a user runs it, on the demo model with a handful of tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from qwen_engine import cli
from qwen_engine.bench.results import read_result

ROOT = Path(__file__).parents[2]
SMALL = ("--device", "cpu", "--kv-cache-bytes", str(8 << 20), "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def server_cost() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import server_cost
    finally:
        sys.path.pop(0)
    return server_cost


def run(server_cost: ModuleType, monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["server_cost.py", *args])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return server_cost.main()


def test_every_layer_is_measured_under_every_load(server_cost, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(server_cost, "MIN_REQUESTS", 2)
    load = ("--streams", "1", "3", "--batches", "1", "--input-len", "12", "--output-len", "24")
    assert run(server_cost, monkeypatch, *SMALL, *load, "--results-dir", str(tmp_path)) == 0
    (path,) = tmp_path.glob("*-cpu-demo-server-cost.json")
    result = read_result(path)
    metrics = result["metrics"]
    for num_streams in (1, 3):
        for figure in ("ttft", "tpot", "itl"):
            names = [f"streams{num_streams}_{layer}_median_{figure}_ms" for layer in ("engine", "offline", "server")]
            engine, offline, server = (metrics[name] for name in names)
            assert min(engine, offline, server) > 0
            assert metrics[f"streams{num_streams}_{figure}_ms_added"] == pytest.approx(server - engine)
            assert metrics[f"streams{num_streams}_{figure}_share_added"] == pytest.approx((server - engine) / engine)
    # A warm-up, then two batches of one stream and one of three, in each of three ways.
    assert len(result["requests"]) == 3 * (3 * 1 + 2 * 3)
    assert all(row["output_tokens"] == 24 for row in result["requests"])
    assert result["parameters"]["num_batches"] == {"1": 2, "3": 1}
    assert result["engine_config"]["max_num_seqs"] == 8
    assert "torch uses" in result["notes"][0]
    out = capsys.readouterr().out
    for line in ("1 stream, first token", "3 streams, between outputs", "API process", str(path)):
        assert line in out
    assert cli.main(["results", "report", "--results-dir", str(tmp_path)]) == 0
    report = (tmp_path / "README.md").read_text()
    assert "## server-cost: what text and HTTP add to the engine" in report
    (row,) = (line for line in report.splitlines() if "3 × (12 + 24)" in line)
    assert "–" not in row, "a figure is missing"


def test_a_server_that_does_not_start_ends_it_in_one_line(server_cost, monkeypatch, tmp_path, capsys):
    args = ("--max-model-len", "99999999", "--results-dir", str(tmp_path))
    assert run(server_cost, monkeypatch, *SMALL, *args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the server has ended: max_model_len is 99999999")
    assert not list(tmp_path.iterdir())


def test_what_each_layer_adds_is_shown_against_the_one_before(server_cost):
    figures = {"engine": 2.0, "offline": 2.5, "server": 4.0}
    metrics = {
        f"streams1_{layer}_median_{name}_ms": value
        for layer, value in figures.items()
        for name in ("ttft", "tpot", "itl")
    }
    first, *others = server_cost.table(metrics, [1]).splitlines()[1:]
    assert first.split()[-8:] == ["2.000", "+0.500", "+1.500", "4.000", "+2.000", "ms", "(+100.0", "%)"]
    assert [line.split()[-8:] for line in others] == [first.split()[-8:]] * 2
    assert "not measured" in server_cost.table(metrics, [64])
