"""`benchmarks/deterministic.py` measures both modes and sees that the bits are the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def test_both_modes_are_measured_and_the_bits_compared(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import deterministic

    command = "deterministic.py --device cpu --loads 2x20 3x9 --output-len 4 --results-dir"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(tmp_path)])
    assert deterministic.main() == 0
    (path,) = tmp_path.glob("*-deterministic.json")
    result = json.loads(path.read_text())
    assert result["engine_config"]["deterministic"] is True
    for name in ("2x20", "3x9"):
        for mode in ("default", "deterministic"):
            assert result["metrics"][f"{mode}_{name}_prefill_tok_s"] > 0
            step_ms = result["metrics"][f"{mode}_{name}_decode_step_ms"]
            assert step_ms is None or step_ms > 0  # none where so few steps drown in what else the machine does
    (check,) = [check for check in result["checks"] if check["name"] == "same bits"]
    assert check["passed"]
    assert "4 of 4" in check["detail"]
    assert "deterministic" in capsys.readouterr().out
