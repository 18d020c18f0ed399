"""Generated chat text as parts of a message: the seam between text and what the chat endpoints send.

`ChatOutput` is fed the text of one choice as it comes and says what it adds to the message. Deltas joined are the
message, and do not depend on how the text was cut, so a whole answer is one `feed` and one `finish`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """An addition to an assistant message; only one field is set. tool_calls: in OpenAI's form for streams."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Sequence[dict[str, Any]] | None = None


class ChatOutput:
    """One choice of a chat. All text is content; reasoning and tool calls are not told apart yet.

    prompt_token_ids: the rendered prompt, which may have opened or closed a thinking block already.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        tools: Sequence[dict[str, Any]] | None,
        tool_choice: str | dict[str, Any] | None,
        parallel_tool_calls: bool,
    ) -> None:
        pass

    def feed(self, text: str) -> list[ChatDelta]:
        """The next text of the choice; what it adds."""
        return [ChatDelta(content=text)] if text else []

    def finish(self, finish_reason: str) -> tuple[list[ChatDelta], str]:
        """The choice has ended; what was held back, and the finish reason to report."""
        return [], finish_reason
