"""One chat answer's text, as it arrives, in the parts the OpenAI API knows: reasoning, content, tool calls.

The joined deltas depend on the text only, not on how it was cut into pieces; streamed and whole answers are therefore
the same. Called by the server, one object per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_engine.tokenization.reasoning import ReasoningSplitter
from qwen_engine.tokenization.tool_calls import (
    ContentDelta,
    ToolArgumentsDelta,
    ToolCallParser,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


ChatDelta = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta


class ChatOutputParser:
    """Parses one answer.

    prompt: the rendered prompt, or its end from the last turn start on (`generation_prefix`).
    tools: the prompt offers tools. tool_choice: as in the request; with "none" a tag in the answer is plain text.
    parallel_tool_calls: False leaves out calls after the first.
    """

    def __init__(
        self,
        prompt: str,
        *,
        tools: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
    ) -> None:
        reads_calls = tools and tool_choice != "none"
        # A call that has to be made comes after the thinking; one inside it would not be enforced.
        self._reasoning = ReasoningSplitter(prompt, detect_calls=reads_calls and tool_choice in (None, "auto"))
        self._calls = ToolCallParser(parallel=parallel_tool_calls) if reads_calls else None
        self._is_named_choice = isinstance(tool_choice, Mapping)

    def feed(self, text: str) -> list[ChatDelta]:
        """What `text` makes certain. No delta is empty."""
        return self._deltas(*self._reasoning.feed(text))

    def finish(self, finish_reason: str) -> tuple[list[ChatDelta], str]:
        """What was held back, and the reason to report: "tool_calls" for a stop after calls.

        A call that the request named is what the client expects anyway, and OpenAI keeps "stop" there.
        """
        deltas = self._deltas(*self._reasoning.finish())
        if self._calls is None:
            return deltas, finish_reason
        deltas += self._calls.finish()
        if finish_reason == "stop" and self._calls.num_calls and not self._is_named_choice:
            finish_reason = "tool_calls"
        return deltas, finish_reason

    def _deltas(self, reasoning: str, content: str) -> list[ChatDelta]:
        deltas: list[ChatDelta] = [ReasoningDelta(reasoning)] if reasoning else []
        if self._calls is not None:
            deltas += self._calls.feed(content)
        elif content:
            deltas.append(ContentDelta(content))
        return deltas
