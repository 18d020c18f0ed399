"""An OpenAI-compatible server that says what a test tells it to, when it tells it to, on a clock that jumps.

With `run_virtual` a second of the schedule costs a millisecond: the event loop's time stands still while there is work
or data on a socket, then jumps to the next timer. Server and client share the loop, so times are exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import selectors
import socket
import sys
import termios
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

SETTLE_S = 0.001  # real time for bytes to cross the loopback before the clock may jump
DONE = b"data: [DONE]\n\n"
_T = TypeVar("_T")


class _JumpingSelector(selectors.DefaultSelector):
    loop: VirtualLoop
    settle_s: float

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(self.settle_s)
        if not events and not self._num_bytes_under_way():
            self.loop.now_s += timeout
        return events

    def _num_bytes_under_way(self) -> int:
        """What connections have sent and the other end's kernel has not acknowledged: on a busy machine it may wait."""
        total = 0
        for key in self.get_map().values():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(key.fd)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # what has come is acknowledged now
                total += int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return total


class VirtualLoop(asyncio.SelectorEventLoop):
    """`settle_s` is 0 where there are no sockets."""

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self.now_s = 0.0
        selector = _JumpingSelector()
        selector.settle_s = settle_s
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


def run_virtual(main: Coroutine[Any, Any, _T], settle_s: float = SETTLE_S) -> _T:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(settle_s)) as runner:
        return runner.run(main)


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text(piece: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish_reason}]})


def usage(completion_tokens: int, *, prompt_tokens: int = 10, cached_tokens: int | None = None) -> bytes:
    counts: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    counts["prompt_tokens_details"] = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return event({"choices": [], "usage": counts})


@dataclass(frozen=True)
class Reply:
    """A status, and the bytes of the body, each sent so many seconds after the one before."""

    steps: Sequence[tuple[float, bytes]]
    status: int = 200


def steady(num_tokens: int, *, ttft_s: float = 0.1, itl_s: float = 0.02, **counts: Any) -> Reply:
    """One chunk per token, then finish, usage and [DONE] at once."""
    tokens = [(itl_s if i else ttft_s, text(f" t{i}")) for i in range(num_tokens)]
    return Reply([*tokens, (0.0, text("", "length")), (0.0, usage(num_tokens, **counts)), (0.0, DONE)])


@dataclass
class StubServer:
    """Answers the n-th completion with `reply(n, body)`; keeps every body and the most requests it had at once."""

    reply: Callable[[int, dict[str, Any]], Reply]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0

    async def __aenter__(self) -> StubServer:
        self._connections: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if first.startswith("GET"):
            answer = json.dumps({"data": [{"id": "stub-model"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
            return True
        number = len(self.bodies)
        self.bodies.append(json.loads(body))
        self.paths.append(first.split()[1])
        self.headers.append(headers)
        self.arrivals_s.append(asyncio.get_running_loop().time())
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            reply = self.reply(number, self.bodies[-1])
            kind = "text/event-stream" if reply.status == 200 else "application/json"
            head = f"HTTP/1.1 {reply.status} X\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head.encode())
            for delay_s, data in reply.steps:
                if delay_s:
                    await asyncio.sleep(delay_s)
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        finally:
            self.in_flight -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
