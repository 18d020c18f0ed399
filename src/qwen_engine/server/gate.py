"""What stands before every route: request ids, API keys, content types, body sizes, HEAD, a net for stray exceptions.

Pure ASGI, so that nothing comes between a route and its client's disconnect. Every path but OPEN_PATHS needs a key when
there are keys, whatever the route, method or spelling: the check knows no prefixes.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_engine.server.errors import MAX_LOGGED_CHARS, ApiError, as_api_error
from qwen_engine.server.page import PAGE_FILES

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("qwen_engine.server.requests")

OPEN_PATHS = frozenset({"/health", *PAGE_FILES})
REQUEST_ID_HEADER = "X-Request-Id"
BODY_LIMIT_S = 300.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Wraps the application. max_request_bytes: of a body, however it is sent."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], max_request_bytes: int) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._max_request_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given_id = headers.get(REQUEST_ID_HEADER, "")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        # The layers between this one and a route look at an answer's head only; a stream's pieces go past them.
        scope.setdefault("state", {}).update(request_id=request_id, send_piece=send)
        if scope["method"] == "HEAD":  # answered as GET is; the HTTP server, which knows better, leaves the body out
            scope = {**scope, "method": "GET"}
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            self._check_key(headers, scope["path"])
            body = await self._read_body_in_time(headers, receive)
            await self._app(scope, _replay(body, receive), send_with_id)
        except Exception as error:
            answer = as_api_error(error)
            if not isinstance(error, ApiError):
                logger.exception("a request failed")
            log_failure(scope, answer)
            if has_begun:
                raise  # the server closes the connection, which is all that is left to tell the client
            await answer.response()(scope, receive, send_with_id)

    def _check_key(self, headers: Headers, path: str) -> None:
        if not self._api_keys or path in OPEN_PATHS:
            return
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        given = key.strip().encode()
        # Every key is compared, so that the time says nothing about any of them.
        matches = [hmac.compare_digest(given, known) for known in self._api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read_body_in_time(self, headers: Headers, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(BODY_LIMIT_S):
                return await self._read_body(headers, receive)
        except TimeoutError:
            # What may still come of the body is not read.
            message = f"the body has not come within {BODY_LIMIT_S:g} s"
            raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. Raises ApiError if it is too large, not JSON or encoded."""
        limit = self._max_request_bytes
        declared = headers.get("Content-Length", "0")
        if declared.isdigit() and int(declared) > 2 * limit:
            raise _too_large(declared, limit)
        parts: list[bytes] = []
        size, more = 0, True
        # A body that is a little too large is read to its end: a client that still sends would not see the answer.
        while more and size <= 2 * limit:
            message = await receive()
            if message["type"] != "http.request":
                break  # the client has gone; the route will see that
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > limit:
                parts.clear()
        if size > limit:
            raise _too_large(f"more than {limit}" if more else str(size), limit)
        body = b"".join(parts)
        if body:
            kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(400, "the body must be JSON, with Content-Type: application/json")
            if headers.get("Content-Encoding", "identity").lower() != "identity":
                raise ApiError(400, "encoded bodies are not supported; send it without Content-Encoding")
        return body


def log_failure(scope: Scope, error: ApiError) -> None:
    """One line for a request that is answered with an error, unless it has one already."""
    if not scope["state"].get("is_logged"):
        scope["state"]["is_logged"] = True
        fields = {"request_id": scope["state"]["request_id"], "path": scope["path"][:MAX_LOGGED_CHARS]}
        request_logger.info("request failed", extra={"fields": {**fields, **error.log_fields()}})


def _too_large(size: str, limit: int) -> ApiError:
    # What is left of the body is not read, so the connection cannot be used again.
    message = f"the body has {size[:20]} bytes; at most {limit} are accepted (--max-request-bytes)"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, then whatever comes after it."""
    is_read = False

    async def replayed() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
