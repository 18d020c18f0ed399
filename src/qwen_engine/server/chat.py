"""POST /v1/chat/completions: messages through the chat template, output through `ChatOutputParser`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qwen_engine.frontend.output_processor import SampleDelta
from qwen_engine.outputs import CompletionOutput
from qwen_engine.request import RequestSpec
from qwen_engine.server.chat_output import Message, delta_json
from qwen_engine.server.json_response import JsonTemplate, to_json
from qwen_engine.server.logprobs import chat_logprobs, prompt_logprobs
from qwen_engine.server.protocol import ChatBody
from qwen_engine.server.service import Call, Service, Write, write_chunks
from qwen_engine.tokenization.chat_output import ChatDelta, ChatOutputParser, ReasoningDelta
from qwen_engine.tokenization.reasoning import ReasoningSplitter, generation_prefix
from qwen_engine.tokenization.tool_calls import ContentDelta


async def chat_completions(service: Service, body: ChatBody, request: Request) -> Response:
    body.check()
    with body.naming_fields():
        call = await open_chat(service, body, request, id_prefix="chatcmpl-")
        answer = _Answer(service, body, call)
        if body.stream:
            return await call.stream(answer.write_events)
        return await call.whole(answer.whole)


async def open_chat(service: Service, body: ChatBody, request: Request, *, id_prefix: str) -> Call:
    """Sends a checked chat to the engine."""
    return await service.open(
        request,
        body,
        id_prefix=id_prefix,
        num_sequences=max(1, body.n or 1),
        prepare=lambda: _specs(service, body),
        new_splitter=lambda spec: _new_splitter(service, body, spec),
    )


def new_parser(service: Service, body: ChatBody, call: Call) -> ChatOutputParser:
    """The reader of one choice's text."""
    return ChatOutputParser(
        generation_prefix(service.tokenizer, call.generation.states[0].prompt_token_ids),
        tools=bool(body.shown_tools),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.may_call_several,
    )


def parse_whole(parser: ChatOutputParser, sample: CompletionOutput) -> tuple[list[ChatDelta], str]:
    """All deltas of a sample that has ended, and the finish reason to report."""
    deltas = parser.feed(sample.text)
    last, reason = parser.finish(sample.finish_reason or "abort")
    return [*deltas, *last], reason


def _new_splitter(service: Service, body: ChatBody, spec: RequestSpec) -> ReasoningSplitter:
    prefix = generation_prefix(service.tokenizer, spec.prompt_token_ids)
    return ReasoningSplitter(prefix, detect_calls=bool(body.shown_tools) and not body.forced_tools)


def _specs(service: Service, body: ChatBody) -> Sequence[RequestSpec]:
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt = {
        "prompt_token_ids": service.tokenizer.apply_chat_template(body.messages, **body.template_options),
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt,
    }
    params = body.sampling_params(service.options.sampling_defaults, max_tokens=body.limit[1], logprobs=num_logprobs)
    spec = service.inputs.process(prompt, params)
    spec.sequence(0)  # refuses malformed fields
    return [spec]


class _Answer:
    """One call's answer, whole or in chunks."""

    def __init__(self, service: Service, body: ChatBody, call: Call) -> None:
        self._service = service
        self._body = body
        self._call = call
        self._alias = service.options.reasoning_alias
        self._streamed: dict[int, _StreamedChoice] = {}

    def whole(self) -> dict[str, Any]:
        (state,) = self._call.generation.states
        choices = []
        for sample in state.output().outputs:
            deltas, reason = parse_whole(self._new_parser(), sample)
            message = Message()
            message.add(deltas)
            choice = {
                "index": sample.index,
                "message": message.as_json(reasoning_alias=self._alias),
                "logprobs": self._logprobs(sample.token_ids, sample.logprobs or ()),
                "finish_reason": reason,
                "stop_reason": sample.stop_reason,
            }
            if self._body.return_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        answer = {
            **self._head("chat.completion"),
            "system_fingerprint": None,
            "choices": choices,
            "usage": self._call.usage(),
        }
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs or ())
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(state.prompt_token_ids)
        return answer

    async def write_events(self, write: Write) -> None:
        await write_chunks(write, self._call, self._encode, self._last_chunk)

    def _encode(self, deltas: Sequence[tuple[int, SampleDelta]]) -> Iterator[bytes]:
        """The chunks of what has come, as JSON."""
        for index, delta in deltas:
            if index not in self._streamed:
                self._streamed[index] = _StreamedChoice(self._new_parser(), self._templates(index))
                yield to_json(self._chunk(index, {"role": "assistant", "content": ""}))
            choice = self._streamed[index]
            for part, tokens, finish_reason in choice.parts(delta):
                template = choice.templates.get(type(part))
                if template is not None:
                    yield template.fill(part.text)
                else:
                    fields = {} if part is None else delta_json(part, reasoning_alias=self._alias)
                    yield to_json(self._chunk(index, fields, tokens, finish_reason))

    def _last_chunk(self) -> dict[str, Any] | None:
        if not self._body.wants_usage:
            return None
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self._call.usage()}

    def _templates(self, index: int) -> dict[type, JsonTemplate]:
        """The chunks of text, by the kind of their delta, where nothing else in them could differ."""
        if self._body.logprobs or self._body.return_token_ids or self._body.wants_running_usage:
            return {}

        def template(kind: type[ContentDelta] | type[ReasoningDelta]) -> JsonTemplate:
            return JsonTemplate(lambda text: self._chunk(index, delta_json(kind(text), reasoning_alias=self._alias)))

        return {kind: template(kind) for kind in (ReasoningDelta, ContentDelta)}

    def _new_parser(self) -> ChatOutputParser:
        return new_parser(self._service, self._body, self._call)

    def _chunk(
        self, index: int, delta: dict[str, Any], tokens: SampleDelta | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        """tokens: those the chunk accounts for."""
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if tokens is not None:
            choice["logprobs"] = self._logprobs(tokens.token_ids, tokens.logprobs)
            if self._body.return_token_ids:
                choice["token_ids"] = list(tokens.token_ids)
            if finish_reason is not None:
                choice["stop_reason"] = tokens.stop_reason
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._body.wants_running_usage:
            chunk["usage"] = self._call.usage()
        return chunk

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[Any]) -> dict[str, Any] | None:
        num_top = self._call.generation.states[0].spec.params.logprobs
        if num_top is None or not token_ids:
            return None
        return {"content": chat_logprobs(self._service.tokenizer, token_ids, entries, num_top)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._call.id, "object": kind, "created": self._call.created, "model": self._call.model}


class _StreamedChoice:
    """One choice of a stream. Tokens wait for the text they are part of, and go with its first chunk."""

    def __init__(self, parser: ChatOutputParser, templates: dict[type, JsonTemplate]) -> None:
        self.templates = templates
        self._parser = parser
        self._waiting: SampleDelta | None = None

    def parts(self, delta: SampleDelta) -> list[tuple[ChatDelta | None, SampleDelta | None, str | None]]:
        """What to send for a delta: (message delta, tokens, finish reason), one for each chunk."""
        tokens = delta if self._waiting is None else self._waiting.then(delta)
        deltas, finish_reason = self._parser.feed(delta.text), None
        if delta.finish_reason is not None:
            last, finish_reason = self._parser.finish(delta.finish_reason)
            deltas = [*deltas, *last]
        parts: list[tuple[ChatDelta | None, SampleDelta | None, str | None]] = []
        for chat_delta in deltas:
            parts.append((chat_delta, None if parts else tokens, None))
        if finish_reason is not None:
            rest = SampleDelta(tokens.index, "", (), (), tokens.finish_reason, tokens.stop_reason) if parts else tokens
            parts.append((None, rest, finish_reason))
        self._waiting = None if parts else tokens
        return parts
