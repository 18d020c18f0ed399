"""uvicorn's HTTP connection with limits on what a client can hold before its key has been looked at.

A request's head may have MAX_HEAD_BYTES and take HEAD_LIMIT_S to come; so may whatever else is no body (trailers, the
extensions of chunks). Bodies are limited by `Gate`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 128 * 1024
HEAD_LIMIT_S = 60.0


class LimitedHttp(HttpToolsProtocol):
    """Used by uvicorn as `http`; the callbacks are those of its parser."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_bytes = 0  # since the last piece of a body, or the end of a request
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the head of a request may have {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        if self._timer is None:
            self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_LIMIT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
