"""What a server meets on the open net: bodies made to cost it more than they cost their sender."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import uvicorn
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwen_engine.server import gate, http_protocol, protocol, serve


def _kinds(base: type[protocol.Body] = protocol.Body) -> Iterator[type[protocol.Body]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


@pytest.mark.parametrize("kind", [*_kinds()], ids=lambda kind: kind.__name__)
def test_a_body_full_of_errors_costs_no_more_than_one_with_a_few(kind):
    wrong = object()
    flat, nested = [wrong] * 5000, [[wrong] * 100] * 100
    keys = {f"key{number}": wrong for number in range(5000)}
    for content in (keys, *({name: value} for name in kind.model_fields for value in (flat, nested, keys))):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({**content, "one more": wrong})
        assert caught.value.error_count() < 20, content.keys()


@contextlib.asynccontextmanager
async def _listening() -> AsyncIterator[int]:
    """The server's HTTP side over an application that answers with the size of a body; gives its port."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await Response(str(len(body)))(scope, receive, send)

    app = gate.Gate(application, api_keys=(), max_request_bytes=2**20)
    http = serve._Http(uvicorn.Config(app, http=http_protocol.LimitedHttp, ws="none", lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(http.serve([listener]))
        yield listener.getsockname()[1]
        http.should_exit = http.force_exit = True
        await task


async def _answer(port: int, *parts: bytes) -> bytes:
    """What the server says to these parts until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                answer += piece
    writer.close()
    return answer


POST = b"POST / HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /" + b"a" * 500_000],
        [b"GET / HTTP/1.1\r\n", b"X-Long: " + b"a" * 500_000],
        [b"GET / HTTP/1.1\r\n", *[b"X-Many: a\r\n" * 1000] * 50],
        [POST, b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 500_000],
        [POST, b"Transfer-Encoding: chunked\r\n\r\n1\r\n5\r\n0\r\n", *[b"X-Many: a\r\n" * 1000] * 50],
    ],
    ids=["url", "header", "headers", "chunk extension", "trailers"],
)
def test_a_connection_holds_no_more_than_a_head_before_it_is_closed(parts):
    async def scenario() -> None:
        async with _listening() as port:
            answer = await _answer(port, *parts)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")  # a reset may overtake the answer

    asyncio.run(scenario())


def test_a_connection_that_says_nothing_or_too_slowly_is_closed(monkeypatch):
    async def scenario() -> None:
        async with _listening() as port:
            with monkeypatch.context() as patch:
                patch.setattr(http_protocol, "HEAD_LIMIT_S", 0.2)
                assert await _answer(port) == b""
                assert await _answer(port, b"GET / HTTP/1.1\r\nHost:") == b""
            monkeypatch.setattr(gate, "BODY_LIMIT_S", 0.2)
            answer = await _answer(port, POST + b"Content-Length: 9\r\n\r\n[")
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"request_timeout"' in answer

    asyncio.run(scenario())


def test_heads_and_bodies_within_the_limits_pass():
    async def scenario() -> None:
        async with _listening() as port:
            head = POST + b"X-Long: " + b"a" * 50_000 + b"\r\n"
            assert (await _answer(port, head, b"Content-Length: 600000\r\n\r\n", b" " * 600_000)).endswith(b"600000")
            chunks = b"4\r\n1234\r\n" * 50_000
            answer = await _answer(port, head, b"Transfer-Encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n")
            assert answer.endswith(b"200000")
            many = b"GET / HTTP/1.1\r\n\r\n" * 7500
            answer = await _answer(port, many, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert answer.count(b"HTTP/1.1 200 OK") == 7501

    asyncio.run(scenario())
