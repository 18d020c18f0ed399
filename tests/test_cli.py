"""The command line as a user meets it: exit codes, one-line errors, streamed text, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_engine import cli

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qwen_engine", *args]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, input=stdin, timeout=120, check=False)


@pytest.fixture
def assert_one_line_error(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs the command line in this process and checks that it refuses its arguments well."""

    def check(args: list[str], *words: str) -> None:
        assert cli.main(args) == 2
        stdout, stderr = capsys.readouterr()
        assert stdout == ""
        _assert_error_line(stderr, *words)

    return check


def _assert_error_line(stderr: str, *words: str) -> None:
    (line,) = stderr.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def test_help_names_every_command_and_is_quick():
    start = time.monotonic()
    result = run("--help")
    assert result.returncode == 0
    assert "chat" in result.stdout
    assert "--max-tokens" in result.stdout
    assert time.monotonic() - start < 20  # torch is not imported; a hang is what this catches


def test_prompts_are_streamed_in_order_with_a_speed_line():
    result = run("--prompt", "import ", "--prompt", "def ", "--max-tokens", "12", "--temperature", "0", "--ignore-eos")
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.split("def ", 1) if result.stdout.startswith("import ") else ("", "")
    assert len(first) > len("import ") + 5
    assert second.strip()
    assert "prompt: " in result.stderr
    assert "decode: " in result.stderr
    assert "Traceback" not in result.stderr


def test_seeded_output_repeats(capsys):
    args = ["--prompt", "import ", "--max-tokens", "16", "--temperature", "1", "--sampling-seed", "3", "--ignore-eos"]
    texts = []
    for _ in range(2):
        assert cli.main(args) == 0
        texts.append(capsys.readouterr().out)
    assert len(texts[0]) > len("import ") + 5
    assert texts[0] == texts[1]


def test_chat_reads_lines_and_answers_each():
    result = run("chat", "--max-tokens", "40", "--temperature", "0", stdin="Who are you?\n\n/reset\nHello!\n/quit\n")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip().splitlines()) >= 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "/nonexistent/model"], ["/nonexistent/model"]),
        (["--device", "tpu"], ["device", "tpu"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--dtype", "int3"], ["dtype", "int3"]),
        (["--block-size", "12"], ["block_size", "12"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--prompt", ""], ["prompt is empty"]),
        (["--max-model-len", "8", "--prompt", "one two three four five six seven eight nine"], ["max_model_len is 8"]),
        (["--kv-cache-bytes", "10"], ["KV cache", "10"]),
        (["--tensor-parallel-size", "3"], ["8 heads", "3 ranks"]),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(args, words, assert_one_line_error):
    assert_one_line_error(args, *words)


def test_a_bad_argument_gives_one_line_from_a_real_process_too():
    result = run("--device", "tpu")
    assert result.returncode == 2
    _assert_error_line(result.stderr, "device", "tpu")


def test_bad_model_folders_give_one_line(tmp_path: Path, assert_one_line_error):
    assert_one_line_error(["--model", str(tmp_path)], "config.json")
    (tmp_path / "config.json").write_text("{not json")
    assert_one_line_error(["--model", str(tmp_path)], "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert_one_line_error(["--model", str(tmp_path)], "LlamaForCausalLM", "Qwen3")


def test_a_folder_without_tokenizer_says_so(tiny_model: Path, assert_one_line_error):
    assert_one_line_error(["--model", str(tiny_model)], "tokenizer")


def test_a_repository_that_cannot_be_reached_says_so(assert_one_line_error):
    assert_one_line_error(["--model", "Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B")


def test_an_unknown_flag_is_refused():
    result = run("--temprature", "1")
    assert result.returncode == 2
    assert "--temprature" in result.stderr


def test_ctrl_c_ends_cleanly():
    command = [sys.executable, "-m", "qwen_engine", "--prompt", "def ", "--max-tokens", "2000", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV, text=True)
    assert process.stdout is not None
    process.stdout.read(8)  # it has begun to write
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
