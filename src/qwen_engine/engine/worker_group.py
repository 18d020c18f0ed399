"""The worker processes of one engine, and the watch over them.

One thread starts the workers, so that their parent-death signal is tied to it, and then looks after them until `close`:
it notices within a fraction of a second when one ends, reads the reason it gave, and enforces the deadline of a step.
On the first fault it kills all workers, which also breaks every collective that waits for them, and records `failure`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from qwen_engine.engine.rank import RankSetup
from qwen_engine.engine.worker_main import WorkerSpec, spec_line
from qwen_engine.errors import EngineDeadError, summary

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_REASON_WAIT_S = 0.5  # how long the reason of a worker that ended may take to arrive
_STACKS_WAIT_S = 0.2  # for one rank to write its stacks
_BLAME_WAIT_S = 1.0  # a broken collective is noticed before the death that broke it


@dataclasses.dataclass(slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    status_fd: int


class WatchedStep(Protocol):
    """A step in flight. One that is done but not yet waited for is not late, whenever the caller comes for it."""

    deadline: float

    def is_done(self) -> bool: ...


class WorkerGroup:
    """Ranks 1 to N-1 of an engine, as child processes of this one.

    store_port: of the store on this host where the ranks meet; None when somebody else (torchrun) starts the ranks and
    looks after them, so that only the deadline of a step is left to watch here.
    """

    def __init__(self, setup: RankSetup, *, store_port: int | None) -> None:
        self.failure: str | None = None
        """Why the engine cannot go on; None while all is well."""
        self.announces = False
        """Whether a failure is logged: once the engine runs, there may be no call to raise it for a long time."""
        self.in_flight: deque[WatchedStep] = deque()
        """Steps whose deadlines are watched, oldest first; the executor's to change."""
        self._setup = setup
        self._store_port = store_port
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qwen-engine-workers", daemon=True)
        self._thread.start()
        try:
            self._started.wait()
            self.check()
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [worker.process.pid for worker in self._workers]

    def check(self) -> None:
        """Raises EngineDeadError once a worker has failed."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits until `condition` holds. Raises EngineDeadError when a worker fails first or time runs out."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                self._fail(f"{what} took longer than {timeout_s:.0f} s")
            time.sleep(0.005)

    def fail_with(self, error: BaseException) -> str:
        """This rank's step broke off: ends the engine and returns why. A worker that died is the likelier reason."""
        if isinstance(error, RuntimeError):
            deadline = time.monotonic() + _BLAME_WAIT_S
            while self.failure is None and time.monotonic() < deadline:
                time.sleep(0.01)
        is_interrupt = isinstance(error, KeyboardInterrupt)
        self._fail("rank 0 was interrupted" if is_interrupt else f"rank 0 failed ({summary(error)})")
        assert self.failure is not None
        return self.failure

    def close(self, timeout_s: float = 5.0) -> None:
        """Waits for workers that were told to stop, kills the rest. Nothing of the group is left afterwards."""
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._started.wait()
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._collect()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                os.close(worker.status_fd)
            with contextlib.suppress(OSError):
                worker.process.stdin.close()
        self._workers.clear()

    def _run(self) -> None:
        try:
            if self._store_port is not None:
                for rank in range(1, self._setup.config.tensor_parallel_size):
                    self._workers.append(self._start(rank, self._store_port))
        except Exception as error:
            self._fail(f"worker process could not be started ({summary(error)})")
        self._started.set()
        while not self._closing.is_set() and self.failure is None:
            readable = _readable([worker.status_fd for worker in self._workers], _POLL_S)
            ended = [w for w in self._workers if w.status_fd in readable or w.process.poll() is not None]
            if ended:
                self._fail_of(ended)
            if any(time.monotonic() > step.deadline and not step.is_done() for step in tuple(self.in_flight)):
                self._dump_stacks()
                timeout_s = self._setup.config.step_timeout_s
                self._fail(f"a step took longer than step_timeout_s = {timeout_s:g} s; the stacks are in the log")

    def _start(self, rank: int, store_port: int) -> _Worker:
        read_fd, write_fd = os.pipe()
        spec = WorkerSpec(
            config=dataclasses.asdict(self._setup.config),
            model_folder=str(self._setup.model_folder),
            rank=rank,
            store_port=store_port,
            status_fd=write_fd,
            parent_pid=os.getpid(),
            log_level=logging.getLogger("qwen_engine").getEffectiveLevel(),
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "qwen_engine.engine.worker_main"],
            stdin=subprocess.PIPE,
            process_group=0,  # a terminal's Ctrl-C is for rank 0 alone
            stdout=2,  # whatever a library prints belongs with the logs, not in the program's output
            pass_fds=(write_fd,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(write_fd)
        process.stdin.write(spec_line(spec))
        process.stdin.flush()
        return _Worker(rank, process, read_fd)

    def _fail_of(self, ended: list[_Worker]) -> None:
        """These workers have ended or are about to. One whose collective broke is the victim of another."""
        reasons = [(worker.rank, self._reason(worker)) for worker in ended]
        rank, reason = next((pair for pair in reasons if not pair[1].startswith("RuntimeError")), reasons[0])
        self._fail(f"rank {rank} died ({reason})")

    def _reason(self, worker: _Worker) -> str:
        """Why the worker has ended."""
        data = b""
        deadline = time.monotonic() + _REASON_WAIT_S
        while not data.endswith(b"\n") and time.monotonic() < deadline:
            readable = _readable([worker.status_fd], max(0.0, deadline - time.monotonic()))
            part = os.read(worker.status_fd, 65536) if readable else b""
            data += part
            if not part:
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_REASON_WAIT_S)
        if data.endswith(b"\n"):
            return json.loads(data)["error"]
        code = worker.process.returncode
        return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self._kill()  # first: whoever sees the failure finds no worker that goes on
            self.failure = reason
        if self.announces and not self._closing.is_set():
            logger.error("%s", reason)
        self._collect()

    def _kill(self) -> None:
        """Does not wait: a process that the kernel holds on to may take a while to go."""
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()

    def _collect(self) -> None:
        for worker in self._workers:
            worker.process.wait()

    def _dump_stacks(self) -> None:
        for worker in self._workers:
            logger.error("stacks of rank %d:", worker.rank)
            worker.process.send_signal(signal.SIGUSR1)
            time.sleep(_STACKS_WAIT_S)
        logger.error("stacks of rank 0:")
        with contextlib.suppress(OSError, ValueError):  # stderr may not be a real file
            faulthandler.dump_traceback(all_threads=True)


def _readable(fds: list[int], timeout_s: float) -> set[int]:
    """Those of the descriptors that have data or have ended, as soon as there is one."""
    poller = select.poll()  # unlike select, it takes descriptors above 1023
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(timeout_s * 1000)}
