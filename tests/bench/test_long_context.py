"""`benchmarks/long_context.py` on a tiny model: exact in fp32, and able to find a wrong position or scale far out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import TINY

from qwen_engine.bench.results import read_result
from qwen_engine.layers.rotary import rotary_table
from qwen_engine.models import qwen3

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the program on a tiny model whose 64 tokens of context YaRN makes 256; its exit code and result."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import long_context

    assert isinstance(long_context, ModuleType)
    folder = tmp_path / "config"
    folder.mkdir()
    shape = {**TINY, "model_type": "qwen3", "head_dim": 64, "hidden_size": 256, "num_attention_heads": 8}
    (folder / "config.json").write_text(json.dumps(shape))

    def run(*args: str) -> tuple[int, dict[str, Any]]:
        command = ["long_context.py", "--config-folder", str(folder), "--original-max-position-embeddings", "64"]
        command += ["--prompt-tokens", "230", "--fp32-prompt-tokens", "200", "--output-tokens", "8"]
        command += ["--max-num-batched-tokens", "48", "--device", "cpu", "--results-dir", str(tmp_path / "results")]
        monkeypatch.setattr(sys, "argv", [*command, *args])
        code = long_context.main()
        (path,) = (tmp_path / "results").iterdir()
        return code, read_result(path)

    return run


def test_tokens_and_positions_are_right_and_the_time_stands_beside_its_floor(run, capsys):
    code, result = run("--bandwidth-tb-s", "0.01", "--tflop-s", "0.05")
    figures = result["metrics"]
    assert (code, result["status"]) == (0, "completed"), result["checks"]
    assert figures["fp32_equal"] == figures["fp32_tokens"] == 8
    assert figures["fp32_error_max"] < 1e-4
    assert figures["wrong"] == 0
    assert figures["fp32_shifted_error_mean"] > 0.05
    assert len(result["checks"]) == 7
    layers, hidden, heads, inner = 3, 256, 12 * 64 + 8 * 64, 96
    products = 2 * layers * (hidden * heads + 3 * hidden * inner) * 230 + 2 * TINY["vocab_size"] * hidden
    attention = 4 * 230 * 115 * 8 * 64 * layers
    assert figures["floor_first_token_s"] == pytest.approx((products + attention) / 0.05e12, rel=0.01)
    assert figures["first_token_s"] > 0
    assert figures["decode_step_ms"] > 0
    assert "ok   positions (bfloat16, 230 tokens)" in capsys.readouterr().out


def _off_by_one_from_the_middle(table: torch.Tensor) -> torch.Tensor:
    return torch.cat([table[:100], table[99:-1]])


def _without_attention_factor(table: torch.Tensor) -> torch.Tensor:
    return table / table[0, 0]


@pytest.mark.parametrize("damage", [_off_by_one_from_the_middle, _without_attention_factor])
def test_a_fault_of_the_embedding_far_out_is_found(damage, run, monkeypatch):
    monkeypatch.setattr(qwen3, "rotary_table", lambda *args: damage(rotary_table(*args)))
    code, result = run("--only", "check")
    failed = {check["name"].split(" ")[0] for check in result["checks"] if not check["passed"]}
    assert code == 1
    assert "positions" in failed
    assert "first_token_s" not in result["metrics"]
    assert result["engine_config"]["dtype"] == "bfloat16"
