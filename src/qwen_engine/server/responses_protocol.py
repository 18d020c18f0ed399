"""The body of /v1/responses, and how it becomes that of a chat: items to messages, flat function tools to nested ones.

An assistant's turn is one message there and several items here (its thinking, its text, its calls), so items that
follow each other are gathered. Raises ApiError with the item's place for what a chat cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from qwen_engine.errors import shown
from qwen_engine.server.errors import ApiError, unsupported
from qwen_engine.server.protocol import (
    IGNORED,
    Body,
    ChatBody,
    Items,
    JsonSchema,
    Map,
    ResponseFormat,
    SamplingBody,
    Tool,
)
from qwen_engine.tokenization.tokenizer import is_unicode

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class ResponsesChat(ChatBody):
    """A chat that came to /v1/responses."""

    client_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }


class ReasoningOptions(Body):
    effort: str | None = None
    summary: Any = Field(None, description=IGNORED)


class TextFormat(Body):
    """`ResponseFormat` without its nesting."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def as_response_format(self) -> ResponseFormat:
        schema = None if self.schema_ is None else JsonSchema(name=self.name or "", schema=self.schema_)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Any = Field(None, description=IGNORED)


class ResponsesBody(SamplingBody):
    """POST /v1/responses. Nothing is stored: a follow-up sends the whole conversation.

    Sampling parameters that OpenAI's API has not are taken all the same, as vLLM takes them there.
    """

    model: str | None = None
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Items[dict[str, Any]] | None = Field(None, description="Functions, in the flat form.")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    previous_response_id: str | None = Field(None, description="Not supported: nothing is stored.")
    background: bool | None = None
    timeout: float | None = Field(None, description="As in completions.")
    priority: int | None = None
    cache_salt: str | None = None
    metadata: Map[str] | None = Field(None, description="Returned as it came.")
    user: Any = Field(None, description=IGNORED)
    store: Any = Field(None, description=IGNORED)
    service_tier: Any = Field(None, description=IGNORED)
    safety_identifier: Any = Field(None, description=IGNORED)
    prompt_cache_key: Any = Field(None, description=IGNORED)
    include: Any = Field(None, description=IGNORED)
    stream_options: Any = Field(None, description=IGNORED)

    @field_validator("instructions")
    @classmethod
    def _check_instructions(cls, text: str | None) -> str | None:
        """Here, as they are part of the messages afterwards."""
        if text is not None and not is_unicode(text):
            raise ValueError("it holds a lone surrogate (half of a UTF-16 pair)")
        return text

    def as_chat(self) -> ChatBody:
        """The same request as a chat. Raises ApiError for what has no counterpart."""
        if self.previous_response_id is not None:
            raise unsupported("previous_response_id", "responses are not stored; send the whole conversation as input")
        if self.background:
            raise unsupported("background", "background is not supported")
        if self.truncation == "auto":
            raise unsupported("truncation", "truncation auto is not supported")
        choice = self.tool_choice
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
        text_format = None if self.text is None else self.text.format
        return ResponsesChat(
            model=self.model,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            stream=self.stream,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            tools=[Tool(**_chat_tool(tool, f"tools[{index}]")) for index, tool in enumerate(self.tools or ())] or None,
            tool_choice=choice if self.tools or choice != "auto" else None,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if text_format is None else text_format.as_response_format(),
            timeout=self.timeout,
            priority=self.priority,
            cache_salt=self.cache_salt,
            **{name: getattr(self, name) for name in SamplingBody.model_fields},
        )

    def _messages(self) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        return [*messages, *_messages_of(self.input)]


def _messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages that the items are."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.get("type") or "message":
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                name = "content" if item.get("content") else "summary"
                parts = _text_parts(item.get(name) or [], f"{where}.{name}")
                text = "".join(part["text"] for part in parts)
                messages.append({"role": "assistant", "content": None, "reasoning_content": text})
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                output = _content(item.get("output"), f"{where}.output")
                call_id = _text(item, "call_id", where)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case kind:
                raise unsupported(
                    where,
                    f"{where} is of type {shown(kind)}; message, reasoning, function_call and function_call_output are "
                    "supported",
                )
    return messages


def _chat_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A function tool as chats have it, with what it holds as it came but for null fields."""
    if tool.get("type") != "function":
        kind = shown(tool.get("type"))
        raise unsupported(f"{where}.type", f"{where} is of type {kind}; only functions are supported")
    _text(tool, "name", where)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    role, content = item.get("role"), _content(item.get("content"), f"{where}.content")
    last = messages[-1] if messages else {}
    if role == "assistant" and "reasoning_content" in last and last["content"] is None and "tool_calls" not in last:
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(content: Any, where: str) -> Any:
    """Text parts under the name that chats know. What else it may be is for the chat to refuse."""
    return _text_parts(content, where) if isinstance(content, list) else content


def _text_parts(parts: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(parts, list):
        raise ApiError(400, f"{where} is {shown(parts)}; it must be a list of parts", param=where)
    return [_text_part(part, f"{where}[{index}]") for index, part in enumerate(parts)]


def _text_part(part: Any, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS:
        raise unsupported(where, f"{where} is of type {shown(kind)}; only text is supported")
    return {"type": "text", "text": _text(part, "text", where)}


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{name} is {shown(value)}; it must be a string", param=f"{where}.{name}")
    return value
