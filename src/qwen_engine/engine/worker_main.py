"""The entry point of a worker process: bound to rank 0's life before it imports anything that takes time.

Started by `worker_group` as `python -m qwen_engine.engine.worker_main`, with a `WorkerSpec` as one line of JSON on
stdin. Stdin stays open for as long as rank 0 lives; its end, like the parent-death signal, ends this process at once.
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
from typing import Any

from qwen_engine.errors import QwenEngineError, summary

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


def main() -> None:
    # What an interrupt means is for rank 0 to decide.
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
        from qwen_engine.engine import worker  # torch: seconds

        worker.run(spec)
    except BaseException as error:
        if not isinstance(error, QwenEngineError):
            traceback.print_exc()
        os.write(spec.status_fd, json.dumps({"error": summary(error)}).encode() + b"\n")
        os._exit(1)  # at once: a collective that waits for dead peers would block a regular exit
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
