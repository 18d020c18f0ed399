"""POST /v1/chat/completions: messages through the chat template, output through `ChatOutput`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qwen_engine.frontend.output_processor import SampleDelta
from qwen_engine.request import RequestSpec
from qwen_engine.server.chat_output import ChatDelta, ChatOutput
from qwen_engine.server.logprobs import chat_logprobs, prompt_logprobs
from qwen_engine.server.protocol import ChatBody
from qwen_engine.server.service import Call, Service, with_done


async def chat_completions(service: Service, body: ChatBody, request: Request) -> Response:
    body.check()
    call = await open_chat(service, body, request, id_prefix="chatcmpl-")
    answer = _Answer(service, body, call)
    return await (call.stream(with_done(answer.chunks())) if body.stream else call.whole(answer.whole))


async def open_chat(service: Service, body: ChatBody, request: Request, *, id_prefix: str) -> Call:
    """Sends a checked chat to the engine."""
    return await service.open(
        request,
        id_prefix=id_prefix,
        model=body.model,
        streams=bool(body.stream),
        num_sequences=max(1, body.n or 1),
        timeout_s=body.timeout,
        limit=(body.limit[0] if body.limit[1] is not None else "max_completion_tokens", body.limit[1]),
        prepare=lambda: _specs(service, body),
    )


def new_output(body: ChatBody, call: Call) -> ChatOutput:
    """The reader of one choice's text."""
    return ChatOutput(
        call.generation.states[0].prompt_token_ids,
        tools=body.shown_tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def _specs(service: Service, body: ChatBody) -> Sequence[RequestSpec]:
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling_params(service.options.sampling_defaults, max_tokens=body.limit[1], logprobs=num_logprobs)
    prompt = {
        "prompt_token_ids": service.tokenizer.apply_chat_template(body.messages, **body.template_options),
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt,
    }
    spec = service.inputs.process(prompt, params)
    spec.sequence(0)  # refuses malformed fields
    return [spec]


class Message:
    """An assistant message, put together from deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def add(self, deltas: Sequence[ChatDelta]) -> None:
        for delta in deltas:
            self._content.append(delta.content or "")
            self._reasoning.append(delta.reasoning_content or "")
            for call in delta.tool_calls or ():
                self._add_call(call)

    @property
    def content(self) -> str:
        return "".join(self._content)

    def as_json(self) -> dict[str, Any]:
        """Null content only where something else stands for it; no empty lists."""
        reasoning = "".join(self._reasoning)
        has_other = bool(reasoning or self._tool_calls)
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if has_other else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._tool_calls:
            message["tool_calls"] = [call for _, call in sorted(self._tool_calls.items())]
        return message

    def _add_call(self, part: dict[str, Any]) -> None:
        function = part["function"]
        if "id" in part:
            start = {"id": part["id"], "type": part["type"], "function": {"name": function["name"], "arguments": ""}}
            self._tool_calls[part["index"]] = start
        self._tool_calls[part["index"]]["function"]["arguments"] += function.get("arguments", "")


class _Answer:
    """One call's answer, whole or in chunks."""

    def __init__(self, service: Service, body: ChatBody, call: Call) -> None:
        self._tokenizer = service.tokenizer
        self._body = body
        self._call = call

    def whole(self) -> dict[str, Any]:
        (state,) = self._call.generation.states
        choices = []
        for sample in state.output().outputs:
            output, message = new_output(self._body, self._call), Message()
            message.add(output.feed(sample.text))
            deltas, reason = output.finish(sample.finish_reason or "abort")
            message.add(deltas)
            choice = {
                "index": sample.index,
                "message": message.as_json(),
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

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        choices: dict[int, _StreamedChoice] = {}
        while deltas := await self._call.generation.next_deltas():
            for index, delta in deltas:
                if index not in choices:
                    choices[index] = _StreamedChoice(new_output(self._body, self._call))
                    yield self._chunk(index, {"role": "assistant", "content": ""})
                for part in choices[index].parts(delta):
                    yield self._chunk(index, *part)
        if self._body.wants_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._call.usage()}

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
        if not self._body.logprobs or not token_ids:
            return None
        return {"content": chat_logprobs(self._tokenizer, token_ids, entries, self._body.top_logprobs or 0)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._call.id, "object": kind, "created": self._call.created, "model": self._call.model}


class _StreamedChoice:
    """One choice of a stream. Tokens wait for the text they are part of, and go with its first chunk."""

    def __init__(self, output: ChatOutput) -> None:
        self._output = output
        self._waiting: SampleDelta | None = None

    def parts(self, delta: SampleDelta) -> list[tuple[dict[str, Any], SampleDelta | None, str | None]]:
        """What to send for a delta: (message delta, tokens, finish reason), ready for chunks."""
        tokens = delta if self._waiting is None else self._waiting.then(delta)
        deltas, finish_reason = self._output.feed(delta.text), None
        if delta.finish_reason is not None:
            last, finish_reason = self._output.finish(delta.finish_reason)
            deltas = [*deltas, *last]
        parts: list[tuple[dict[str, Any], SampleDelta | None, str | None]] = []
        for chat_delta in deltas:
            parts.append((delta_json(chat_delta), None if parts else tokens, None))
        if parts:
            tokens = SampleDelta(tokens.index, "", (), (), tokens.finish_reason, tokens.stop_reason)
        if finish_reason is not None:
            parts.append(({}, tokens, finish_reason))
        self._waiting = tokens
        return parts


def delta_json(delta: ChatDelta) -> dict[str, Any]:
    """A delta as a chunk carries it."""
    if delta.tool_calls is not None:
        return {"tool_calls": list(delta.tool_calls)}
    if delta.reasoning_content is not None:
        return {"reasoning_content": delta.reasoning_content}
    return {"content": delta.content}
