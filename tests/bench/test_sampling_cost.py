"""`benchmarks/sampling_cost.py`: every kind is measured beside greedy, and a kind that does not exist is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from qwen_engine.errors import ConfigError

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import sampling_cost

    def run(*options: str) -> dict[str, float]:
        command = "sampling_cost.py --device cpu --num-requests 2 --context 20 --steps 3"
        monkeypatch.setattr(sys, "argv", [*command.split(), "--results-dir", str(tmp_path), *options])
        sampling_cost.main()
        (path,) = tmp_path.glob("*-sampling-cost.json")
        return json.loads(path.read_text())["metrics"]

    return run


def test_each_kind_stands_beside_greedy(run, capsys):
    metrics = run("--kinds", "filters,everything")
    assert list(metrics) == [
        "concurrency",
        *(f"{kind}_{name}" for kind in ("greedy", "filters", "everything") for name in ("step_ms", "to_greedy_ratio")),
    ]
    assert metrics["everything_to_greedy_ratio"] == metrics["everything_step_ms"] / metrics["greedy_step_ms"]
    assert metrics["greedy_to_greedy_ratio"] == 1
    assert "everything" in capsys.readouterr().out


def test_a_kind_that_does_not_exist_is_named(run):
    with pytest.raises(ConfigError, match="--kinds names beam; there are greedy, seeded"):
        run("--kinds", "filters,beam")
