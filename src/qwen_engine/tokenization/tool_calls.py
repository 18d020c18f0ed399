"""Qwen3's tool calls (`<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`) in content that arrives in pieces.

Arguments are passed on as the model wrote them, so that the joined pieces are the whole whatever the pieces were:

- A call is announced once its name and the first key of its arguments (or the end of its object) have been read.
  Until then nothing is certain, and text that turns out to be no call is content, tag included.
- From there on it stays a call. What comes up to the end of the arguments, or a tag outside their strings, is theirs,
  even if it is broken or cut off. Arguments given as a JSON string are its content; missing or null ones are {}.
- Framing is not passed on: tags, the object around name and arguments, closing braces too many, and space that touches
  a call but no other text. All other text is content, also after the last call.

Nothing here raises, whatever the text. Used by `ChatOutputParser`.
"""

from __future__ import annotations

import enum
import json
import re
import uuid
from dataclasses import dataclass

from qwen_engine.tokenization.reasoning import TOOL_CALL_OPEN, partial_suffix

TOOL_CALL_CLOSE = "</tool_call>"

_SPACE = " \t\r\n"  # of JSON
_FRAMING = _SPACE + "}"  # may come between a call's object and the closing tag
_ARGUMENT_KEYS = ("arguments", "parameters")
_STRING_EVENT = re.compile(r'["\\]')
_CONTAINER_EVENT = re.compile(r'["{}\[\]<]')
_SCALAR_END = re.compile(r"[,}\s]")


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """index: of the call in the output, from 0. call_id: unique."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """The next piece of the arguments of call `index`."""

    index: int
    text: str


ToolDelta = ContentDelta | ToolCallStart | ToolArgumentsDelta


class ToolCallParser:
    """The calls in one output's content. With `parallel=False` calls after the first are left out."""

    def __init__(self, *, parallel: bool = True) -> None:
        self._parallel = parallel
        self._held = ""  # what may belong to a tag, to a call's framing, or to the space around a call
        self._touches_text = False  # content was shown right before `_held`
        self._call: _CallReader | None = None
        self._is_closing = False  # a call's object has ended, its closing tag may come
        self.num_calls = 0
        """Calls announced."""

    def feed(self, text: str) -> list[ToolDelta]:
        """What `text` makes certain."""
        deltas: list[ToolDelta] = []
        while text:
            if self._call is not None:
                text = self._read_call(self._call, text, deltas)
            elif self._is_closing:
                text = self._read_closing(text)
            else:
                text = self._read_content(text, deltas)
        return deltas

    def finish(self) -> list[ToolDelta]:
        """What was held back, once nothing more can follow."""
        deltas: list[ToolDelta] = []
        while self._call is not None:
            self._call.finish()
            deltas += self.feed(self._read_call(self._call, "", deltas))
        if not self._is_closing and (self._touches_text or not self.num_calls or self._held.strip()):
            self._show(self._held, deltas)
        self._held = ""
        return deltas

    def _read_content(self, text: str, deltas: list[ToolDelta]) -> str:
        """Shows text up to a tag and returns what follows the tag."""
        text = self._held + text
        start = text.find(TOOL_CALL_OPEN)
        end = len(text) - partial_suffix(text, TOOL_CALL_OPEN) if start < 0 else start
        shown = text[:end] if self._touches_text or text[:end].strip() else ""
        self._show(shown, deltas)
        self._held = text[len(shown) : end if start >= 0 else len(text)]
        if start < 0:
            return ""
        self._call = _CallReader()
        return text[start + len(TOOL_CALL_OPEN) :]

    def _read_call(self, call: _CallReader, text: str, deltas: list[ToolDelta]) -> str:
        """Shows what of the call is certain and returns the text that is not part of it."""
        rest = text[call.feed(text) :]
        if call.is_certain:
            self._show_call(call, deltas)
        if not call.has_ended:
            return rest
        self._call = None
        if call.is_certain:
            self._is_closing = True
        else:
            self._show(self._held + TOOL_CALL_OPEN, deltas)
            self._held = ""
        return call.unused + rest

    def _read_closing(self, text: str) -> str:
        text = self._held + text
        rest = text.lstrip(_FRAMING)
        if not rest or (rest != TOOL_CALL_CLOSE and TOOL_CALL_CLOSE.startswith(rest)):
            self._held = text
            return ""
        self._held = ""
        self._is_closing = False
        if rest.startswith(TOOL_CALL_CLOSE):
            return rest[len(TOOL_CALL_CLOSE) :]
        framing = text[: len(text) - len(rest)]
        return text[framing.rfind("}") + 1 :]

    def _show(self, text: str, deltas: list[ToolDelta]) -> None:
        if text:
            deltas.append(ContentDelta(text))
            self._touches_text = True

    def _show_call(self, call: _CallReader, deltas: list[ToolDelta]) -> None:
        if call.index is None:
            self._held = ""
            self._touches_text = False
            call.index = self.num_calls
            if self._parallel or not self.num_calls:
                self.num_calls += 1
                deltas.append(ToolCallStart(call.index, f"call_{uuid.uuid4().hex[:24]}", call.name or ""))
        arguments = call.take_arguments()
        if arguments and call.index < self.num_calls:
            deltas.append(ToolArgumentsDelta(call.index, arguments))


class _State(enum.Enum):
    OPEN = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    STRING = enum.auto()
    SCALAR = enum.auto()
    CONTAINER = enum.auto()
    ARGUMENTS = enum.auto()  # their object, up to its first key; then it is a CONTAINER
    TAG = enum.auto()  # what may be a tag inside the arguments
    NEXT = enum.auto()
    ENDED = enum.auto()


class _CallReader:
    """Reads one call's object, aware of strings.

    `unused` is what the parser has to read anew once reading has ended: all text of a call that is not certain, else
    the text after its arguments that turned out not to be the rest of its object.
    """

    def __init__(self) -> None:
        self.index: int | None = None  # given by the parser when it announces the call
        self.name: str | None = None
        self.is_certain = False
        self.unused = ""
        self._state = _State.OPEN
        self._key: str | None = None  # of the value being read; None before and in a key
        self._token = ""  # string, scalar or beginning of a tag
        self._depth = 0  # of the container
        self._is_quoted = False  # inside a string of the container
        self._is_escaped = False  # after a backslash in any string
        self._arguments = ""  # read and not taken yet
        self._has_arguments = False
        self._in_arguments = False
        self._is_whole = False  # its object has been closed

    @property
    def has_ended(self) -> bool:
        return self._state is _State.ENDED

    def feed(self, text: str) -> int:
        """Reads; returns how many characters are the call's: all of them unless it has ended."""
        position = 0
        while position < len(text) and not self.has_ended:
            start, state, is_argument = position, self._state, self._in_arguments
            position = self._step(text, start)
            if _State.TAG not in (state, self._state):  # a tag is kept once it is known not to be one
                self._keep(text[start:position], is_argument=is_argument)
            self._settle()
        return position

    def finish(self) -> None:
        """Nothing more can follow."""
        if self._state is _State.TAG:
            self._keep(self._token, is_argument=True)
        self._state = _State.ENDED

    def take_arguments(self) -> str:
        """What is new of the arguments."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _keep(self, text: str, *, is_argument: bool) -> None:
        if is_argument:
            self._arguments += text
        if not (is_argument and self.is_certain):
            self.unused += text

    def _settle(self) -> None:
        """After a step, once its text was kept."""
        if not self.is_certain and self.name is not None and self._has_arguments:
            self.is_certain = True
            self.unused = ""
        if self._is_whole:
            self.unused = ""

    def _step(self, text: str, position: int) -> int:
        """Reads at least a character or changes the state; returns the new position."""
        match self._state:
            case _State.STRING:
                return self._read_string(text, position)
            case _State.SCALAR:
                return self._read_scalar(text, position)
            case _State.CONTAINER:
                return self._read_container(text, position)
            case _State.TAG:
                return self._read_tag(text, position)
        char = text[position]
        if char in _SPACE:
            return position + 1
        match self._state, char:
            case _State.OPEN, "{":
                self._state = _State.FIRST_KEY
            case ((_State.FIRST_KEY | _State.KEY), '"'):
                self._key, self._token, self._state = None, char, _State.STRING
            case _State.COLON, ":":
                self._state = _State.VALUE
            case _State.VALUE, _:
                return self._begin_value(char, position)
            case _State.ARGUMENTS, "{" if not self._depth:
                self._depth = 1
            case _State.ARGUMENTS, '"' | "}":
                self._state = _State.CONTAINER
                self._has_arguments = True
                return position
            case _State.NEXT, ",":
                self._state = _State.KEY
            case ((_State.FIRST_KEY | _State.NEXT), "}") if self.name is not None:
                return self._end_object(position)
            case _:
                return self._end(position)
        return position + 1

    def _end(self, position: int) -> int:
        """Ends reading before the character at `position`, which does not fit."""
        self._state = _State.ENDED
        return position

    def _end_object(self, position: int) -> int:
        if not self._has_arguments:
            self._set_arguments("{}")
        self._state = _State.ENDED
        self._is_whole = True
        return position + 1

    def _set_arguments(self, arguments: str) -> None:
        self._arguments, self._has_arguments = arguments, True

    @property
    def _is_name(self) -> bool:
        return self._key == "name" and self.name is None

    @property
    def _is_arguments(self) -> bool:
        return self._key in _ARGUMENT_KEYS and not self._has_arguments

    def _begin_value(self, char: str, position: int) -> int:
        if char == '"':
            self._token, self._state = char, _State.STRING
            return position + 1
        if char not in "{[":
            self._token, self._state = "", _State.SCALAR
        elif self._is_name or (self._is_arguments and char == "["):
            return self._end(position)
        else:
            self._depth, self._is_quoted = 0, False
            self._in_arguments = self._is_arguments
            self._state = _State.ARGUMENTS if self._in_arguments else _State.CONTAINER
        return position

    def _read_string(self, text: str, position: int) -> int:
        end, is_closed = self._scan_string(text, position)
        self._token += text[position:end]
        if not is_closed:
            return end
        value = _decoded(self._token)
        if value is None or (self._is_name and not value.strip()):
            return self._end(end)
        if self._key is None:
            self._key, self._state = value, _State.COLON
            return end
        if self._is_name:
            self.name = value
        elif self._is_arguments:
            self._set_arguments(value if value.strip() else "{}")
        self._state = _State.NEXT
        return end

    def _scan_string(self, text: str, position: int) -> tuple[int, bool]:
        """(end of what was read inside a string, whether its closing quote was)."""
        if self._is_escaped:
            self._is_escaped = False
            return position + 1, False
        event = _STRING_EVENT.search(text, position)
        if event is None:
            return len(text), False
        self._is_escaped = event[0] == "\\"
        return event.end(), not self._is_escaped

    def _read_scalar(self, text: str, position: int) -> int:
        event = _SCALAR_END.search(text, position)
        end = len(text) if event is None else event.start()
        self._token += text[position:end]
        if event is None:
            return end
        if not _is_scalar(self._token) or self._is_name or (self._is_arguments and self._token != "null"):
            return self._end(end)
        if self._is_arguments:
            self._set_arguments("{}")
        self._state = _State.NEXT
        return end

    def _read_container(self, text: str, position: int) -> int:
        if self._is_quoted:
            end, is_closed = self._scan_string(text, position)
            self._is_quoted = not is_closed
            return end
        event = _CONTAINER_EVENT.search(text, position)
        if event is None:
            return len(text)
        match event[0]:
            case '"':
                self._is_quoted = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                if not self._depth:
                    self._in_arguments = False
                    self._state = _State.NEXT
            case _:
                if not self._in_arguments:
                    return self._end(event.start())
                self._token = ""
                self._keep(text[position : event.start()], is_argument=True)
                self._state = _State.TAG
                return event.start()
        return event.end()

    def _read_tag(self, text: str, position: int) -> int:
        """No JSON has `<` outside a string, so a tag there ends arguments that lack a bracket."""
        token = self._token + text[position]
        if token in (TOOL_CALL_OPEN, TOOL_CALL_CLOSE):
            self.unused += token
            self._state = _State.ENDED
            self._token = ""
        elif TOOL_CALL_OPEN.startswith(token) or TOOL_CALL_CLOSE.startswith(token):
            self._token = token
        else:
            self._keep(self._token, is_argument=True)
            self._state = _State.CONTAINER
            return position
        return position + 1


def _decoded(token: str) -> str | None:
    """Value of a JSON string, None if it is none. Halves of a UTF-16 pair become U+FFFD: no answer can carry them."""
    try:
        value: str = json.loads(token, strict=False)
    except ValueError:
        return None
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_scalar(token: str) -> bool:
    try:
        json.loads(token)
    except (ValueError, RecursionError):
        return False
    return True
