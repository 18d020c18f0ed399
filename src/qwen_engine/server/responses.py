"""POST /v1/responses: text in and out of chats in the form of OpenAI's newer API. Nothing is stored."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qwen_engine.server.chat import Message, new_output, open_chat
from qwen_engine.server.errors import as_api_error
from qwen_engine.server.json_response import to_json
from qwen_engine.server.protocol import ChatBody, ResponsesBody
from qwen_engine.server.service import Call, Service, log_unexpected


async def responses(service: Service, body: ResponsesBody, request: Request) -> Response:
    chat = body.as_chat()
    chat.check()
    call = await open_chat(service, chat, request, id_prefix="resp_")
    answer = _Answer(body, chat, call)
    return await (call.stream(answer.events()) if body.stream else call.whole(answer.whole))


class _Answer:
    """One call's answer, whole or as events."""

    def __init__(self, body: ResponsesBody, chat: ChatBody, call: Call) -> None:
        self._body = body
        self._chat = chat
        self._call = call
        self._sequence_numbers = itertools.count()
        self._item_id = "msg_" + call.id.removeprefix("resp_")

    def whole(self) -> dict[str, Any]:
        (state,) = self._call.generation.states
        (sample,) = state.output().outputs
        output, message = new_output(self._chat, self._call), Message()
        message.add(output.feed(sample.text))
        deltas, reason = output.finish(sample.finish_reason or "abort")
        message.add(deltas)
        return self._finished(message.content, reason)

    async def events(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events():
                yield event
        except Exception as error:
            log_unexpected(error)
            failure = as_api_error(error)
            yield self._event("error", code=failure.code, message=failure.message, param=failure.param)

    async def _events(self) -> AsyncIterator[bytes]:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
        yield self._event("response.content_part.added", **place, part=_part(""))
        output, message, reason = new_output(self._chat, self._call), Message(), "abort"
        while deltas := await self._call.generation.next_deltas():
            for _, delta in deltas:
                parts = output.feed(delta.text)
                if delta.finish_reason is not None:
                    last, reason = output.finish(delta.finish_reason)
                    parts = [*parts, *last]
                message.add(parts)
                for part in parts:
                    if part.content:
                        yield self._event("response.output_text.delta", **place, delta=part.content, logprobs=[])
        text = message.content
        final = self._finished(text, reason)
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=final["output"][0])
        kind = "response.completed" if final["status"] == "completed" else "response.incomplete"
        yield self._event(kind, response=final)

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": next(self._sequence_numbers), **fields}
        return f"event: {kind}\n".encode() + b"data: " + to_json(content) + b"\n\n"

    def _finished(self, text: str, reason: str) -> dict[str, Any]:
        status = "completed" if reason == "stop" else "incomplete"
        usage = self._call.usage()
        response = self._response(status)
        response["output"] = [self._item(status, text)]
        response["completed_at"] = int(time.time())
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens" if reason == "length" else reason}
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
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
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, status: str, text: str | None = None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
