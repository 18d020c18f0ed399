"""How far the counted repetitions of a grammar expand: `a{100}` to 100, `(a{100}b){5}` to 505.

The grammar library bounds its own work, but writes out counted repetitions of regular expressions in full when the text
first reaches them. A million is a hang, so they are counted before. Sizes are estimates from above that do not depend
on the exact dialect: every character or class is 1. What would make the count uncertain is refused.

The same goes for lengths of strings that have to match a pattern too. Alone, neither is written out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qwen_engine.errors import RequestError, shown

MAX_EXPANDED_SIZE = 10_000
MAX_PATTERN_LENGTH = 2_000
PARAM = "structured_outputs"

_REGEX_TOKEN = re.compile(
    r"(?P<repeat>\{\d+(?:,\d*)?\})"
    r"|(?P<flags>\(\?[a-zA-Z-]+\))"
    r"|(?P<open>\((?:\?(?:[a-zA-Z-]*:|P?<\w+>))?)"
    r"|(?P<close>\))"
    r"|(?P<uncounted>[*+?])"
    r"|(?P<atom>\\(?:[pPxu]\{[^}]*\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|.)",
    re.DOTALL,
)
_LARK_TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*|%(?:ignore|import)\b|%llguidance \{\})"
    r'|(?P<string>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/(?P<regex_flags>[a-z]*))"
    r"|(?P<definition>[?!]?[A-Za-z_]\w*(?:\[[^\]\n]*\])?(?:\.\d+)?\s*:)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<repeat>\{\d+(?:,\d*)?\})"
    r"|(?P<open>[(\[])|(?P<close>[)\]])"
    r"|(?P<refused>[%<~])"
    r"|(?P<atom>.)",
)
_Token = tuple[str, int]  # kind, and the size of an atom or the bound of a repetition


def check_regex(pattern: str) -> None:
    """Raises RequestError if a regular expression expands too far."""
    _check_size(_regex_size(pattern), pattern)


def check_schema(schema: Any) -> None:
    """Raises RequestError if a pattern anywhere in a JSON schema expands too far, or may have to for its length."""
    has_pattern, lengths = False, [0]
    for key, value in _entries(schema):
        patterns = [value] if key == "pattern" else value if key == "patternProperties" else ()
        for pattern in patterns:
            if isinstance(pattern, str):
                check_regex(pattern)
        has_pattern |= key in ("pattern", "patternProperties", "format")
        if key in ("minLength", "maxLength") and isinstance(value, int | float):
            lengths.append(int(value))
    if has_pattern and max(lengths) > MAX_PATTERN_LENGTH:
        raise RequestError(
            f"the JSON schema has patterns and a length of {shown(max(lengths))}; "
            f"with patterns or formats, lengths may be up to {MAX_PATTERN_LENGTH}",
            PARAM,
        )


def _entries(schema: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of all objects in a JSON value."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            yield from value.items()
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def check_lark(grammar: str) -> None:
    """Raises RequestError if a regular expression or a terminal expands too far, with the terminals it names.

    Rules (in lower case) are not expanded by the library.
    """
    definitions: dict[str, list[re.Match[str]]] = {}
    tokens: list[re.Match[str]] = []
    for token in _LARK_TOKEN.finditer(grammar):
        kind, text = token.lastgroup, token[0]
        if kind == "refused":
            raise RequestError(f"grammar uses {text!r}; directives, token references and ~ are not supported", PARAM)
        if kind == "definition":
            name = re.sub(r"\W.*", "", text.lstrip("?!"), flags=re.DOTALL)
            tokens = definitions.setdefault(name, [])
        elif kind == "regex":
            if "x" in token["regex_flags"]:
                raise RequestError(f"regular expression {shown(text)} uses flag x, which is not supported", PARAM)
            check_regex(_regex_of(token))
        tokens.append(token)
    sizes: dict[str, int] = {}
    for name in definitions:
        if not name.islower():
            _check_size(_terminal_size(name, definitions, sizes), name)


def _terminal_size(name: str, definitions: Mapping[str, list[re.Match[str]]], sizes: dict[str, int]) -> int:
    if name not in sizes:
        sizes[name] = 1  # for a terminal that names itself, which the library refuses

        def lengths() -> Iterator[_Token]:
            for token in definitions.get(name, ()):
                match token.lastgroup:
                    case "string":
                        yield "atom", len(token[0])
                    case "regex":
                        yield "atom", _regex_size(_regex_of(token))
                    case "name":
                        yield "atom", _terminal_size(token[0], definitions, sizes)
                    case "repeat":
                        yield "repeat", _bound(token[0])
                    case "open" | "close":
                        yield token.lastgroup, 0

        sizes[name] = _expanded_size(lengths())
    return sizes[name]


def _regex_of(token: re.Match[str]) -> str:
    return token[0][1 : token.start("regex_flags") - token.start() - 1]


def _regex_size(pattern: str) -> int:
    return _expanded_size(_regex_tokens(pattern))


def _regex_tokens(pattern: str) -> Iterator[_Token]:
    for token in _REGEX_TOKEN.finditer(pattern):
        kind, text = token.lastgroup, token[0]
        if kind in ("flags", "open") and "x" in text.partition("<")[0]:
            raise RequestError(f"regular expression {shown(pattern)} uses flag x, which is not supported", PARAM)
        if kind == "repeat":
            yield kind, _bound(text)
        elif kind in ("open", "close"):
            yield kind, 0
        elif kind == "atom":
            yield kind, 1


def _expanded_size(tokens: Iterable[_Token]) -> int:
    outer: list[int] = []  # sizes of the open groups so far, but for the innermost
    total = last = 0  # of the innermost group, and of its latest item
    for kind, value in tokens:
        if kind == "open":
            outer.append(total)
            total = last = 0
        elif kind == "close":
            last = total
            total += outer.pop() if outer else 0
        elif kind == "repeat":
            total += last * (value - 1)
            last *= value
        else:
            total, last = total + value, value
    return total + sum(outer)


def _bound(text: str) -> int:
    """Of {n}, {n,} and {n,m}; {0} still costs its item."""
    return max(1, *(int(number[:20]) for number in re.findall(r"\d+", text)))


def _check_size(size: int, text: str) -> None:
    if size > MAX_EXPANDED_SIZE:
        raise RequestError(
            f"{shown(text)} expands to {shown(size)} items; counted repetitions may expand to {MAX_EXPANDED_SIZE}",
            PARAM,
        )
