"""The engine's process under the server: builds `EngineCore` and runs its loop, fed by the API process.

Started by `engine_client`. Stdin stays open for as long as the API process lives; its end, like the parent-death
signal, ends this process at once. Commands and outputs go over one ZMQ pair socket (`wire`); `beat_fd` gets a byte
twice a second while the loop is alive, so silence there is a hang and its end is the death of this process.

Signals are the API process's business: it decides when to drain and when to stop.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from qwen_engine import child_process
from qwen_engine.errors import EngineDeadError, QwenEngineError, RequestError, summary
from qwen_engine.server import log_format, wire
from qwen_engine.server.constraint_queue import AddedCall, ConstraintQueue
from qwen_engine.tokenization.structured import GrammarCompiler
from qwen_engine.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qwen_engine.engine.core import EngineCore

logger = logging.getLogger(__name__)

BEAT_PERIOD_S = 0.5
STATS_PERIOD_S = 0.25
MAX_FAILED_STEPS = 2
"""Steps that may fail one after the other before the engine gives up: the first may be a request's fault."""
_COMPILE_POLL_S = 0.002
_LINGER_MS = 2000


class EngineLoop:
    """Takes commands, steps the core, sends what came out. Nothing a command holds can end the loop."""

    def __init__(self, core: EngineCore, socket: zmq.Socket, constraints: ConstraintQueue) -> None:
        self._core = core
        self._socket = socket
        self._constraints = constraints
        self._stopping = False
        self._stats = wire.EngineStats()
        self._stats_time = 0.0
        self._num_past_preemptions = 0  # of schedulers that a failed step has replaced
        self._num_failed_steps = 0
        self.step_start: float | None = None
        """When the step under way began, for the heart to see; None between steps."""

    def run(self) -> None:
        """Returns when told to shut down; raises EngineDeadError when the engine cannot go on."""
        while not self._stopping:
            self._take_commands(wait_s=0.0 if self._core.has_work else self._idle_wait_s())
            for call, error in self._constraints.take_done():
                if error is None:
                    self._queue(call)
                else:
                    self._refuse(call, error)
            rows, num_tokens = [], 0
            if self._core.has_work and not self._stopping:
                rows, num_tokens = self._step()
            else:
                self._core.check_ranks()
            stats = self._new_stats()
            if rows or stats or num_tokens:
                self._send("step", rows, stats, num_tokens)

    def _take_commands(self, wait_s: float) -> None:
        while self._socket.poll(wait_s * 1000):
            wait_s = 0.0
            message = self._socket.recv()
            try:
                kind, *arguments = wire.unpack(message)
                self._handle(kind, arguments)
            except Exception:
                logger.exception("a command of the API process failed")

    def _handle(self, kind: str, arguments: list[Any]) -> None:
        match kind:
            case "add":
                self._add(*arguments)
            case "abort":
                for sequence_id in arguments[0]:
                    self._constraints.drop(sequence_id)
                    self._core.finish(sequence_id, "abort")
            case "stop":
                sequence_id, stop_string = arguments
                self._core.finish(sequence_id, "stop", stop_string)
            case "reset_prefix_cache":
                self._core.reset_prefix_cache()
            case "shutdown":
                self._stopping = True
            case _:
                raise ValueError(f"unknown command {kind!r}")

    def _add(self, specs: list[Any]) -> None:
        """Queues the sequences of all these requests, or refuses all. Those of structured output get ready first."""
        call = AddedCall([fields[0] for fields in specs])
        try:
            for spec in map(wire.decode_spec, specs):
                for index, sequence_id in enumerate(spec.sequence_ids):
                    call.sequences[sequence_id] = spec.sequence(index)
        except Exception as error:
            self._refuse(call, error)
            return
        if any(sequence.params.structured_outputs is not None for sequence in call.sequences.values()):
            self._constraints.put(call)
        else:
            self._queue(call)

    def _queue(self, call: AddedCall) -> None:
        added: list[str] = []
        try:
            for sequence_id, sequence in call.sequences.items():
                self._core.add(sequence)
                added.append(sequence_id)
        except Exception as error:
            for sequence_id in added:
                self._core.finish(sequence_id, "abort")
            self._refuse(call, error)

    def _refuse(self, call: AddedCall, error: BaseException) -> None:
        is_refusal = isinstance(error, RequestError)
        if not is_refusal:
            logger.error("a request cannot be taken", exc_info=error)
        self._send("refused", call.request_ids, str(error), error.param if is_refusal else None, is_refusal)

    def _step(self) -> tuple[list[Any], int]:
        """Its outputs for the wire, and how many tokens it has computed."""
        scheduler = self._core.scheduler
        num_before = scheduler.num_applied_tokens
        self.step_start = time.monotonic()
        try:
            outputs = self._core.step()
        except EngineDeadError:
            raise
        except Exception as error:
            # The core has aborted everything and is ready again. If it was the device, the next step fails too.
            logger.exception("a step failed; all requests in flight are aborted")
            self._num_failed_steps += 1
            self._num_past_preemptions += scheduler.num_preemptions
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise EngineDeadError(f"{self._num_failed_steps} steps in a row failed ({summary(error)})") from error
            self._send("aborted", summary(error))
            return [], 0
        finally:
            self.step_start = None
        self._num_failed_steps = 0
        rows = [
            wire.encode_output(output, is_first=output.token_id is not None and output.request.num_output_tokens == 1)
            for output in outputs
        ]
        return rows, scheduler.num_applied_tokens - num_before

    def _idle_wait_s(self) -> float:
        """Until the next look at the ranks; at once if there are numbers that nobody has been told."""
        if self._constraints.num_sequences:
            return _COMPILE_POLL_S
        return 0.0 if self._read_stats() != self._stats else STATS_PERIOD_S

    def _new_stats(self) -> wire.EngineStats | None:
        """The numbers, where it is time to tell them: a few times a second, and when the engine falls idle."""
        now = time.monotonic()
        if now - self._stats_time < STATS_PERIOD_S and self._core.has_work:
            return None
        stats = self._read_stats()
        if stats == self._stats:
            return None
        self._stats, self._stats_time = stats, now
        return stats

    def _read_stats(self) -> wire.EngineStats:
        scheduler = self._core.scheduler
        blocks = scheduler.block_manager
        return wire.EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._constraints.num_sequences,
            kv_usage=1 - blocks.num_free_blocks / blocks.num_blocks,
            num_preemptions=self._num_past_preemptions + scheduler.num_preemptions,
        )

    def _send(self, *message: Any) -> None:
        self._socket.send(wire.pack(*message))


class _Heart(threading.Thread):
    """Beats while the loop moves: a step that takes longer than `step_timeout_s` counts as hanging."""

    def __init__(self, beat_fd: int) -> None:
        super().__init__(name="qwen-engine-heart", daemon=True)
        self._fd = beat_fd
        self.loop: EngineLoop | None = None
        self.step_timeout_s = 0.0
        os.set_blocking(beat_fd, False)

    def run(self) -> None:
        while True:
            step_start = self.loop.step_start if self.loop is not None else None
            if step_start is None or time.monotonic() - step_start < self.step_timeout_s:
                try:
                    os.write(self._fd, b".")
                except BlockingIOError:
                    pass  # the API process is busy; it has beats to read
                except OSError:
                    return
            time.sleep(BEAT_PERIOD_S)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = child_process.begin(wire.EngineProcessSpec)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    log_format.configure(spec.log_format, "[engine] ")
    logging.getLogger("qwen_engine").setLevel(spec.log_level)
    heart = _Heart(spec.beat_fd)
    heart.start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # what a request has been given is never dropped, and the loop never waits for a reader
    socket.linger = _LINGER_MS
    socket.connect(spec.address)
    socket.send(wire.pack("hello"))
    code = 0
    try:
        _serve(spec, socket, heart)
    except BaseException as error:
        code = 1
        is_ours = isinstance(error, QwenEngineError)
        if not is_ours:
            logger.exception("the engine fails")
        socket.send(wire.pack("failed", str(error) if is_ours else summary(error), is_ours))
    socket.close()
    context.term()  # waits until the last message has left
    os._exit(code)  # at once: a collective that waits for dead peers would block a regular exit


def _serve(spec: wire.EngineProcessSpec, socket: zmq.Socket, heart: _Heart) -> None:
    from qwen_engine.config import EngineConfig, ModelConfig
    from qwen_engine.engine.core import EngineCore  # torch: seconds

    config = EngineConfig(**spec.config)
    folder = Path(spec.model_folder)
    model_config = ModelConfig.from_folder(folder)
    # Building the vocabulary holds Python's lock for a second: better while weights load than in the middle of steps.
    constraints = ConstraintQueue(lambda: _new_compiler(folder, model_config.vocab_size))
    core = EngineCore(config, folder, model_config)
    constraints.wait_ready()
    loop = EngineLoop(core, socket, constraints)
    heart.step_timeout_s = config.step_timeout_s
    heart.loop = loop
    facts = wire.EngineFacts(
        max_model_len=core.max_model_len,
        num_kv_blocks=core.scheduler.block_manager.num_blocks,
        block_size=config.block_size,
        device=str(core.setup.device),
        dtype=str(core.setup.dtype).removeprefix("torch."),
    )
    child_process.settle()
    socket.send(wire.pack("ready", facts))
    try:
        loop.run()
    finally:
        constraints.close()
        core.close()


def _new_compiler(folder: Path, vocab_size: int) -> GrammarCompiler:
    compiler = GrammarCompiler(Tokenizer.from_folder(folder), vocab_size=vocab_size)
    compiler.load()
    return compiler


def _exit_with_parent() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
