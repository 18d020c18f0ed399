"""The entry point of a worker process: bound to rank 0's life before it imports anything that takes time.

Started by `worker_group`. The status link, on the descriptor `link_fd`, is open for as long as rank 0 lives; its end,
like the parent-death signal, ends this process at once.
"""

from __future__ import annotations

import logging
import os
import socket
import traceback
from dataclasses import dataclass
from typing import Any

from qwen_engine import child_process
from qwen_engine.engine.status_link import StatusLink
from qwen_engine.errors import QwenEngineError


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told at its start."""

    config: dict[str, Any]
    model_folder: str
    rank: int
    store_port: int
    link_fd: int
    log_level: int


def main() -> None:
    spec = child_process.begin(WorkerSpec)
    os.set_inheritable(spec.link_fd, False)
    link = StatusLink(socket.socket(fileno=spec.link_fd))
    logging.basicConfig(format=f"[rank {spec.rank}] %(message)s", level=logging.WARNING)
    logging.getLogger("qwen_engine").setLevel(spec.log_level)
    try:
        from qwen_engine.engine import worker  # torch: seconds

        worker.run(spec, link)
    except BaseException as error:
        if not isinstance(error, QwenEngineError):
            traceback.print_exc()
        link.leave(error)
        os._exit(1)  # at once: a collective that waits for dead peers would block a regular exit
    link.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
