"""One streamed completion over HTTP, timed: the request body, server-sent events, and what they say about latency.

Works with any OpenAI-compatible server. Times are those of the running event loop, taken once per read from the
socket, so events that arrive together count as one output and never make a gap of zero. An output is a chunk with
text (or a tool call), whatever the server sends beside it: role chunks, chunks without text, usage and `[DONE]` are
none. The chunk with the finish reason marks the last token, which may have no text. Token counts are the server's.

Used by `bench.serve`; `aiohttp` is imported by the first call of `open_session`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qwen_engine.errors import ConfigError, shown, summary

if TYPE_CHECKING:
    import aiohttp

CONNECT_TIMEOUT_S = 30.0
# Shorter than the idle limit of common servers (5 s): a request never goes into a connection that is being closed.
KEEP_ALIVE_S = 2.0
MAX_ERROR_BYTES = 2000
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What is sent: `body` is the JSON, `num_prompt_tokens` None where the client cannot know it."""

    body: bytes
    num_prompt_tokens: int | None
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeResult:
    """What came back. With an `error` only the times and texts seen so far are kept, and no figure counts them.

    Times are the event loop's, in seconds: `start_s` when the request went out, `first_s` and `last_s` the first and
    the last token, `end_s` the end of the response, `output_s` the distinct times of outputs. `usage_counted` is False
    where the server sent no usage and `num_output_tokens` is the number of chunks.
    """

    start_s: float
    end_s: float
    max_tokens: int
    first_s: float | None = None
    last_s: float | None = None
    output_s: tuple[float, ...] = ()
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    usage_counted: bool = True
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Send to first output."""
        return None if self.error or self.first_s is None else self.first_s - self.start_s

    @property
    def e2el_s(self) -> float | None:
        """Send to last token."""
        return None if self.error or self.last_s is None else self.last_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """(E2EL - TTFT) / (tokens - 1); None for one token, and where all tokens came at once."""
        if self.error or self.first_s is None or self.last_s is None:
            return None
        if self.num_output_tokens < 2 or len(self.output_s) < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between outputs."""
        if self.error:
            return []
        return [after - before for before, after in zip(self.output_s, self.output_s[1:], strict=False)]


class SseDecoder:
    """Server-sent events from bytes cut anywhere: `feed` returns the data of each event that is now complete.

    Line ends are LF, CRLF or CR. Comments and fields other than `data` are dropped, several `data` lines are joined by
    LF. An event whose closing blank line never comes is no event.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        if not chunk:
            return []
        if self._after_cr:  # an LF here is the second half of a line end that was already taken
            chunk = chunk.removeprefix(b"\n")
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            self._after_cr = False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class _ServerError(Exception):
    """The server said that the request failed, or sent what is no completion."""


@dataclass(slots=True)
class _Stream:
    """The state of one response while it is read. `start_s` moves to the time when the request goes out."""

    start_s: float
    first_s: float | None = None
    last_s: float | None = None
    output_s: list[float] = field(default_factory=list)
    num_outputs: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    text: list[str] = field(default_factory=list)
    is_done: bool = False

    def add(self, data: bytes, now_s: float) -> None:
        """Takes the data of one event. Raises _ServerError for an error event and for anything malformed."""
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = json.loads(data.decode())
            if chunk.get("error") or chunk.get("object") == "error":
                raise _ServerError(f"error event: {_error_message(chunk)}")
            if usage := chunk.get("usage"):
                self.usage = usage | {"cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens")}
            for choice in chunk.get("choices") or ():
                self._add_choice(choice, now_s)
        except (ValueError, TypeError, AttributeError) as error:
            raise _ServerError(f"malformed event {shown(data)}: {summary(error)}") from None

    def _add_choice(self, choice: Mapping[str, Any], now_s: float) -> None:
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = (choice.get("text") or "") + reasoning + (delta.get("content") or "")
        if text or delta.get("tool_calls"):
            self.text.append(text)
            self.num_outputs += 1
            if not self.output_s or now_s > self.output_s[-1]:
                self.output_s.append(now_s)
            self.last_s = now_s
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
            self.last_s = now_s

    def failure(self) -> str | None:
        """Why a response that ended without an error is none, or None if it is one."""
        if not self.is_done and self.finish_reason is None:
            return "the stream ended before the completion did"
        if self.finish_reason == "abort":
            return "the server aborted the request"
        if not self.num_outputs and not self.count("completion_tokens"):
            return "the stream held no token"
        return None

    def count(self, name: str) -> int | None:
        value = self.usage.get(name)
        return value if isinstance(value, int) else None

    def result(self, request: ServeRequest, *, end_s: float, error: str | None) -> ServeResult:
        counted = self.count("completion_tokens")
        num_prompt_tokens = self.count("prompt_tokens")
        # Tokens without any text show up at the end only.
        first_s = self.output_s[0] if self.output_s else self.last_s
        return ServeResult(
            start_s=self.start_s,
            end_s=end_s,
            max_tokens=request.max_tokens,
            first_s=first_s,
            last_s=self.last_s,
            output_s=tuple(self.output_s),
            num_prompt_tokens=request.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens,
            num_cached_tokens=self.count("cached_tokens"),
            num_output_tokens=counted or self.num_outputs,
            usage_counted=bool(counted),
            finish_reason=self.finish_reason,
            text="".join(self.text),
            error=error,
        )


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """A client session without limits on connections or on the time a completion takes. Raises ConfigError."""
    try:
        import aiohttp
    except ImportError:
        raise ConfigError("bench serve needs aiohttp; install it with: pip install 'qwen-engine[bench]'") from None
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(_note_send)
    return aiohttp.ClientSession(
        trace_configs=[trace],
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


async def _note_send(_session: object, context: Any, _params: object) -> None:
    # Not earlier: with hundreds of requests at once, this process needs its time to open the connections.
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.start_s = asyncio.get_running_loop().time()


async def ask_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The id of the first model the server lists. Raises ConfigError if it cannot be asked or lists none."""
    import aiohttp

    url = f"{base_url}/v1/models"
    try:
        async with session.get(url) as response:
            body = await response.read()
            if response.status != 200:
                raise _ServerError(_http_error(response.status, body))
            return str(json.loads(body)["data"][0]["id"])
    except _ServerError as failure:
        reason = str(failure)
    except (OSError, ValueError, LookupError, TypeError, aiohttp.ClientError) as failure:
        reason = summary(failure)
    raise ConfigError(f"no model at {url} ({reason}); start the server or pass --model")


async def complete(session: aiohttp.ClientSession, url: str, request: ServeRequest) -> ServeResult:
    """Sends one request and reads its stream to the end; failures are in the result, never raised."""
    import aiohttp

    now = asyncio.get_running_loop().time
    stream, decoder, error = _Stream(now()), SseDecoder(), None
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(url, data=request.body, headers=headers, trace_request_ctx=stream) as response:
            if response.status != 200:
                raise _ServerError(_http_error(response.status, await response.content.read(MAX_ERROR_BYTES)))
            while data := await response.content.readany():
                now_s = now()
                for event in decoder.feed(data):
                    stream.add(event, now_s)
        error = stream.failure()
    except _ServerError as failure:
        error = str(failure)
    except (OSError, ValueError, aiohttp.ClientError) as failure:
        error = summary(failure)
    return stream.result(request, end_s=now(), error=error)


def _http_error(status: int, body: bytes) -> str:
    try:
        message = _error_message(json.loads(body))
    except (ValueError, AttributeError):
        message = shown(body.decode(errors="replace").strip())
    return f"HTTP {status}: {message}"


def _error_message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error", answer)
    message = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(str(message or shown(answer)).split())[:MAX_ERROR_BYTES]
