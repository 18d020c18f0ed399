"""The other ranks of one engine, and the watch over them.

One thread starts the workers, so that their parent-death signal is tied to it, or lets those join that torchrun starts.
Then it looks after them until `close`: it notices at once when one ends, reads the reason it gave, and enforces the
deadline of a step. On the first fault it ends all of them, which also breaks every collective that waits for them, and
records `failure`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from qwen_engine import child_process
from qwen_engine.distributed.progress import Progress, who_is_behind
from qwen_engine.engine.rank import RankSetup
from qwen_engine.engine.status_link import ASK_POSITION, ASK_STACKS, LinkListener, RankLink
from qwen_engine.engine.worker_main import WorkerSpec
from qwen_engine.errors import EngineDeadError, summary

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_REASON_WAIT_S = 0.5  # how long the reason of a worker that ended may take to arrive
_EXIT_WAIT_S = 2.0  # for the process of a link that has ended to be gone
_STACKS_WAIT_S = 0.2  # for one rank to write its stacks
_ANSWER_WAIT_S = 2.0  # for every rank to say how far it has come; one that runs at all takes a millisecond
_BLAME_WAIT_S = 2.0  # a broken collective is noticed before the death that broke it


@dataclasses.dataclass(slots=True)
class _Worker:
    link: RankLink
    process: subprocess.Popen[bytes] | None
    """None when torchrun has started it."""


class WatchedStep(Protocol):
    """A step in flight. One that is done but not yet waited for is not late, whenever the caller comes for it."""

    deadline: float

    def is_done(self) -> bool: ...


class WorkerGroup:
    """Ranks 1 to N-1 of an engine: child processes of this one, or processes that torchrun starts.

    store_port: of the store on this host where the workers that this group starts meet rank 0.
    host: instead, this machine's address where the ranks that torchrun starts can join, at `link_address`.
    """

    def __init__(self, setup: RankSetup, *, store_port: int | None = None, host: str | None = None) -> None:
        self.failure: str | None = None
        """Why the engine cannot go on; None while all is well."""
        self.on_failure: Callable[[], None] | None = None
        """Called once, in the thread that watches: what runs the steps may be stuck behind a rank that is gone."""
        self.announces = False
        """Whether a failure is logged: once the engine runs, there may be no call to raise it for a long time."""
        self.in_flight: deque[WatchedStep] = deque()
        """Steps whose deadlines are watched, oldest first; the executor's to change."""
        self.progress = Progress()
        """Of rank 0."""
        self._setup = setup
        self._store_port = store_port
        self._listener = None if host is None else LinkListener(host, setup.config.tensor_parallel_size)
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._close_timeout_s = 0.0
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
    def link_address(self) -> str:
        """For `StatusLink.connect`. Holds a secret."""
        assert self._listener is not None
        return self._listener.address

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that this group started, in rank order."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

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
        """Waits for workers that were told to stop, ends the rest. Nothing of the group is left afterwards."""
        self._close_timeout_s = timeout_s
        self._closing.set()
        self._started.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._end_all()
        self._collect()
        for worker in self._workers:
            worker.link.close()
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
            self._take(_POLL_S)
            if self._dead():
                self._fail(self._reason())
            if any(time.monotonic() > step.deadline and not step.is_done() for step in tuple(self.in_flight)):
                self._fail(self._why_it_hangs())
        if self.failure is None:  # the workers that were told to stop end before this thread, which would kill them
            self._take_until(self._all_have_ended, self._close_timeout_s)
        if self._listener is not None:
            self._listener.close()

    def _start(self, rank: int, store_port: int) -> _Worker:
        own, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_error:
            on_error.callback(own.close)
            spec = WorkerSpec(
                config=dataclasses.asdict(self._setup.config),
                model_folder=str(self._setup.model_folder),
                rank=rank,
                store_port=store_port,
                link_fd=theirs.fileno(),
                log_level=logging.getLogger("qwen_engine").getEffectiveLevel(),
            )
            process = child_process.start("qwen_engine.engine.worker_main", spec, pass_fd=theirs.fileno())
            on_error.pop_all()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return _Worker(RankLink(rank, own), process)

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [worker.process for worker in self._workers if worker.process is not None]

    def _take(self, timeout_s: float) -> None:
        """Lets in who joins and takes what the ranks say, waiting for the first of it."""
        poller = select.poll()  # unlike select, it takes descriptors above 1023
        for worker in self._workers:
            if not worker.link.has_ended:
                poller.register(worker.link, select.POLLIN)
        for fd in self._listener.filenos if self._listener is not None else []:
            poller.register(fd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        if self._listener is not None:
            self._workers += [_Worker(link, None) for link in self._listener.take()]
        for worker in self._workers:
            worker.link.take()

    def _take_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and (left := deadline - time.monotonic()) > 0:
            self._take(min(left, _POLL_S))

    def _all_have_ended(self) -> bool:
        return all(w.link.has_ended or (w.process is None and w.link.has_left) for w in self._workers)

    def _dead(self) -> list[_Worker]:
        """Workers that have ended, or are about to, without having been told to."""
        return [worker for worker in self._workers if not worker.link.is_alive]

    def _reason(self) -> str:
        """Why the engine cannot go on, after some worker has ended. One whose collective broke is another's victim."""

        def culprits() -> list[_Worker]:
            return [worker for worker in self._dead() if not (worker.link.reason or "").startswith("RuntimeError")]

        self._take_until(lambda: bool(culprits()), _REASON_WAIT_S)
        worker = (culprits() or self._dead())[0]
        return f"rank {worker.link.rank} died ({worker.link.reason or _end_of(worker)})"

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self._end_all()  # first: whoever sees the failure finds no worker that goes on
            self.failure = reason
        if self.on_failure is not None:
            self.on_failure()
        if self.announces and not self._closing.is_set():
            logger.error("%s", reason)
        self._collect()

    def _end_all(self) -> None:
        """Does not wait: a process that the kernel holds on to may take a while to go."""
        for process in self._processes():
            if process.poll() is None:
                process.kill()
        for worker in self._workers:
            worker.link.cut()

    def _collect(self) -> None:
        for process in self._processes():
            process.wait()

    def _why_it_hangs(self) -> str:
        """Says what is known of a step that has passed its deadline, and writes every rank's stacks."""
        for worker in self._workers:
            worker.link.ask(ASK_POSITION)
        self._take_until(lambda: all(worker.link.position for worker in self._workers), _ANSWER_WAIT_S)
        positions = {0: self.progress.position}
        positions |= {worker.link.rank: worker.link.position for worker in self._workers}
        self._dump_stacks()
        timeout_s = self._setup.config.step_timeout_s
        behind = who_is_behind(positions)
        return f"a step took longer than step_timeout_s = {timeout_s:g} s: {behind}; the stacks are in the log"

    def _dump_stacks(self) -> None:
        for worker in self._workers:
            logger.error("stacks of rank %d:", worker.link.rank)
            if worker.process is None:
                worker.link.ask(ASK_STACKS)  # they are in the log of its host
            else:
                worker.process.send_signal(signal.SIGUSR1)
            time.sleep(_STACKS_WAIT_S)
        logger.error("stacks of rank 0:")
        with contextlib.suppress(OSError, ValueError):  # stderr may not be a real file
            faulthandler.dump_traceback(all_threads=True)


def _end_of(worker: _Worker) -> str:
    """How a worker ended that gave no reason."""
    if worker.process is None:
        return "its process has ended, or its host cannot be reached"
    try:
        code = worker.process.wait(_EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        return "it has closed its link"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
