"""Ranks that torchrun starts: the same program on every rank gives what one process gives, and ends as one."""

from __future__ import annotations

import os
import signal
import time

import pytest
from fault_tools import is_running, plant, program, ranks_of, run_program, wait_until

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
MAIN = ["main_qwen32.py", "--model", "demo", "--device", "cpu", "--max-tokens", "12"]


@pytest.fixture(scope="module")
def alone() -> str:
    """What one rank prints."""
    code, out, _ = run_program(*MAIN, "--tensor-parallel-size", "1")
    assert code == 0
    return out


def test_ranks_of_its_own_print_what_one_rank_prints(alone):
    code, out, _ = run_program(*MAIN)
    assert (code, out) == (0, alone)


def test_ipc_02_two_torchruns_at_once_print_what_one_rank_prints(alone):
    with program(*TORCHRUN, *MAIN) as first, program(*TORCHRUN, *MAIN) as second:
        for process in (first, second):
            out, _ = process.communicate(timeout=100)
            assert (process.returncode, out) == (0, alone)


def test_a_wrong_number_of_ranks_is_said_clearly():
    code, out, err = run_program(*TORCHRUN, *MAIN, "--tensor-parallel-size", "4")
    assert (code, out) == (1, "")
    message = "error: torchrun started 2 ranks, but tensor_parallel_size is 4; make them equal"
    lines = err.splitlines()
    assert message in lines
    assert "qwen_engine" not in err.replace("qwen_engine.errors", "")  # no stack of ours


@pytest.mark.parametrize("rank", [0, 1])
def test_shd_01_a_killed_rank_ends_all(rank):
    with program(*TORCHRUN, *MAIN[:-1], "1000", "--prompt", "x") as process:
        wait_until(lambda: "ready" in process.stderr.readline())
        ranks = ranks_of(process.pid)
        time.sleep(0.2)
        killed_at = time.monotonic()
        os.kill(ranks[rank], signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, ranks.values())), 5)
        print(f"kill of rank {rank} to the end of all ranks: {time.monotonic() - killed_at:.3f} s")
        out, err = process.communicate(timeout=20)
        print(f"kill of rank {rank} to the end of torchrun: {time.monotonic() - killed_at:.3f} s")
        assert (process.returncode, out) == (1, "")
        assert "Signal 9 (SIGKILL)" in err


def test_tpw_07_ranks_that_are_started_again_do_not_meet_the_old_ones(tmp_path, alone):
    """torchrun keeps its store when it restarts the ranks, with all that the first ones left in it."""
    body = """\
real = module.serve
def serve(*args, **options):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        module.channel.connect = lambda *args, **options: die("exit")
    real(*args, **options)
module.serve = serve"""
    fault = plant(tmp_path, "qwen_engine.engine.worker", body, anywhere=True)
    code, out, _ = run_program(*TORCHRUN, "--max-restarts", "1", *MAIN, path=[fault.folder])
    assert fault.death_time()
    assert (code, out) == (0, alone)
