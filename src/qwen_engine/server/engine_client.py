"""The engine as the API process sees it: a process of its own that takes requests and sends tokens.

Owns the child process, the ZMQ pair socket to it, and every request in flight (`generation`). Text is made in this
process, from the tokens, with the code that `LLM` uses.

The socket is a file in a private directory only until the engine has connected; then the directory is removed, so that
nothing is left however the processes end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from qwen_engine import child_process
from qwen_engine.config import EngineConfig
from qwen_engine.errors import ConfigError, EngineDeadError, RequestError, summary
from qwen_engine.frontend.output_processor import RequestState
from qwen_engine.request import RequestSpec
from qwen_engine.server import wire
from qwen_engine.server.generation import Generation
from qwen_engine.server.metrics import Metrics
from qwen_engine.tokenization.reasoning import ReasoningSplitter
from qwen_engine.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SILENCE_LIMIT_S = 5.0
"""The engine is unhealthy when its heart, which beats twice a second, has been silent for so long."""
HANG_LIMIT_S = 30.0
"""After so long a silence it is killed, so that its requests fail instead of waiting for ever."""
_WATCH_PERIOD_S = 0.5
_END_WAIT_S = 5.0  # for a process that was told to stop
_LAST_WORDS_S = 1.0  # for the reason of a process that has ended to be read, while requests wait for their error
_FIRST_WORDS_S = 5.0  # the same before it was ready, when nothing waits
_SOCKET_NAME = "engine"
_MAX_PATH_BYTES = 100  # a Unix socket's address has room for 107


class EngineStatus(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


class _EngineProcess:
    """One life of the engine: the process, its socket and its heartbeat."""

    def __init__(self, config: EngineConfig, model_folder: Path, log_format: str) -> None:
        """Raises OSError or ZMQError, and leaves nothing, where the machine has no room for it."""
        self._last_beat = time.monotonic()
        self.readable = asyncio.Event()
        """There may be messages; set by the socket's descriptor, which tells of news once, and not again."""
        self.last_words: str | None = None
        """Why it ended, as it said itself."""
        self.refused_config = False
        """It never ran, because of its options; `last_words` says which."""
        with contextlib.ExitStack() as undo:
            self.directory: Path | None = _private_directory()
            undo.callback(self.remove_directory)
            self.context = zmq.Context()
            undo.callback(self.context.destroy)
            self.socket = self.context.socket(zmq.PAIR)
            self.socket.set_hwm(0)
            self.socket.linger = 0
            address = f"ipc://{self.directory / _SOCKET_NAME}"
            self.socket.bind(address)
            self.beat_fd, write_fd = os.pipe()
            undo.callback(os.close, self.beat_fd)
            os.set_blocking(self.beat_fd, False)
            spec = wire.EngineProcessSpec(
                config=dataclasses.asdict(config),
                model_folder=str(model_folder),
                address=address,
                beat_fd=write_fd,
                log_level=logging.getLogger("qwen_engine").getEffectiveLevel(),
                log_format=log_format,
            )
            try:
                self.process = child_process.start("qwen_engine.server.engine_process", spec, pass_fd=write_fd)
            finally:
                os.close(write_fd)
            undo.pop_all()

    def beats(self) -> bool:
        """Reads the heartbeat; False once the process has ended."""
        with contextlib.suppress(BlockingIOError):
            if not os.read(self.beat_fd, 4096):
                return False
        self._last_beat = time.monotonic()
        return True

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._last_beat

    async def exit_code(self, timeout_s: float) -> int | None:
        """What the process has ended with; None if it does not within that time."""
        try:
            return await asyncio.to_thread(self.process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def remove_directory(self) -> None:
        if self.directory is not None:
            # Not rmtree, which needs a file descriptor; there may be none.
            with contextlib.suppress(OSError):
                (self.directory / _SOCKET_NAME).unlink(missing_ok=True)
                self.directory.rmdir()
            self.directory = None

    def end(self, timeout_s: float) -> int:
        """Waits for the process, kills it after that; frees everything. Returns its exit code."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        code = self.process.wait()
        os.close(self.beat_fd)
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.socket.close()
        self.context.term()
        self.remove_directory()
        return code


class EngineClient:
    """Starts the engine's process, starts it anew up to `max_restarts` times when it dies, and feeds it.

    on_death: called when the engine has died for good, with the reason. All methods are for the event loop's thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_folder: Path,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        max_restarts: int = 0,
        log_format: str = "text",
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._config = config
        self._model_folder = model_folder
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._restarts_left = max_restarts
        self._log_format = log_format
        self._on_death = on_death
        self._engine: _EngineProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self._live: dict[str, tuple[Generation, RequestState]] = {}  # by sequence id
        self.status = EngineStatus.STARTING
        self.facts: wire.EngineFacts | None = None
        """Known once the engine has been ready."""
        self.stats = wire.EngineStats()

    async def start(self) -> None:
        """Returns when the engine is ready. Raises ConfigError for options it refuses, EngineDeadError if it dies."""
        ready = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._run(ready))
        await asyncio.wait({ready, self._life}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise EngineDeadError("the engine was closed while it started")
        ready.result()

    async def close(self) -> None:
        """Ends the engine, and every request with an error."""
        was_ready = self.status is EngineStatus.READY
        self.status = EngineStatus.CLOSED
        self._fail_all(EngineDeadError("the server is shutting down"))
        if was_ready:
            self._send("shutdown")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_WAIT_S):
                    while self._engine is not None and self._engine.process.poll() is None:
                        await asyncio.sleep(0.02)
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)

    @property
    def is_healthy(self) -> bool:
        """The engine is ready and its heart beats."""
        engine = self._engine
        if self.status is not EngineStatus.READY or engine is None:
            return False
        return engine.silence_s < SILENCE_LIMIT_S

    @property
    def num_sequences(self) -> int:
        """In flight."""
        return len(self._live)

    def submit(
        self,
        specs: Sequence[RequestSpec],
        *,
        streams: bool,
        arrival_time: float | None = None,
        new_splitter: Callable[[RequestSpec], ReasoningSplitter] | None = None,
    ) -> Generation:
        """Sends requests to the engine, which takes all of them or none. Refusals come through the Generation.

        streams: deltas are wanted, not just the whole at the end. new_splitter: of `RequestState`.
        """
        if self.status is not EngineStatus.READY:
            raise EngineDeadError(f"the engine is {self.status.value}")
        states = [
            RequestState(spec, self._tokenizer, arrival_time=arrival_time, new_splitter=new_splitter) for spec in specs
        ]
        generation = Generation(states, streams=streams, client=self, metrics=self._metrics)
        for state in states:
            for sequence_id in state.spec.sequence_ids:
                self._live[sequence_id] = (generation, state)
        self._send("add", [wire.encode_spec(spec) for spec in specs])
        return generation

    def reset_prefix_cache(self) -> None:
        self._send("reset_prefix_cache")

    def abort_all(self) -> None:
        """Ends everything in flight with finish_reason "abort"."""
        for generation in {id(generation): generation for generation, _ in self._live.values()}.values():
            generation.abort()

    def abort_sequences(self, generation: Generation) -> None:
        """Tells the engine to drop those sequences of it that still run."""
        ids = [sequence_id for sequence_id in generation.sequence_ids if sequence_id in self._live]
        if ids:
            self._send("abort", ids)

    def stop_sequence(self, sequence_id: str, _: str, stop_string: int | str | None) -> None:
        """Tells the engine that a sequence's text hit a stop string."""
        self._send("stop", sequence_id, stop_string)

    def forget(self, generation: Generation) -> None:
        for sequence_id in generation.sequence_ids:
            self._live.pop(sequence_id, None)

    def _send(self, *message: object) -> None:
        engine = self._engine
        if engine is not None:
            with contextlib.suppress(zmq.Again):  # without a high-water mark there is room unless nobody is there
                engine.socket.send(wire.pack(*message), zmq.NOBLOCK)
            engine.readable.set()  # sending may have taken the descriptor's news

    async def _run(self, ready: asyncio.Future[None]) -> None:
        """Life after life of the engine, until one may not be followed by another."""
        while True:
            refused_config = False
            try:
                self._engine = engine = _EngineProcess(self._config, self._model_folder, self._log_format)
                reason = await self._live_once(engine, ready)
                refused_config = engine.refused_config
            except Exception as error:  # no file descriptors are left, for instance
                logger.exception("the engine's process cannot be looked after")
                reason = f"its process could not be started or read ({summary(error)})"
            finally:
                await self._bury()
            if self.status is EngineStatus.CLOSED:
                return
            logger.error("the engine has ended: %s", reason)
            self.status = EngineStatus.DEAD
            self.stats = wire.EngineStats()
            self._fail_all(EngineDeadError(reason))
            if not ready.done():
                not_started = EngineDeadError(f"the engine did not start: {reason}")
                ready.set_exception(ConfigError(reason) if refused_config else not_started)
                return
            if not self._restarts_left:
                self._on_death(reason)
                return
            self._restarts_left -= 1
            logger.warning("starting the engine anew; %d restarts are left after this one", self._restarts_left)
            self.status = EngineStatus.STARTING

    async def _live_once(self, engine: _EngineProcess, ready: asyncio.Future[None]) -> str:
        """Handles what the engine sends until its process ends; returns why it did."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def beat() -> None:
            if not engine.beats():
                loop.remove_reader(engine.beat_fd)
                if self.status is EngineStatus.READY:
                    self.status = EngineStatus.DEAD  # though it may take a while to free a GPU and be gone
                ended.set()

        loop.add_reader(engine.beat_fd, beat)
        loop.add_reader(engine.socket.getsockopt(zmq.FD), engine.readable.set)
        reader = asyncio.create_task(self._read(engine, ready))
        try:
            # Silence counts in turns of this loop: a pause of both processes (a frozen container) is no hang.
            num_silent_turns = 0
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _WATCH_PERIOD_S)
                num_silent_turns = num_silent_turns + 1 if engine.silence_s > 2 * _WATCH_PERIOD_S else 0
                if ready.done() and num_silent_turns * _WATCH_PERIOD_S > HANG_LIMIT_S:
                    engine.last_words = f"it gave no sign of life for {HANG_LIMIT_S:g} s"
                    engine.process.kill()
            code = await engine.exit_code(_END_WAIT_S)
            if code is None or code > 0:  # it has said why, unless it could not
                await asyncio.wait([reader], timeout=_LAST_WORDS_S if ready.done() else _FIRST_WORDS_S)
            if engine.last_words is not None:
                return engine.last_words
            if code is None:
                return f"its heart has stopped, and its process had not ended {_END_WAIT_S:g} s later"
            return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with code {code}"
        finally:
            loop.remove_reader(engine.beat_fd)
            loop.remove_reader(engine.socket.getsockopt(zmq.FD))
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _bury(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.process.kill()
            engine.end(_END_WAIT_S)

    async def _read(self, engine: _EngineProcess, ready: asyncio.Future[None]) -> None:
        while True:
            try:
                message = engine.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                engine.readable.clear()
                await engine.readable.wait()
                continue
            kind, *arguments = wire.unpack(message)
            match kind:
                case "step":
                    self._take(*arguments)
                    await asyncio.sleep(0)  # streams write, though the next step may have come already
                case "hello":
                    engine.remove_directory()
                case "ready":
                    self.facts = wire.EngineFacts(*arguments[0])
                    self.status = EngineStatus.READY
                    if not ready.done():
                        ready.set_result(None)
                case "refused":
                    self._refuse(*arguments)
                case "aborted":
                    logger.error("a step of the engine failed: %s", arguments[0])
                    self._fail_all(EngineDeadError(f"a step of the engine failed ({arguments[0]})"))
                case "failed":
                    engine.last_words, engine.refused_config = arguments[0], arguments[1] and not ready.done()
                    return

    def _take(self, rows: Sequence[Sequence[object]], stats: Sequence[float] | None, num_tokens: int) -> None:
        """What a step brought, the engine's numbers if they are new, and the tokens that the step computed."""
        for row in rows:
            live = self._live.get(row[0])
            if live is not None:  # it may have been aborted, or ended by a stop string, since this was computed
                generation, state = live
                try:
                    generation.take(state, wire.decode_output(row))
                except Exception as error:  # of this request alone; the others go on
                    logger.exception("an output could not be taken")
                    self._fail(generation, error)
        if num_tokens:
            self._metrics.observe_step(num_tokens)
        if stats is not None:
            self.stats = wire.EngineStats(*stats)

    def _refuse(self, request_ids: Sequence[str], message: str, param: str | None, is_refusal: bool) -> None:
        error = RequestError(message, param) if is_refusal else EngineDeadError(message)
        for generation, state in list(self._live.values()):
            if state.request_id in request_ids:
                generation.fail(error)

    def _fail(self, generation: Generation, error: Exception) -> None:
        self.abort_sequences(generation)
        generation.fail(error)

    def _fail_all(self, error: Exception) -> None:
        for generation, _ in list(self._live.values()):
            self._fail(generation, error)


def _private_directory() -> Path:
    """A new directory that only this user may enter, with a path that leaves room for a socket's name."""
    path = tempfile.mkdtemp(prefix="qwen-engine-")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES - len(f"/{_SOCKET_NAME}"):
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="qwen-engine-", dir="/tmp")
    return Path(path)
