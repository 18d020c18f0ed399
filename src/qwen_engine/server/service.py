"""What every generating endpoint does: admit, tokenize off the event loop, submit, watch the client, answer, account.

A `Call` is one such HTTP request. From its admission to its `close`, which every path reaches, it counts against the
queue's cap and holds up a drain; when its client goes away, what it holds in the engine is freed at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.errors import RequestError, shown
from qwen_engine.frontend.input_processor import InputProcessor
from qwen_engine.frontend.output_processor import RequestState, SampleDelta
from qwen_engine.request import RequestSpec
from qwen_engine.server.engine_client import EngineClient, EngineStatus
from qwen_engine.server.errors import ApiError, as_api_error, context_length_exceeded, unavailable
from qwen_engine.server.gate import request_logger
from qwen_engine.server.generation import Generation
from qwen_engine.server.json_response import json_response, to_json
from qwen_engine.server.metrics import Metrics
from qwen_engine.server.protocol import GenerationBody
from qwen_engine.server.tracing import RequestTracer, span_attributes
from qwen_engine.tokenization.reasoning import ReasoningSplitter
from qwen_engine.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 4096
"""Most sequences (prompts times n) of one call."""
_TOKENIZER_THREADS = 4
_GRAMMAR_THREADS = 2
DONE = b"data: [DONE]\n\n"
Write = Callable[[bytes], Awaitable[None]]
"""Sends events, one or several, and waits where the client is slow to read."""
WriteEvents = Callable[[Write], Awaitable[None]]
"""Writes all events of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """model_names: the first is the one answers carry. max_queued: sequences that may wait beyond those that run.

    reasoning_alias: chats carry their thinking as `reasoning` too, not just as `reasoning_content`.
    """

    model_names: Sequence[str]
    max_queued: int
    sampling_defaults: Mapping[str, Any]
    reasoning_alias: bool = True


class Service:
    """Everything the endpoints share. Lives on the event loop's thread."""

    def __init__(
        self,
        options: ServiceOptions,
        *,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        client: EngineClient,
        metrics: Metrics,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.client = client
        self.metrics = metrics
        self.tracer = tracer
        self.created = int(time.time())
        self.inputs = InputProcessor(config, model_config, tokenizer)
        self.draining = False
        self.num_calls = 0
        self._limit = config.max_num_seqs + options.max_queued
        self._num_sequences = 0
        self._calls: dict[str, set[Call]] = {}  # by every id a client may know it by
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        # A grammar that is costly on purpose holds up those who send grammars, nobody else.
        self._grammar_pool = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="grammar")

    @property
    def max_model_len(self) -> int:
        """Raises ApiError while the engine has not been ready yet."""
        if self.client.facts is None:
            raise unavailable("the engine is starting", "engine_starting")
        return self.client.facts.max_model_len

    @property
    def is_ready(self) -> bool:
        return self.client.is_healthy and not self.draining

    def model_name(self, name: str | None) -> str:
        """The name an answer carries. Raises ApiError for a model this server does not have."""
        if name is None:
            return self.options.model_names[0]
        if name not in self.options.model_names:
            message = f"the model {shown(name)} does not exist; this server has {', '.join(self.options.model_names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    async def in_pool(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs text work, which may take long for long texts, where it does not hold up anybody."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def open(
        self,
        request: Request,
        body: GenerationBody,
        *,
        id_prefix: str,
        num_sequences: int,
        prepare: Callable[[], Sequence[RequestSpec]],
        new_splitter: Callable[[RequestSpec], ReasoningSplitter] | None = None,
    ) -> Call:
        """Admits a call and sends it to the engine.

        num_sequences: that `prepare` will make. new_splitter: for chats, of `RequestState`.
        Raises ApiError or RequestError; then nothing of the call is left.
        """
        model = self.model_name(body.model)
        self._admit(num_sequences)
        call = Call(self, request, id_prefix=id_prefix, model=model, num_sequences=num_sequences)
        try:
            pool = self._grammar_pool if body.constraints else self._pool
            specs = await asyncio.get_running_loop().run_in_executor(pool, prepare)
            for spec in specs:
                self._check_length(spec, body)
            generation = self.client.submit(
                specs, streams=bool(body.stream), arrival_time=call.arrival_time, new_splitter=new_splitter
            )
            call.begin(generation, body.timeout)
        except BaseException as error:
            call.close(error)
            raise
        return call

    def abort(self, request_id: str) -> int:
        """Ends the calls that a client knows by this id; returns how many there were."""
        calls = list(self._calls.get(request_id, ()))
        for call in calls:
            call.abort()
        return len(calls)

    def enter(self, call: Call) -> None:
        self.num_calls += 1
        self._num_sequences += call.num_sequences
        for known in call.ids:
            self._calls.setdefault(known, set()).add(call)

    def leave(self, call: Call) -> None:
        self.num_calls -= 1
        self._num_sequences -= call.num_sequences
        for known in call.ids:
            self._calls[known].discard(call)
            if not self._calls[known]:
                del self._calls[known]

    def _admit(self, num_sequences: int) -> None:
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.client.status is EngineStatus.STARTING:
            raise unavailable("the engine is starting", "engine_starting")
        if self.client.status is not EngineStatus.READY:
            raise unavailable("the engine has failed", "engine_dead")
        if num_sequences > MAX_SEQUENCES:
            raise ApiError(
                400, f"prompts times n is {num_sequences}; at most {MAX_SEQUENCES} fit in a request", param="n"
            )
        if self._num_sequences >= self._limit:
            raise unavailable(
                f"{self._num_sequences} sequences run or wait, and there is room for {self._limit}; try again later",
                "queue_full",
            )

    def _check_length(self, spec: RequestSpec, body: GenerationBody) -> None:
        num_prompt, max_len = len(spec.prompt_token_ids), self.max_model_len
        name, max_tokens = body.limit
        if num_prompt >= max_len:
            raise context_length_exceeded(
                f"This model's maximum context length is {max_len} tokens, and the prompt has {num_prompt}; shorten it",
                body.prompt_field,
            )
        if max_tokens is not None and num_prompt + max_tokens > max_len:
            raise context_length_exceeded(
                f"This model's maximum context length is {max_len} tokens, but the prompt has {num_prompt} and "
                f"{name} asks for {max_tokens} more; lower {name} to {max_len - num_prompt}, or shorten the prompt",
                name,
            )


class Call:
    """One generating HTTP request, from admission to `close`."""

    def __init__(self, service: Service, request: Request, *, id_prefix: str, model: str, num_sequences: int) -> None:
        self.arrival_time = time.monotonic()
        self.created = int(time.time())
        self.model = model
        self.num_sequences = num_sequences
        self._state = request.scope["state"]
        request_id = self._state["request_id"]
        self.id = id_prefix + request_id
        self.ids = {request_id, self.id}
        self._path = request.url.path
        self._headers = request.headers
        self._receive = request.receive
        self._service = service
        self._generation: Generation | None = None
        self._watch: asyncio.Task[None] | None = None
        self._aborted = False
        self._closed = False
        service.enter(self)

    @property
    def generation(self) -> Generation:
        assert self._generation is not None, "the call has not begun"
        return self._generation

    def begin(self, generation: Generation, timeout_s: float | None) -> None:
        self._generation = generation
        if timeout_s is not None:
            generation.expire_after(timeout_s)
        self._watch = asyncio.create_task(self._abort_on_disconnect())
        if self._aborted:
            generation.abort()

    def abort(self) -> None:
        """Ends it, or lets it end as soon as it begins."""
        self._aborted = True
        if self._generation is not None:
            self._generation.abort()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the call; safe to call twice. error: what it was answered with, if not with output."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        states: Sequence[RequestState] = ()
        if self._generation is not None:
            self._generation.close()
            states = self._generation.states
            for state in states:
                self._service.metrics.observe_request(state)
        self._service.leave(self)
        duration_s = time.monotonic() - self.arrival_time
        answer = None if error is None else as_api_error(error)
        self._state["is_logged"] = True
        message = "request" if answer is None else "request failed"
        request_logger.info(message, extra={"fields": self._log_fields(answer, duration_s)})
        if self._service.tracer is not None:
            attributes = span_attributes(self.id, self.model, states)
            error_code = None if answer is None else answer.code or type(error).__name__
            self._service.tracer.record(attributes, headers=self._headers, duration_s=duration_s, error=error_code)

    def usage(self, *, num_output_tokens: int | None = None) -> dict[str, Any]:
        """Tokens so far, in OpenAI's form. num_output_tokens: to report instead of those generated."""
        states = self.generation.states
        num_prompt = sum(len(state.prompt_token_ids) for state in states)
        num_output = num_output_tokens
        if num_output is None:
            num_output = sum(state.num_output_tokens for state in states)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(state.num_cached_tokens for state in states)},
        }
        reasoning = [count for state in states if (count := state.num_reasoning_tokens) is not None]
        if reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return usage

    async def whole(self, build: Callable[[], Any]) -> Response:
        """The answer made by `build` once all output is there."""
        try:
            await self.generation.wait_finished()
            response = json_response(build())
        except BaseException as error:
            self.close(error)
            raise
        self.close()
        return response

    async def stream(self, write_events: WriteEvents) -> Response:
        """The answer as server-sent events. Waits for the first output, so that errors until then are HTTP errors."""
        try:
            await self.generation.wait_first()
        except BaseException as error:
            self.close(error)
            raise
        return EventStream(write_events, self)

    async def _abort_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.abort()

    def _log_fields(self, error: ApiError | None, duration_s: float) -> dict[str, Any]:
        fields: dict[str, Any] = {"request_id": self.id, "path": self._path, "model": self.model}
        if error is not None:
            fields |= error.log_fields()
        if self._generation is not None:
            states = self._generation.states
            usage = self.usage()
            first = states[0].metrics
            ends = [state.metrics.finished_s for state in states if state.metrics.finished_s is not None]
            fields |= {
                "prompt_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "queue_s": _rounded(first.scheduled_s),
                "prefill_s": _span(first.scheduled_s, first.first_token_s),
                "decode_s": _span(first.first_token_s, max(ends, default=None)),
                "finish_reason": ",".join(sorted({str(reason) for s in states for reason in s.finish_reasons})),
            }
        return {**fields, "total_s": _rounded(duration_s)}


class EventStream(Response):
    """Sends events as they come and closes the call, however that ends."""

    media_type = "text/event-stream"

    def __init__(self, write_events: WriteEvents, call: Call) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._write_events = write_events
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # Each step of the engine wakes what runs here: a task of its own, without the dozen frames above this one.
            await asyncio.create_task(self._send_body(scope["state"]["send_piece"]))
        finally:
            self._call.close(self._call.generation.error)

    async def _send_body(self, send: Send) -> None:
        async def write(events: bytes) -> None:
            await send({"type": "http.response.body", "body": events, "more_body": True})

        await self._write_events(write)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def write_chunks(
    write: Write,
    call: Call,
    encode: Callable[[Sequence[tuple[int, SampleDelta]]], Iterable[bytes]],
    last: Callable[[], Any],
) -> None:
    """An answer's chunks as events, an error among them if there is one, and the end mark.

    encode: what has come, by choice, as JSON. last: the chunk behind all of them, None without one.
    """
    generation = call.generation
    try:
        while deltas := await generation.next_deltas():
            if events := [data_event(chunk) for chunk in encode(deltas)]:
                await write(b"".join(events))
        if (chunk := last()) is not None:
            await write(data_event(to_json(chunk)))
    except Exception as error:
        log_unexpected(error)
        await write(data_event(to_json(as_api_error(error).body())))
    await write(DONE)


def data_event(content: bytes) -> bytes:
    return b"data: %b\n\n" % content


def log_unexpected(error: BaseException) -> None:
    """The log gets what the client does not."""
    if as_api_error(error).code == "internal_error":
        logger.error("a request failed", exc_info=error)


def check_token_ids(tokenizer: Tokenizer, token_ids: Sequence[int], param: str) -> None:
    """Raises RequestError unless all are ids of the tokenizer; the model may have more, which mean nothing."""
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= tokenizer.vocab_size:
        bad = low if low < 0 else high
        limit = tokenizer.vocab_size - 1
        raise RequestError(f"{param} holds {shown(bad)}, which is out of the vocabulary; ids are 0 to {limit}", param)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 4)
