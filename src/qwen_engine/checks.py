"""What options and parameters may be: the checks that `config`, `request` and `structured_outputs` share."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

from qwen_engine.errors import RequestError, UnknownParameterError, shown, suggestion

_Class = TypeVar("_Class")


def is_integer(value: object) -> TypeGuard[int]:
    """A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Python's own numbers and lists in place of a scalar or array of numpy or torch; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def refuse_unknown_names(cls: type[_Class]) -> type[_Class]:
    """Has a call of the class with a name that it does not know raise UnknownParameterError."""
    init = cls.__init__

    @functools.wraps(init)
    def checked_init(self: _Class, *args: Any, **options: Any) -> None:
        known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        for name in options:
            if name not in known:
                hint = suggestion(name, known)
                raise UnknownParameterError(f"unknown parameter {shown(name)} of {cls.__name__}; {hint}", param=name)
        init(self, *args, **options)

    cls.__init__ = checked_init  # type: ignore[method-assign]
    return cls


def check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{']' if high < math.inf else ')'}"
    if not is_number(value) or not abs(value) <= sys.float_info.max:
        raise RequestError(f"{name} is {shown(value)}; it must be a finite number in {bounds}", param=name)
    if not (low < value if open_low else low <= value) or not value <= high:
        raise RequestError(f"{name} is {value}; it must be in {bounds}", param=name)


def check_integer(name: str, value: object, low: int, high: int) -> None:
    if not is_integer(value):
        raise RequestError(f"{name} is {shown(value)}; it must be an integer", param=name)
    if not low <= value <= high:
        limit = f"at least {low}" if value < low else f"at most {high}"
        raise RequestError(f"{name} is {shown(value)}; it must be {limit}", param=name)


def checked_strings(name: str, value: Any, max_count: int, max_chars: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} is {type(value).__name__}; it must be a list of strings", param=name)
    if len(value) > max_count:
        raise RequestError(f"{name} has {len(value)} entries; at most {max_count} are allowed", param=name)
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} holds {shown(text)}; every entry must be a non-empty string", param=name)
        if len(text) > max_chars:
            raise RequestError(f"{name} holds a string of {len(text)} characters; at most {max_chars}", param=name)
    return tuple(value)


def checked_token_ids(name: str, value: Any, max_count: int) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise RequestError(f"{name} is {type(value).__name__}; it must be a list of token ids", param=name)
    if len(value) > max_count:
        raise RequestError(f"{name} has {len(value)} entries; at most {max_count} are allowed", param=name)
    token_ids = tuple(map(plain, value))
    for token_id in token_ids:
        if not is_integer(token_id):
            raise RequestError(f"{name} holds {shown(token_id)}; every entry must be a token id", param=name)
    return token_ids
