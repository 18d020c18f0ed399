"""`benchmarks/validate.py` on the demo checkpoint: exact in fp32 on the CPU, and able to find a fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_demo_checkpoint import DEMO

from qwen_engine.bench.results import read_result
from qwen_engine.errors import ConfigError

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def validate(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import validate as module

    return module


def run(module, monkeypatch, tmp_path: Path, *args: str) -> tuple[int, dict]:
    folder = tmp_path / "results"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # then the defaults are a CPU and fp32
    command = ["validate.py", "--model", "demo", "--batches"]
    monkeypatch.setattr(sys, "argv", [*command, "--max-tokens", "24", "--results-dir", str(folder), *args])
    code = module.main()
    (path,) = folder.iterdir()
    return code, read_result(path)


def test_the_demo_is_exact_and_has_transformers_perplexity(validate, monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text('def mean(data):\n    """Return the sample arithmetic mean of data."""\n' * 30 + "你好 🐍\n")
    code, result = run(validate, monkeypatch, tmp_path, "--lengths", "1", "16", "40", "--perplexity", str(text))
    figures = result["metrics"]
    assert (code, result["status"]) == (0, "completed")
    assert result["engine_config"]["dtype"] == "float32"
    assert result["engine_config"]["model"] == "demo"
    assert figures["equal"] == figures["tokens"] == 6 * 24
    assert figures["perplexity"] == pytest.approx(figures["transformers_perplexity"], rel=5e-5)


def test_a_token_that_transformers_would_not_choose_fails(validate, monkeypatch, tmp_path):
    generate = validate.engine_outputs

    def one_wrong_token(args, folder, backend):
        outputs = generate(args, folder, backend)
        outputs["tokens"][0][3] = (outputs["tokens"][0][3] + 1) % 3000
        return outputs

    monkeypatch.setattr(validate, "engine_outputs", one_wrong_token)
    code, result = run(validate, monkeypatch, tmp_path, "--lengths", "20")
    assert (code, result["status"]) == (1, "failed")
    assert result["metrics"]["wrong"] >= 1


def test_two_ranks_stand_beside_one(validate, monkeypatch, tmp_path):
    code, result = run(validate, monkeypatch, tmp_path, "--tensor-parallel-size", "2", "--lengths", "1", "20")
    assert code == 0
    assert result["engine_config"]["tensor_parallel_size"] == 2
    assert {check["name"] for check in result["checks"]} >= {"no wrong token (single)", "no wrong token (eager)"}
    assert "single, eager: the same tokens" in {check["name"] for check in result["checks"] if check["passed"]}


def test_engines_that_differ_fail_in_fp32(validate, monkeypatch, tmp_path):
    """As if there were graphs, and they chose another token."""
    generate = validate.engine_outputs

    def two_engines(args, folder, backend):
        outputs = generate(args, folder, "eager")
        if backend == "graph":
            outputs["tokens"][1] = [*outputs["tokens"][1][:-1], 5]
        return outputs

    monkeypatch.setattr(validate, "chosen_backends", lambda *_: ["eager", "graph"])
    monkeypatch.setattr(validate, "engine_outputs", two_engines)
    code, result = run(validate, monkeypatch, tmp_path, "--batches", "1", "--lengths", "4", "9", "--prompt-len", "8")
    assert code == 1
    assert [check["detail"] for check in result["checks"]] == ["4 of 5 prompts get the same tokens"]
    assert result["metrics"].keys() >= {"eager_batch1_decode_tok_s", "batch1_decode_tok_s"}


@pytest.mark.parametrize("source", ["--model", "--config-folder"])
def test_a_folder_without_a_model_is_refused_before_anything_is_written(source, validate, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["validate.py", source, str(tmp_path), "--device", "cpu"])
    monkeypatch.setattr(validate, "write_random_checkpoint", lambda *_: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        validate.main()


def test_a_checkpoint_that_was_made_up_is_named_in_the_result(validate, monkeypatch, tmp_path):
    command = ["validate.py", "--config-folder", str(DEMO), "--device", "cpu", "--dtype", "float32", "--lengths", "5"]
    folder = tmp_path / "results"
    options = ["--batches", "--max-tokens", "4", "--backends", "eager", "--results-dir", str(folder)]
    monkeypatch.setattr(sys, "argv", [*command, *options])
    assert validate.main() == 0
    (path,) = folder.iterdir()
    assert read_result(path)["parameters"]["random_weights"]


@pytest.mark.parametrize("backends", ["graph", "transformers", "eager,fast", ""])
def test_backends_that_the_device_does_not_have_are_refused(backends, validate, monkeypatch, capsys):
    command = ["validate.py", "--model", str(DEMO), "--device", "cpu", "--backends", backends]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        validate.main()
    assert "backend" in capsys.readouterr().err
