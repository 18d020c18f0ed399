"""Input of /v1/responses as a chat: items to messages, flat function tools to nested ones.

An assistant's turn is one message there and several items here (its thinking, its text, its calls), so items that
follow each other are gathered. Raises ApiError with the item's place for what a chat cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qwen_engine.errors import shown
from qwen_engine.server.errors import ApiError, unsupported

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


def chat_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
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
