"""Where the calls of structured output wait, in the engine process, until their sequences have their constraints.

A thread of its own compiles them, one call after the other; the step loop and all other calls go on meanwhile. What is
dropped here (an abort) never reaches the engine. `put`, `drop` and `take_done` are for the loop's thread.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from qwen_engine.request import Request
from qwen_engine.tokenization.structured import GrammarCompiler


@dataclass(slots=True)
class AddedCall:
    """The requests of one HTTP call, which are queued together. sequences: by id, without those that were dropped."""

    request_ids: list[str]
    sequences: dict[str, Request] = field(default_factory=dict)


class ConstraintQueue:
    """Calls come out in the order they went in. new_compiler: runs on the thread, before the first call."""

    def __init__(self, new_compiler: Callable[[], GrammarCompiler]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._compiler = self._thread.submit(new_compiler)
        self._waiting: deque[tuple[AddedCall, Future[None]]] = deque()
        self._calls: dict[str, AddedCall] = {}  # by sequence id

    @property
    def num_sequences(self) -> int:
        """That wait here."""
        return len(self._calls)

    def wait_ready(self) -> None:
        """Waits for the compiler. If it cannot be made, every call that needs it fails with the reason."""
        concurrent.futures.wait([self._compiler])

    def put(self, call: AddedCall) -> None:
        self._calls.update(dict.fromkeys(call.sequences, call))
        self._waiting.append((call, self._thread.submit(self._constrain, call)))

    def drop(self, sequence_id: str) -> None:
        """Forgets a sequence. Unknown ids are ignored."""
        call = self._calls.pop(sequence_id, None)
        if call is not None:
            del call.sequences[sequence_id]

    def take_done(self) -> Iterator[tuple[AddedCall, BaseException | None]]:
        """Calls that are ready for the engine, and those that cannot be served with the reason."""
        while self._waiting and self._waiting[0][1].done():
            call, future = self._waiting.popleft()
            for sequence_id in call.sequences:
                del self._calls[sequence_id]
            if call.sequences:
                yield call, future.exception()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _constrain(self, call: AddedCall) -> None:
        compiler = self._compiler.result()
        for sequence_id, sequence in list(call.sequences.items()):
            if sequence_id in call.sequences:  # else it was dropped meanwhile
                compiler.constrain(sequence)
