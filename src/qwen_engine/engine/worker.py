"""A worker rank: loads its shard, then executes the plans that rank 0 publishes until it is told to stop.

Started by `worker_group` as `python -m qwen_engine.engine.worker`, with a `WorkerSpec` as one line of JSON on stdin.
Stdin stays open for as long as rank 0 lives; its end, like the parent-death signal, ends this process at once.
Errors go back as one line of JSON on the descriptor `status_fd`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.distributed.tp_group import LOOPBACK
from qwen_engine.distributed.tp_group import connect as connect_ranks
from qwen_engine.engine import channel
from qwen_engine.engine.rank import RankSetup
from qwen_engine.errors import QwenEngineError
from qwen_engine.scheduling.plan_codec import decode_plan

STOP = b""
"""The message that ends the workers; no encoded plan is empty."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told at its start."""

    config: dict[str, Any]
    model_folder: str
    rank: int
    store_port: int
    status_fd: int
    parent_pid: int
    log_level: int


def serve(setup: RankSetup, store: dist.Store, *, rank: int, host: str = LOOPBACK) -> None:
    """Joins the group, loads, and executes plans until STOP. Raises whatever goes wrong.

    host: this machine's address for sockets between ranks.
    """
    size = setup.config.tensor_parallel_size
    store.set(f"started/{rank}", "1")
    tp = connect_ranks(
        store, rank=rank, size=size, device=setup.device, timeout_s=2 * setup.config.step_timeout_s, host=host
    )
    runner = setup.load_runner(tp)
    store.set(f"kv_blocks/{rank}", str(setup.num_kv_blocks(runner)))
    subscriber = channel.connect(store.get("channel").decode(), index=rank - 1)
    runner.allocate_kv_cache(int(store.get("num_kv_blocks")))
    store.set(f"ready/{rank}", "1")
    try:
        while (message := subscriber.receive()) != STOP:
            runner.execute(decode_plan(message))
    finally:
        subscriber.close()


def main() -> None:
    # Ctrl-C reaches every process of the terminal; what it means is for rank 0 to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    spec = WorkerSpec(**json.loads(sys.stdin.readline()))
    if os.getppid() != spec.parent_pid:
        os._exit(1)  # the parent died before the signal was armed
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    logging.basicConfig(format=f"[rank {spec.rank}] %(message)s", level=logging.WARNING)
    logging.getLogger("qwen_engine").setLevel(spec.log_level)
    try:
        folder = Path(spec.model_folder)
        setup = RankSetup.resolve(
            EngineConfig(**spec.config), folder, ModelConfig.from_folder(folder), local_rank=spec.rank
        )
        store = dist.TCPStore(LOOPBACK, spec.store_port, setup.config.tensor_parallel_size, is_master=False)
        serve(setup, store, rank=spec.rank)
    except BaseException as error:
        if not isinstance(error, QwenEngineError):
            traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())
        os.write(spec.status_fd, json.dumps({"error": message[:2000]}).encode() + b"\n")
        os._exit(1)  # at once: a collective that waits for dead peers would block a regular exit
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    os._exit(0)


def spec_line(spec: WorkerSpec) -> bytes:
    """The line `main` reads."""
    return json.dumps(dataclasses.asdict(spec)).encode() + b"\n"


def _exit_with_parent() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
