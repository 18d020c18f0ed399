"""`StructuredOutputs`: what the text of an output has to be. `tokenization/structured.py` compiles and enforces it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_engine.checks import checked_strings, refuse_unknown_names
from qwen_engine.errors import RequestError, shown, summary

MAX_GRAMMAR_CHARS = 65_536


@refuse_unknown_names
@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the text of an output has to be: exactly one of the fields but the last.

    Each is compiled when the request is made.

    json: matches this JSON schema (an object, or its text). json_object: any JSON object. regex: matches as a whole.
    choice: is one of these strings. grammar: is derived from `start` of a Lark grammar, or `root` of an EBNF one.
    tool_calls: is one call or several of these tools (OpenAI's objects), as Qwen3 writes them. With
    parallel_tool_calls=False it is one.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    tool_calls: str | Sequence[Mapping[str, Any]] | None = None
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        for name in ("json_object", "parallel_tool_calls"):
            if not isinstance(getattr(self, name), bool):
                raise _bad_structure(f"{name} is {shown(getattr(self, name))}; it must be true or false")
        if not self.parallel_tool_calls and self.tool_calls is None:
            raise _bad_structure("parallel_tool_calls is false, which says nothing without tool_calls")
        given = [
            name for name in ("json", "regex", "choice", "grammar", "tool_calls") if getattr(self, name) is not None
        ]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise _bad_structure(
                f"structured_outputs has {len(given)} constraints ({', '.join(given)}); it must have one of "
                "json, json_object, regex, choice, grammar, tool_calls"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.tool_calls is not None:
            object.__setattr__(self, "tool_calls", _tools_text(self.tool_calls))
        if self.choice is not None:
            choices = checked_strings("structured_outputs", self.choice, MAX_GRAMMAR_CHARS, MAX_GRAMMAR_CHARS)
            if not choices:
                raise _bad_structure("choice is empty; it must hold at least one string")
            object.__setattr__(self, "choice", choices)
        texts = self.choice if self.choice is not None else ("" if self.json_object else getattr(self, given[0]),)
        for text in texts:
            if not isinstance(text, str):
                raise _bad_structure(f"{given[0]} is {shown(text)}; it must be a string")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise _bad_structure(f"{given[0]} holds a lone surrogate (half of a UTF-16 pair)") from None
        if (length := sum(map(len, texts))) > MAX_GRAMMAR_CHARS:
            raise _bad_structure(f"{given[0]} has {length} characters; at most {MAX_GRAMMAR_CHARS} are allowed")


def as_structured_outputs(value: Any) -> StructuredOutputs:
    if isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise _bad_structure(f"structured_outputs is {type(value).__name__}; it must be an object")
    known = StructuredOutputs.__dataclass_fields__
    if unknown := [key for key in value if key not in known]:
        raise _bad_structure(f"structured_outputs has unknown key {shown(unknown[0])}; known: {', '.join(known)}")
    return StructuredOutputs(**value)


def _schema_text(schema: Any) -> str:
    """A JSON schema as text, properties in their order."""
    schema, text = _json_text("json", schema)
    if not isinstance(schema, Mapping):
        raise _bad_structure(f"json is {shown(schema)}; a JSON schema must be an object")
    return text


def _tools_text(tools: Any) -> str:
    """Tools as text. Of each, the function's name and the schema of its parameters count."""
    tools, text = _json_text("tool_calls", tools)
    if not isinstance(tools, list | tuple) or not tools:
        raise _bad_structure(f"tool_calls is {shown(tools)}; it must be a list of tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise _bad_structure(f"tool_calls holds {shown(tool)}; a tool must have a function with a name")
        if not isinstance(function.get("parameters"), Mapping | None):
            raise _bad_structure(f"parameters of {shown(function['name'])} must be a JSON schema")
    return text


def _json_text(name: str, value: Any) -> tuple[Any, str]:
    """A value, or the one that its text stands for, and its text."""
    try:
        if isinstance(value, str):
            value = json.loads(value)
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise _bad_structure(f"{name} is no JSON: {summary(error)}") from error


def _bad_structure(message: str) -> RequestError:
    return RequestError(message, param="structured_outputs")
