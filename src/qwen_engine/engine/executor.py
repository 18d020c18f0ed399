"""Rank 0's hands: launches a plan on its own shard and on every worker rank, and waits for what it brings.

Steps run in the order they are launched. With one rank there are no processes, no sockets and no messages. The engine
core is the only caller.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from qwen_engine.distributed.tp_group import LOOPBACK, TPGroup, open_store
from qwen_engine.distributed.tp_group import connect as connect_ranks
from qwen_engine.engine.channel import open_publisher
from qwen_engine.engine.model_runner import ModelRunner, StepOutput, StepResult
from qwen_engine.engine.rank import RankSetup
from qwen_engine.engine.status_link import LINK_KEY
from qwen_engine.engine.torchrun import TorchrunRank
from qwen_engine.engine.worker import LOAD_TIMEOUT_S, STOP
from qwen_engine.engine.worker_group import WorkerGroup
from qwen_engine.errors import EngineDeadError, QwenEngineError
from qwen_engine.layers.sampler import TokenMasks
from qwen_engine.scheduling.plan_codec import encode_plan
from qwen_engine.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)
T = TypeVar("T")

START_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 120.0
STEPS_IN_FLIGHT = {"cpu": 1, "cuda": 2}
"""By device: most steps launched before the first is waited for. A CPU has computed a step when its launch returns, so
that running ahead would only delay its tokens."""


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that has been given to the ranks. `result` is None until this rank has launched its share."""

    deadline: float  # on the clock of time.monotonic
    result: StepResult | None = None

    def is_done(self) -> bool:
        return self.result is not None and self.result.is_done()


class _DeferredInterrupt:
    """Holds back the first Ctrl-C while ranks are in a step, so that it cannot tear them apart.

    The second one goes through at once, for a step that hangs; more are ignored while the first two are seen to.
    Acts only where Ctrl-C would raise KeyboardInterrupt: in the main thread, and unless the program handles it itself.
    """

    def __init__(self) -> None:
        self._count = 0
        self._acts = False

    def __enter__(self) -> _DeferredInterrupt:
        is_main = threading.current_thread() is threading.main_thread()
        self._acts = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._acts:
            signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._acts:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def deliver(self) -> None:
        """Raises what was held back."""
        if self._count:
            raise KeyboardInterrupt

    def _take(self, *_: object) -> None:
        self._count += 1
        if self._count == 2:
            raise KeyboardInterrupt


class Executor:
    """All ranks of an engine, loaded and with their KV caches allocated. `num_kv_blocks` is the minimum over ranks."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self.max_steps_in_flight = STEPS_IN_FLIGHT[setup.device.type]
        self._last: LaunchedStep | None = None
        self.runner: ModelRunner | None = None
        self._workers: WorkerGroup | None = None
        self._publisher = None
        self._store: dist.Store | None = None
        self._store_server: dist.TCPStore | None = None
        self._compiling: threading.Thread | None = None
        self.phases_s: dict[str, float] = {}
        """Seconds of each part of the start, in order."""
        self._tp = TPGroup()
        try:
            self._compiling = setup.begin_compiling()
            if setup.config.tensor_parallel_size > 1:
                with self._phase("ranks"):
                    self._start_ranks()
            with self._phase("load"):
                check = None if self._workers is None else self._workers.check
                self.runner = setup.load_runner(self._tp, check)
            with self._phase("compile"):
                compile_kernels = functools.partial(setup.compile_kernels, self.runner, self._compiling)
                self._watched(compile_kernels, LOAD_TIMEOUT_S, "compiling the kernels")
            with self._phase("profile"):
                self.num_kv_blocks = self._fewest_kv_blocks()
            with self._phase("KV cache"):
                self.runner.allocate_kv_cache(self.num_kv_blocks)
            with self._phase("graphs"):
                self._watched(self.runner.capture_graphs, LOAD_TIMEOUT_S, "capturing graphs")
                if self._workers is not None:
                    self._wait_for_keys("ready", LOAD_TIMEOUT_S)
                    self._workers.announces = True
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ... that this engine started."""
        return [] if self._workers is None else self._workers.pids

    def check(self) -> None:
        """Raises EngineDeadError once a worker rank has failed; for callers with no step to run."""
        if self._workers is not None:
            self._workers.check()

    def launch(self, plan: StepPlan, masks: TokenMasks | None = None) -> LaunchedStep:
        """Starts a step on all ranks; `masks` are for this one, which samples. EngineDeadError if a rank has failed."""
        launched = LaunchedStep(time.monotonic() + self._setup.config.step_timeout_s)
        if self._workers is None:
            launched.result = self.runner.execute(plan, masks)
            return launched
        self._workers.check()
        with self._all_ranks_in_step(self._workers):
            self._last = launched
            self._workers.in_flight.append(launched)
            self._workers.progress.begin_step()
            self._publisher.publish(encode_plan(plan))
            launched.result = self.runner.execute(plan, masks)
        return launched

    def wait(self, launched: LaunchedStep) -> StepOutput:
        """What a step brought; the oldest comes first. EngineDeadError if a rank fails or it does not end in time."""
        assert launched.result is not None
        if self._workers is None:
            return launched.result.wait()
        with self._all_ranks_in_step(self._workers):
            output = launched.result.wait(self._workers.check)
            self._workers.in_flight.remove(launched)
        return output

    def forget_steps(self) -> None:
        """Nobody will wait for the steps in flight."""
        if self._workers is not None:
            self._workers.in_flight.clear()

    @contextlib.contextmanager
    def _all_ranks_in_step(self, workers: WorkerGroup) -> Iterator[None]:
        """Ctrl-C waits for the end of the block; anything else that breaks it off ends the engine with its reason."""
        with _DeferredInterrupt() as interrupt:
            try:
                yield
            except BaseException as error:
                # Whatever it was, the ranks no longer stand at the same step.
                reason = workers.fail_with(error)
                self.runner.release_graphs()
                self._tp.abort()
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise EngineDeadError(reason) from error
        interrupt.deliver()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stops the workers and frees this rank's memory; safe to call twice."""
        if self._compiling is not None:
            self._compiling.join()  # it holds memory of the device; over long ago, unless the start has failed
        deadline = time.monotonic() + timeout_s
        while self._last is not None and not self._last.is_done() and time.monotonic() < deadline:
            if self._workers is None or self._workers.failure is not None:
                break
            time.sleep(0.001)  # nobody waited for this step; ranks inside a collective cannot stop in an orderly way
        self._last = None
        if self.runner is not None:
            self.runner.release_graphs()
            self.runner = None
        if self._workers is not None:
            if self._publisher is not None and self._workers.failure is None and timeout_s > 0:
                with contextlib.suppress(QwenEngineError, TimeoutError):  # a rank that is gone needs no telling
                    self._publisher.publish(STOP)
            self._workers.close(timeout_s)
            self._workers = None
            self._tp.abort()  # an orderly end would wait for ranks that are gone
            self._tp.close()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._tp = TPGroup()
        self._store = self._store_server = None
        if self._setup.device.type == "cuda":
            torch.cuda.empty_cache()

    def _start_ranks(self) -> None:
        """Starts the other ranks, or finds them, and joins them to a group."""
        setup = self._setup
        host = self._meet_ranks(TorchrunRank.current())
        connect = functools.partial(
            connect_ranks,
            self._store,
            rank=0,
            size=setup.config.tensor_parallel_size,
            device=setup.device,
            timeout_s=2 * setup.config.step_timeout_s,  # the watch over the step comes first
            progress=self._workers.progress,
            check=self._workers.check,
            host=host,
        )
        self._tp = self._watched(connect, CONNECT_TIMEOUT_S, "connecting all ranks")
        share = functools.partial(setup.with_peer_memory, self._tp, self._store)
        self._tp = self._watched(share, CONNECT_TIMEOUT_S, "opening the GPUs' memory to one another")
        if self._tp.peers is not None:
            self._workers.on_failure = self._tp.peers.abort

    def _fewest_kv_blocks(self) -> int:
        """What the rank with the least memory has room for."""
        measure = functools.partial(self._setup.num_kv_blocks, self.runner)
        blocks = self._watched(measure, LOAD_TIMEOUT_S, "measuring the memory")
        if self._workers is not None:
            self._wait_for_keys("kv_blocks", LOAD_TIMEOUT_S)
            ranks = range(1, self._setup.config.tensor_parallel_size)
            blocks = min(blocks, *(int(self._store.get(f"kv_blocks/{rank}")) for rank in ranks))
            self._store.set("num_kv_blocks", str(blocks))
        return blocks

    def _meet_ranks(self, ranks: TorchrunRank | None) -> str:
        """Starts the workers, or finds torchrun's, and opens the channel to them: this host's address for both."""
        setup = self._setup
        size = setup.config.tensor_parallel_size
        if ranks is None:
            self._store_server = open_store(size)
            port = self._store_server.port
            self._store = dist.TCPStore(LOOPBACK, port, size, is_master=False)
            self._workers = WorkerGroup(setup, store_port=port)
        else:
            self._store = ranks.open_store()
            self._workers = WorkerGroup(setup, host=ranks.host)
            self._store.set(LINK_KEY, self._workers.link_address)
        host = LOOPBACK if ranks is None else ranks.host
        kind = "ring" if host == LOOPBACK else "zmq"
        self._publisher = open_publisher(kind, num_subscribers=size - 1, check=self._workers.check, interface=host)
        self._store.set("channel", self._publisher.address)
        # Ranks of other hosts may have to download the model first.
        self._wait_for_keys("started", START_TIMEOUT_S if ranks is None else LOAD_TIMEOUT_S)
        self._store.set("all started", "1")
        return host

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases_s[name] = time.perf_counter() - start

    def _wait_for_keys(self, name: str, timeout_s: float) -> None:
        """Waits until every worker has set `name/rank` in the store."""
        keys = [f"{name}/{rank}" for rank in range(1, self._setup.config.tensor_parallel_size)]
        self._workers.wait_for(lambda: self._store.check(keys), timeout_s, f"waiting for all ranks to be {name}")

    def _watched(self, call: Callable[[], T], timeout_s: float, what: str) -> T:
        """Runs a call that may wait for other ranks inside C++; gives up on it when a worker fails or time runs out.

        What it waits for is gone then, so that its thread ends too and lets go what `call` refers to.
        """
        if self._workers is None:
            return call()
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:  # handed to the caller below
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._workers.wait_for(lambda: not thread.is_alive(), timeout_s, what)
        if errors:
            if isinstance(errors[0], RuntimeError):
                raise EngineDeadError(self._workers.fail_with(errors[0])) from errors[0]
            raise errors[0]
        return results[0]
