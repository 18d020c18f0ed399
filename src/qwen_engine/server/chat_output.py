"""What `ChatOutputParser` reads out of a chat's text, in the form of the chat endpoints: deltas and whole messages.

The thinking is `reasoning_content`; with `reasoning_alias` it is `reasoning` too, as other servers name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwen_engine.tokenization.chat_output import ChatDelta, ReasoningDelta
from qwen_engine.tokenization.tool_calls import ContentDelta, ToolArgumentsDelta, ToolCallStart


def delta_json(delta: ChatDelta, *, reasoning_alias: bool) -> dict[str, Any]:
    """A delta as a chunk carries it. Clients join what repeats, so a call's id and name come once."""
    match delta:
        case ReasoningDelta(text):
            return _reasoning_fields(text, reasoning_alias)
        case ContentDelta(text):
            return {"content": text}
        case ToolCallStart(index):
            return {"tool_calls": [{"index": index, **_call(delta, "")}]}
        case ToolArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class Message:
    """An assistant message, put together from deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []  # with the pieces of their arguments

    def add(self, deltas: Sequence[ChatDelta]) -> None:
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ContentDelta(text):
                    self._content.append(text)
                case ToolCallStart():
                    self._calls.append((delta, []))
                case ToolArgumentsDelta(index, text):
                    self._calls[index][1].append(text)

    def as_json(self, *, reasoning_alias: bool) -> dict[str, Any]:
        """Null content only where something else stands for it; no empty lists."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        has_other = bool(reasoning or self._calls)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if has_other else "")}
        if reasoning:
            message |= _reasoning_fields(reasoning, reasoning_alias)
        if self._calls:
            message["tool_calls"] = [_call(start, "".join(pieces)) for start, pieces in self._calls]
        return message


def _reasoning_fields(text: str, alias: bool) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text} if alias else {"reasoning_content": text}


def _call(start: ToolCallStart, arguments: str) -> dict[str, Any]:
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": arguments}}
