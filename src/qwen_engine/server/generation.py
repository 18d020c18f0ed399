"""The output of one HTTP call on its way: taken from the engine token by token, waited for by an endpoint.

Whatever happens to the engine, every `Generation` ends: with its output, or with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from qwen_engine.frontend.output_processor import RequestState, SampleDelta
from qwen_engine.server import wire
from qwen_engine.server.errors import DeadlineError
from qwen_engine.server.metrics import Metrics

if TYPE_CHECKING:
    from qwen_engine.server.engine_client import EngineClient


class Generation:
    """The requests of one HTTP call in flight: a choice for every prompt and sample, in that order."""

    def __init__(
        self, states: Sequence[RequestState], *, streams: bool, client: EngineClient, metrics: Metrics
    ) -> None:
        self.states = states
        self._client = client
        self._metrics = metrics
        self._streams = streams
        self._first_choice: dict[str, int] = {}
        self._num_running = 0
        for state in states:
            self._first_choice[state.request_id] = self._num_running
            self._num_running += state.spec.params.n
        self._has_output = False
        self._pending: dict[int, list[SampleDelta]] = {}
        self._last_token_time: dict[int, float] = {}
        self._changed = asyncio.Event()
        self.error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def finished(self) -> bool:
        """No more output will come."""
        return self.error is not None or self._num_running == 0

    @property
    def sequence_ids(self) -> list[str]:
        return [sequence_id for state in self.states for sequence_id in state.spec.sequence_ids]

    def expire_after(self, timeout_s: float) -> None:
        """Ends it so many seconds from now: with an error if nothing has come yet, else with what there is."""
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, timeout_s)

    async def next_deltas(self) -> list[tuple[int, SampleDelta]]:
        """What has come since the last call, as (choice, delta), waiting for some; empty at the end.

        Deltas of one choice are merged, so a slow reader gets larger ones. Raises what ended the call early.
        """
        await self._wait_until(lambda: bool(self._pending))
        if self.error is not None and not self._pending:
            raise self.error
        taken = [(choice, SampleDelta.joined(deltas)) for choice, deltas in sorted(self._pending.items())]
        self._pending.clear()
        return taken

    async def wait_first(self) -> None:
        """Waits until something has come. Raises what ended the call before that."""
        await self._wait_until(lambda: self._has_output)
        if self.error is not None:
            raise self.error

    async def wait_finished(self) -> None:
        """Waits for all output. Raises what ended the call early."""
        await self._wait_until(lambda: False)
        if self.error is not None:
            raise self.error

    def take(self, state: RequestState, output: wire.WireOutput) -> None:
        """One output of the engine."""
        delta = state.take(output, self._client.stop_sequence)
        if delta is None:
            return
        self._has_output = True
        choice = self._first_choice[state.request_id] + delta.index
        now = time.monotonic()
        last_time = self._last_token_time.get(choice)
        if last_time is not None:
            self._metrics.observe_gap(now - last_time)
        self._last_token_time[choice] = now
        self._add(choice, delta)

    def abort(self) -> None:
        """Ends what still runs, with finish_reason "abort"; nothing happens if all has ended."""
        if self.finished:
            return
        self._client.abort_sequences(self)
        for state in self.states:
            for delta in state.abort():
                self._add(self._first_choice[state.request_id] + delta.index, delta)

    def fail(self, error: Exception) -> None:
        """Ends it with an error, which whoever waits for output gets."""
        if self.finished:
            return
        self.error = error
        for state in self.states:
            state.abort(str(error))
        self._end()

    def close(self) -> None:
        """The call is over, whatever became of it; frees all it holds in the engine."""
        self.abort()
        self._end()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Or until no more output will come."""
        while not condition() and not self.finished:
            self._changed.clear()
            await self._changed.wait()

    def _expire(self, timeout_s: float) -> None:
        if not self.finished and not self._has_output:
            self._client.abort_sequences(self)
            self.fail(DeadlineError(f"no token within the request's timeout of {timeout_s:g} s"))
        else:
            self.abort()

    def _add(self, choice: int, delta: SampleDelta) -> None:
        if delta.finish_reason is not None:
            self._num_running -= 1
        if self._streams:
            self._pending.setdefault(choice, []).append(delta)
        if self._streams or self.finished:
            self._changed.set()
        if self.finished:
            self._end()

    def _end(self) -> None:
        self._changed.set()
        self._client.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
