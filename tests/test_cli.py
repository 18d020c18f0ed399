"""The command line as a user meets it: exit codes, one-line errors, streamed text, interrupts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import qwen_engine
from qwen_engine import LLM, RequestOutput, cli
from qwen_engine.outputs import CompletionOutput

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


def test_help_names_every_command_and_does_not_import_torch():
    command = [sys.executable, "-X", "importtime", "-m", "qwen_engine", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "chat" in result.stdout
    assert "--max-tokens" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "qwen_engine.cli" in imported
    assert "torch" not in imported


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
        (
            ["--max-model-len", "40", "--prompt", "import os", "--max-tokens", "50"],
            ["--max-tokens is 50", "only 38 fit", "max_model_len is 40"],
        ),
        (["--max-model-len", "60", "--chat", "--prompt", "Hi", "--max-tokens", "60"], ["--max-tokens is 60", "fit"]),
        (["--kv-cache-bytes", "10"], ["KV cache", "10"]),
        (["--kv-cache-bytes", "1000000000000000"], ["not enough memory", "1000000000000000"]),
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


def test_what_cut_an_output_off_is_said(capsys):
    greedy = ["--temperature", "0", "--ignore-eos"]
    assert cli.main(["--prompt", "import ", "--prompt", "def ", "--max-tokens", "5", *greedy]) == 0
    assert "2 of 2 cut off at --max-tokens 5\n" in capsys.readouterr().err
    # Nobody asked for the 128 tokens that do not fit here.
    assert cli.main(["--prompt", "import ", "--max-model-len", "20", *greedy]) == 0
    assert "cut off at the context limit (max_model_len)\n" in capsys.readouterr().err
    assert cli.main(["--prompt", "import ", "--stop", "o", "--temperature", "0"]) == 0
    assert "cut off" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason", "note"),
    [
        ("<think>\nWell,", "length", "cut off at --max-tokens 3, before the thinking had ended: there is no answer"),
        ("<think>\n\n</think>\n\nI", "length", "cut off at --max-tokens 3"),
        ("<think>\nWell,", "stop", None),
    ],
)
def test_an_answer_that_ends_in_its_thinking_says_so(text: str, reason: str, note: str | None, monkeypatch, capsys):
    output = CompletionOutput(0, text, [1, 2, 3], finish_reason=reason)
    monkeypatch.setattr(LLM, "stream", lambda *_: [RequestOutput("0", None, [1], [output], finished=True)])
    lines = iter(["Who are you?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert cli.main(["chat", "--max-tokens", "3"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == text + "\n"
    assert stderr.splitlines()[1:] == ([] if note is None else [note]), stderr


def test_every_help_is_read_without_python_and_says_defaults_once():
    commands = [[], ["chat"], ["serve"], ["bench"], ["results"]]
    commands += [["bench", name] for name in ("stress", "throughput", "latency", "startup", "serve")]
    commands += [["results", name] for name in ("compare", "report")]
    for command in commands:
        with pytest.raises(SystemExit) as exit_info, contextlib.redirect_stdout(io.StringIO()) as out:
            cli.main([*command, "--help"])
        assert exit_info.value.code == 0
        text = " ".join(out.getvalue().split())
        assert not re.search(r"\bNone\b|\bSTR\b|\bFLOAT\b|\. \(default|default\) \(default|\(\d+\)", text), command
        assert text.startswith("usage: python -m qwen_engine")


def test_the_version_is_printed():
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"qwen-engine {qwen_engine.__version__}\n")


def test_an_unknown_flag_is_refused():
    result = run("--temprature", "1")
    assert result.returncode == 2
    assert "--temprature" in result.stderr


def test_ctrl_c_ends_cleanly():
    prompts = ["--prompt", "def "] * 32  # enough to be busy for a while
    command = [sys.executable, "-m", "qwen_engine", *prompts, "--max-tokens", "2000", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV, text=True)
    assert process.stdout is not None
    process.stdout.read(8)  # it has begun to write
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in stderr
