"""Tensor parallel over two hosts: two network namespaces of this machine, joined by a cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from fault_tools import ERROR_LIMIT_S, ROOT, children, printed_by_one_rank, report, wait_until

ADDRESSES = ["10.77.0.1", "10.77.0.2"]
MAIN = ["--model", "demo", "--device", "cpu", "--max-tokens", "12"]
PROGRAM = """\
import sys, time
from qwen_engine import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, skip_tokenizer_init=True, max_num_seqs=4)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
print("idle", flush=True)
time.sleep(600)
"""
Start = Callable[..., subprocess.Popen[str]]


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces that see each other, and nothing else, under ADDRESSES."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    names = [f"qwen-{os.getpid()}-{index}" for index in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs the right to make network namespaces: {error.stderr.strip()}")
        for name, address in zip(names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def start(hosts) -> Iterator[Start]:
    """Starts a command on a host; all that is left of it at the end of the test is killed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as started:

        def end(process: subprocess.Popen[str]) -> None:
            for pid in [*children(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()

        def run(host: int, *command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                ["ip", "netns", "exec", hosts[host], *command],  # becomes the command
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.callback(end, process)
            return process

        yield run


def test_two_hosts_print_what_one_rank_prints(start, tmp_path):
    # The script as it is, but with this interpreter instead of one that its setup would install.
    script = shutil.copy(ROOT / "launch" / "multi_host", tmp_path)
    (tmp_path / "setup").write_text(f"set -euo pipefail\nPY={sys.executable}\n")
    processes = [start(host, "bash", script, str(host), "2", ADDRESSES[0], "1", *MAIN) for host in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [out for out, _ in outputs] == [printed_by_one_rank(*MAIN), ""]


@pytest.fixture
def idle_ranks(start, tmp_path, tiny_model) -> list[subprocess.Popen[str]]:
    """An engine with one rank on each host, started as torchrun would, that has done a step and waits."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
        variables = {**place, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29501}
        settings = [f"{name}={value}" for name, value in variables.items()]
        ranks.append(start(rank, "env", *settings, sys.executable, str(script), str(tiny_model)))
    wait_until(lambda: ranks[0].stdout.readline() == "idle\n")
    return ranks


def test_shd_01_a_rank_killed_on_the_other_host_is_noticed_and_named_by_the_idle_rank_0(idle_ranks):
    killed_at = time.monotonic()
    idle_ranks[1].kill()
    line = next(line for line in idle_ranks[0].stderr if line.startswith("rank "))  # torch has warnings of its own
    report("kill of rank 1 to the notice on the other host", killed_at)
    assert "rank 1 died (its process has ended, or its host cannot be reached)" in line
    assert idle_ranks[0].poll() is None


def test_shd_01_rank_0_killed_on_one_host_ends_the_idle_other(idle_ranks):
    killed_at = time.monotonic()
    idle_ranks[0].kill()
    _, err = idle_ranks[1].communicate(timeout=ERROR_LIMIT_S)
    report("kill of rank 0 to the end of rank 1 on the other host", killed_at)
    assert idle_ranks[1].returncode == 1
    assert "rank 0 has ended, or cannot be reached" in err
