"""Ranks that torchrun starts: the same program on every rank gives what one process gives, and ends as one."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from fault_tools import ERROR_LIMIT_S, ROOT, is_running, printed_by_one_rank, program, ranks_of, report, wait_until

from qwen_engine.engine.torchrun import TorchrunRank

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
MAIN = ["--model", "demo", "--device", "cpu", "--max-tokens", "12"]


@pytest.fixture
def rank_0_of_2(monkeypatch) -> dist.TCPStore:
    """Makes this process look like a rank of torchrun; returns the store that torchrun keeps."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": agent.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return agent


def test_ipc_02_own_ranks_and_two_torchruns_at_once_print_what_one_rank_prints():
    with (
        program("main_qwen32.py", *MAIN) as own,
        program(*TORCHRUN, "main_qwen32.py", *MAIN) as first,
        program(*TORCHRUN, "main_qwen32.py", *MAIN) as second,
    ):
        for process in (own, first, second):
            out, _ = process.communicate(timeout=120)
            assert (process.returncode, out) == (0, printed_by_one_rank(*MAIN))


def test_the_program_is_short():
    assert len((ROOT / "main_qwen32.py").read_text().splitlines()) <= 80


def test_a_wrong_number_of_ranks_is_one_clear_line(rank_0_of_2, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["main_qwen32.py", *MAIN, "--tensor-parallel-size", "4"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "main_qwen32.py"), run_name="__main__")
    assert ended.value.code == 2
    error = "error: torchrun started 2 ranks, but tensor_parallel_size is 4; make them equal\n"
    assert capsys.readouterr().err == error  # and no hint to try the demo, which this is


@pytest.mark.parametrize(("asked", "is_refused"), [([], False), (["--max-tokens", "100"], True)])
def test_only_max_tokens_that_were_asked_for_have_to_fit(asked, is_refused, monkeypatch, capsys):
    options = [*MAIN[:4], "--tensor-parallel-size", "1", "--max-model-len", "40", *asked]
    monkeypatch.setattr(sys, "argv", ["main_qwen32.py", *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "main_qwen32.py"), run_name="__main__")
    assert bool(ended.value.code) == is_refused
    assert ("--max-tokens is 100, but only" in capsys.readouterr().err) == is_refused


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="the GPUs are not missing here")
def test_without_gpus_and_weights_both_are_named_and_the_demo_is_offered(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["main_qwen32.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "main_qwen32.py"), run_name="__main__")
    assert ended.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()
    needed = f"error: 2 GPUs are needed, this machine has {torch.cuda.device_count()}; "
    assert error.startswith(needed + "cannot download Qwen/Qwen3-32B")
    assert hint.endswith("try: python main_qwen32.py --model demo --device cpu")


def test_ctrl_c_is_one_word_and_the_shells_exit_code(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("qwen_engine.LLM", interrupted)
    monkeypatch.setattr(sys, "argv", ["main_qwen32.py", "--model", "demo", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "main_qwen32.py"), run_name="__main__")
    assert (ended.value.code, capsys.readouterr().err.split()) == (130, ["interrupted"])


def test_shd_01_a_killed_rank_ends_all():
    prompts = ["--prompt", "x"] * 32  # enough to be busy for a while
    with program(*TORCHRUN, "main_qwen32.py", *MAIN[:-1], "1000", *prompts) as process:
        wait_until(lambda: "ready" in process.stderr.readline())
        ranks = ranks_of(process.pid)
        killed_at = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, ranks.values())), ERROR_LIMIT_S)
        report("kill of a rank to the end of all ranks", killed_at)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (1, "")
        assert "Signal 9 (SIGKILL)" in err


def test_ranks_that_torchrun_restarts_do_not_read_what_the_first_ones_left(rank_0_of_2, monkeypatch):
    """torchrun keeps its store when it restarts the ranks; engines are counted anew in each process."""
    monkeypatch.setattr("qwen_engine.engine.torchrun._engines", iter([0, 0]))
    TorchrunRank.current().open_store().set("channel", "of ranks that are dead")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not TorchrunRank.current().open_store().check(["channel"])
