"""POST /v1/responses: chats in the form of OpenAI's newer API. Nothing is stored.

An answer is a list of items: thinking, text and function calls, in the order in which the model wrote them. `_Output`
makes them from deltas, with the events that tell of them, so the items of a stream are those of a whole answer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qwen_engine.server.chat import new_parser, open_chat, parse_whole
from qwen_engine.server.errors import as_api_error
from qwen_engine.server.json_response import to_json
from qwen_engine.server.protocol import ChatBody
from qwen_engine.server.responses_protocol import ResponsesBody
from qwen_engine.server.service import Call, Service, Write, log_unexpected
from qwen_engine.tokenization.chat_output import ChatDelta, ReasoningDelta
from qwen_engine.tokenization.tool_calls import ContentDelta, ToolArgumentsDelta, ToolCallStart

Event = tuple[str, dict[str, Any]]
"""Its type and the fields of its own."""

_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


async def responses(service: Service, body: ResponsesBody, request: Request) -> Response:
    chat = body.as_chat()
    chat.check()
    with chat.naming_fields():
        call = await open_chat(service, chat, request, id_prefix="resp_")
        answer = _Answer(service, body, chat, call)
        return await (call.stream(answer.write_events) if body.stream else call.whole(answer.whole))


class _Answer:
    """One call's answer, whole or as events."""

    def __init__(self, service: Service, body: ResponsesBody, chat: ChatBody, call: Call) -> None:
        self._body = body
        self._chat = chat
        self._call = call
        self._parser = new_parser(service, chat, call)
        self._output = _Output(call.id.removeprefix("resp_"))
        self._sequence_numbers = itertools.count()
        text_format = None if body.text is None else body.text.format
        self._format = (
            {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True, exclude_none=True)
        )

    def whole(self) -> dict[str, Any]:
        (state,) = self._call.generation.states
        (sample,) = state.output().outputs
        deltas, reason = parse_whole(self._parser, sample)
        for delta in deltas:
            self._output.add(delta)
        self._output.finish(_status(reason))
        return self._finished(reason)

    async def write_events(self, write: Write) -> None:
        try:
            async for kind, fields in self._events():
                await write(self._encoded(kind, fields))
        except Exception as error:
            log_unexpected(error)
            failure = as_api_error(error)
            fields = {"code": failure.code, "message": failure.message, "param": failure.param}
            await write(self._encoded("error", fields))

    async def _events(self) -> AsyncIterator[Event]:
        yield "response.created", {"response": self._response("in_progress")}
        yield "response.in_progress", {"response": self._response("in_progress")}
        reason = "abort"
        while deltas := await self._call.generation.next_deltas():
            for _, delta in deltas:
                parts = self._parser.feed(delta.text)
                if delta.finish_reason is not None:
                    last, reason = self._parser.finish(delta.finish_reason)
                    parts = [*parts, *last]
                for part in parts:
                    for event in self._output.add(part):
                        yield event
        for event in self._output.finish(_status(reason)):
            yield event
        yield f"response.{_status(reason)}", {"response": self._finished(reason)}

    def _encoded(self, kind: str, fields: dict[str, Any]) -> bytes:
        content = {"type": kind, "sequence_number": next(self._sequence_numbers), **fields}
        return f"event: {kind}\n".encode() + b"data: " + to_json(content) + b"\n\n"

    def _finished(self, reason: str) -> dict[str, Any]:
        status, usage = _status(reason), self._call.usage()
        response = self._response(status)
        response["output"] = self._output.items
        response["completed_at"] = int(time.time())
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens" if reason == "length" else reason}
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._call.generation.states[0].spec.params
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._call.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._call.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self._chat.reasoning_effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": self._format},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


class _Output:
    """The items of an answer. `add` and `finish` return the events that tell of what they did.

    A delta of another kind than the last one's ends the open item and begins another. An answer without any text is an
    empty message.
    """

    def __init__(self, id_suffix: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._id_suffix = id_suffix
        self._is_open = False
        self._pieces: list[str] = []  # of the open item's text or arguments

    def add(self, delta: ChatDelta) -> list[Event]:
        match delta:
            case ReasoningDelta(text):
                return [*self._need("reasoning"), self._add_text("response.reasoning_text.delta", text)]
            case ContentDelta(text):
                return [*self._need("message"), self._add_text("response.output_text.delta", text, logprobs=[])]
            case ToolCallStart():
                call = {"call_id": delta.call_id, "name": delta.name, "arguments": ""}
                return [*self._close("completed"), *self._open("function_call", call)]
            case ToolArgumentsDelta(_, text):
                self._pieces.append(text)
                return [("response.function_call_arguments.delta", {**self._place(), "delta": text})]

    def finish(self, status: str) -> list[Event]:
        """Ends the last item, which the end of the answer may have cut off."""
        events = [] if self.items else self._need("message")
        return [*events, *self._close(status)]

    def _need(self, kind: str) -> list[Event]:
        """Sees to it that an item with text of this kind is open."""
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        events = [*self._close("completed"), *self._open(kind, {"summary": []} if kind == "reasoning" else {})]
        part = _text_part(kind, "")
        return [*events, ("response.content_part.added", {**self._place(), "content_index": 0, "part": part})]

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        item_id = f"{_ID_PREFIXES[kind]}_{self._id_suffix}_{len(self.items)}"
        item: dict[str, Any] = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item["role"] = "assistant"
        if kind != "function_call":
            item["content"] = []
        self.items.append(item)
        self._pieces = []
        self._is_open = True
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _add_text(self, kind: str, text: str, **more: Any) -> Event:
        self._pieces.append(text)
        return kind, {**self._place(), "content_index": 0, "delta": text, **more}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item, place, text = self.items[-1], self._place(), "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": text}
        else:
            part, place = _text_part(item["type"], text), {**place, "content_index": 0}
            item["content"] = [part]
            if item["type"] == "reasoning":
                yield "response.reasoning_text.done", {**place, "text": text}
            else:
                yield "response.output_text.done", {**place, "text": text, "logprobs": []}
            yield "response.content_part.done", {**place, "part": part}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _text_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(reason: str) -> str:
    return "completed" if reason in ("stop", "tool_calls") else "incomplete"
