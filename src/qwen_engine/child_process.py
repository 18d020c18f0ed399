"""Processes of this package that live no longer than the one that starts them: worker ranks, and the server's engine.

Such a process is a module run as `python -m`, which is told what to do by a dataclass, as a line of JSON on stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
from typing import Any, TypeVar

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def environment() -> dict[str, str]:
    """In which a Python process finds the modules that this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def start(module: str, spec: Any, *, pass_fd: int) -> subprocess.Popen[bytes]:
    """Starts a module that calls `begin`. It ends with the thread that calls this. Its stdin stays open."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        process_group=0,  # a terminal's Ctrl-C is for this process alone
        stdout=2,  # whatever a library prints belongs with the logs, not in the program's output
        pass_fds=(pass_fd,),
        env=environment(),
    )
    with contextlib.suppress(BrokenPipeError):  # one that has ended already says so itself
        process.stdin.write(json.dumps([os.getpid(), dataclasses.asdict(spec)]).encode() + b"\n")
        process.stdin.flush()
    return process


def begin(spec_class: type[T]) -> T:
    """What the process does first, before it imports anything that takes time; returns its spec.

    Ctrl-C is for the parent to handle. SIGUSR1 writes all stacks to stderr.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent_pid, fields = json.loads(sys.stdin.readline())
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before the signal was armed
    return spec_class(**fields)


def settle() -> None:
    """What exists now lasts as long as the process: the garbage collector, which would need a tenth of a second to look
    at all of it in the middle of a step, leaves it alone."""
    gc.collect()
    gc.freeze()
