"""Where thinking ends and the answer begins, in the text of one output as it arrives.

A Qwen3 output is `<think>\\n…\\n</think>\\n\\n` and then content, or content alone; some templates open or close the
block in the prompt already, so the state to start from is read off the rendered prompt, never off request options.

Invariants: every character fed comes out once, in order, as reasoning, content or markup (tags and the line breaks
around them); the parts depend on the text only, not on how it was cut into pieces. Used by `ChatOutputParser`, and by
`OutputText` to keep stop strings out of thinking.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from qwen_engine.tokenization.tokenizer import Tokenizer

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
TOOL_CALL_OPEN = "<tool_call>"
TURN_START = "<|im_start|>"

_MAX_LINE_BREAKS = 2  # that separate the block from the answer
_MAX_SPACE_CHARS = 8  # between the parts of the beginning of a tool call; bounds what is held back


class Part(enum.Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    MARKUP = "markup"


class Thinking(enum.Enum):
    """What the prompt says about thinking: open or closed block, or nothing yet."""

    OPEN = "open"
    CLOSED = "closed"
    UNDECIDED = "undecided"

    @classmethod
    def of_prompt(cls, prompt: str) -> Thinking:
        """Judges by the text after the last turn start. An answer that has begun there counts as closed."""
        turn = prompt.rpartition(TURN_START)[2]
        opened, closed = turn.rfind(THINK_OPEN), turn.rfind(THINK_CLOSE)
        if opened > closed:
            return cls.OPEN
        _, _, answer = turn.partition("\n")  # after the line with the role
        return cls.CLOSED if closed >= 0 or answer.strip() else cls.UNDECIDED


class _State(enum.Enum):
    START = enum.auto()  # a tag may come
    AFTER_OPEN = enum.auto()  # a line break may come
    REASONING = enum.auto()
    AFTER_CLOSE = enum.auto()  # line breaks may come
    CONTENT = enum.auto()


class ReasoningSplitter:
    """Splits one output. `prompt`: the rendered prompt, or its end from the last turn start on.

    detect_calls: a tool call that begins while the block is still open (the tag, then the beginning of a JSON object
    with a key) ends the thinking; a tag that is merely mentioned does not.
    """

    def __init__(self, prompt: str, *, detect_calls: bool = False) -> None:
        thinking = Thinking.of_prompt(prompt)
        self._detect_calls = detect_calls
        self._tags = (THINK_CLOSE, TOOL_CALL_OPEN) if detect_calls else (THINK_CLOSE,)
        self._state = _State.CONTENT if thinking is Thinking.CLOSED else _State.START
        # Where START leads without a tag. A model may repeat the tag that its prompt ends with.
        self._is_open = thinking is Thinking.OPEN
        self._expects_line_break = self._is_open and prompt.endswith(THINK_OPEN)
        self._held = ""
        self._num_line_breaks = 0
        self._num_undecided_tokens = 0
        self.num_reasoning_tokens = 0
        """Tokens fed up to the one that ended the thinking; 0 if there was none."""

    def feed(self, text: str, num_tokens: int = 1) -> tuple[str, str]:
        """(reasoning, content) that `text`, which `num_tokens` tokens brought, makes certain."""
        return _joined(self.split(text, num_tokens))

    def finish(self) -> tuple[str, str]:
        """(reasoning, content) that was held back, once nothing more can follow."""
        return _joined(self.flush())

    def split(self, text: str, num_tokens: int = 1) -> list[tuple[Part, str]]:
        """`feed` with nothing left out: the text in order, each piece with what it is. Pieces are not empty."""
        if self._state is _State.CONTENT:
            return [(Part.CONTENT, text)] if text else []
        self._count(num_tokens)
        rest, self._held = self._held + text, ""
        parts: list[tuple[Part, str]] = []
        while rest:
            state = self._state
            part, length = self._advance(rest)
            if length:
                parts.append((part, rest[:length]))
                rest = rest[length:]
            elif self._state is state:
                self._held = rest
                break
        return parts

    def flush(self) -> list[tuple[Part, str]]:
        """`finish` with nothing left out."""
        held, self._held = self._held, ""
        part, parts = Part.CONTENT, []
        if self._state is _State.REASONING or (self._state is _State.START and self._is_open):
            part = Part.REASONING
            self._count_undecided()
            if self._state is _State.START and self._expects_line_break and held.startswith("\n"):
                parts.append((Part.MARKUP, "\n"))
                held = held[1:]
        self._state = _State.CONTENT
        return [*parts, (part, held)] if held else parts

    def _count(self, num_tokens: int) -> None:
        if self._state is _State.START:
            self._num_undecided_tokens += num_tokens
        elif self._state in (_State.AFTER_OPEN, _State.REASONING):
            self.num_reasoning_tokens += num_tokens

    def _count_undecided(self) -> None:
        self.num_reasoning_tokens += self._num_undecided_tokens
        self._num_undecided_tokens = 0

    def _advance(self, rest: str) -> tuple[Part, int]:
        """What the first characters of `rest` are and how many; 0 with an unchanged state waits for more."""
        match self._state:
            case _State.START:
                return self._start(rest)
            case _State.AFTER_OPEN:
                self._state = _State.REASONING
                return Part.MARKUP, int(rest[0] == "\n")
            case _State.REASONING:
                return self._reason(rest)
            case _State.AFTER_CLOSE:
                if rest[0] == "\n" and self._num_line_breaks < _MAX_LINE_BREAKS:
                    self._num_line_breaks += 1
                    return Part.MARKUP, 1
                self._state = _State.CONTENT
                return Part.CONTENT, len(rest)
            case _State.CONTENT:
                return Part.CONTENT, len(rest)

    def _start(self, rest: str) -> tuple[Part, int]:
        begun = rest.lstrip()
        if begun.startswith(THINK_OPEN):
            self._state = _State.AFTER_OPEN
            self._count_undecided()
            return Part.MARKUP, len(rest) - len(begun) + len(THINK_OPEN)
        if THINK_OPEN.startswith(begun):
            return Part.MARKUP, 0
        if not self._is_open:
            self._state = _State.CONTENT
        else:
            self._state = _State.AFTER_OPEN if self._expects_line_break else _State.REASONING
            self._count_undecided()
        return Part.MARKUP, 0

    def _reason(self, rest: str) -> tuple[Part, int]:
        if "<" not in rest:  # where every tag begins
            return Part.REASONING, _without_line_break(rest, len(rest))
        close = rest.find(THINK_CLOSE)
        tag, is_call = self._find_call(rest, len(rest) if close < 0 else close)
        if is_call:
            end = tag
        elif tag >= 0:  # it may become a call
            return Part.REASONING, _without_line_break(rest, tag)
        elif close >= 0:
            end = close
        else:
            held = max(partial_suffix(rest, tag) for tag in self._tags)
            return Part.REASONING, _without_line_break(rest, len(rest) - held)
        length = _without_line_break(rest, end)
        if length:
            return Part.REASONING, length
        if is_call:
            self._state = _State.CONTENT
            return Part.MARKUP, end
        self._state = _State.AFTER_CLOSE
        return Part.MARKUP, end + len(THINK_CLOSE)

    def _find_call(self, rest: str, limit: int) -> tuple[int, bool]:
        """(index of the first tag before `limit` that is or may be a call's, whether it is one); -1 without one."""
        start = rest.find(TOOL_CALL_OPEN, 0, limit) if self._detect_calls else -1
        while start >= 0:
            is_call = _is_call(rest[start + len(TOOL_CALL_OPEN) :])
            if is_call is not False:
                return start, is_call is True
            start = rest.find(TOOL_CALL_OPEN, start + 1, limit)
        return -1, False


def generation_prefix(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> str:
    """The prompt's text from its last turn start on: what `ReasoningSplitter` needs of a prompt given as ids."""
    turn_start = tokenizer.token_id(TURN_START)
    start = len(prompt_token_ids) - 1
    while start > 0 and prompt_token_ids[start] != turn_start:
        start -= 1
    return tokenizer.decode(prompt_token_ids[max(start, 0) :], skip_special_tokens=False)


def partial_suffix(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with, short of the whole tag."""
    start = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while start >= 0 and not tag.startswith(text[start:]):
        start = text.find(tag[0], start + 1)
    return len(text) - start if start >= 0 else 0


def _joined(parts: list[tuple[Part, str]]) -> tuple[str, str]:
    reasoning = content = ""
    for part, text in parts:
        if part is Part.REASONING:
            reasoning += text
        elif part is Part.CONTENT:
            content += text
    return reasoning, content


def _without_line_break(text: str, end: int) -> int:
    """`end`, or one less where the text before it ends with a line break."""
    return end - 1 if end and text[end - 1] == "\n" else end


def _is_call(text: str) -> bool | None:
    """Whether `text`, which follows a tag, begins a JSON object with a key; None while that is open."""
    for char in '{"':
        begun = text.lstrip()
        if len(text) - len(begun) > _MAX_SPACE_CHARS:
            return False
        if not begun:
            return None
        if begun[0] != char:
            return False
        text = begun[1:]
    return True
