"""`benchmarks/interruption.py`: the prompt comes when the others write, and they go on while it is computed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def test_the_others_get_a_token_for_each_small_chunk(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import interruption

    seen = {}
    measure = interruption.interrupted

    def record(llm, *args, **options):
        seen["times"] = measure(llm, *args, **options)
        return seen["times"]

    monkeypatch.setattr(interruption, "interrupted", record)
    command = "interruption.py --device cpu --num-writers 2 --context 20 --prompt-tokens 100 --steps 3"
    monkeypatch.setattr(
        sys, "argv", [*command.split(), "--max-late-chunk-tokens", "30", "--results-dir", str(tmp_path)]
    )
    interruption.main()
    before_s, gaps_s, first_token_s = seen["times"]
    assert len(before_s) == 3
    assert len(gaps_s) == 4  # 30, 30, 30, 10
    assert first_token_s > sum(gaps_s) - 1e-9  # which it is, and a moment more
    (path,) = tmp_path.glob("*-interruption.json")
    result = json.loads(path.read_text())
    assert result["metrics"]["max_itl_ms"] == pytest.approx(1e3 * max(gaps_s))
    assert "p99_itl_to_step_ratio" in capsys.readouterr().out
