"""The output of one HTTP call on its way: taken from the engine token by token, waited for by an endpoint.

Whatever happens to the engine, every `Generation` ends: with its output, or with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
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
        self._pending: list[tuple[int, SampleDelta]] = []
        self._last_token_time: dict[int, float] = {}
        self._waiter: asyncio.Future[None] | None = None
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
        while not self._pending and not self.finished:
            await self._change()
        taken, self._pending = self._pending, []
        if self.error is not None and not taken:
            raise self.error
        if len(taken) <= 1:  # nearly always, where a step brings one token
            return taken
        by_choice: dict[int, list[SampleDelta]] = {}
        for choice, delta in taken:
            by_choice.setdefault(choice, []).append(delta)
        return [(choice, SampleDelta.joined(deltas)) for choice, deltas in sorted(by_choice.items())]

    async def wait_first(self) -> None:
        """Waits until something has come. Raises what ended the call before that."""
        while not self._has_output and not self.finished:
            await self._change()
        if self.error is not None:
            raise self.error

    async def wait_finished(self) -> None:
        """Waits for all output. Raises what ended the call early."""
        while not self.finished:
            await self._change()
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

    async def _change(self) -> None:
        """Until the next output or the end. Only one reader waits at a time, so a future does for an event."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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
            self._pending.append((choice, delta))
            self._wake()
        if self.finished:
            self._end()

    def _end(self) -> None:
        self._wake()
        self._client.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
