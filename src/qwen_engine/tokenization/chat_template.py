"""Chat messages to prompt text: checks and normalises OpenAI-style messages, then renders the checkpoint's template.

The template language is Jinja with the settings and helpers Hugging Face templates expect; rendering with jinja2
directly keeps transformers (and torch) out of start-up. Messages are normalised so that every spelling a client may
use of the same history (null fields, text parts, arguments as JSON strings) gives the same prompt. Whatever is wrong
with a request is a RequestError, never another exception. Called by `Tokenizer` only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from qwen_engine.errors import ConfigError, RequestError, shown

if TYPE_CHECKING:
    import jinja2

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_RESERVED = frozenset(
    {"messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "return_tensors", "return_dict", "raise_exception", "strftime_now"}
)
_END_OF_FINAL_MESSAGE = "\ue000end-of-final-message\ue000"  # private-use characters: no chat contains it


class ChatTemplate:
    """One checkpoint's template. False when the checkpoint has none.

    `source` is tokenizer_config.json's `chat_template`: a Jinja source, or a list of named ones of which `default` and
    `tool_use` are known. `variables` (bos_token, eos_token, ...) are visible to the template.
    """

    def __init__(self, source: str | Sequence[Mapping[str, str]] | None, *, variables: Mapping[str, str]) -> None:
        if not source or isinstance(source, str):
            self._sources = {"default": source} if source else {}
        else:
            self._sources = {item["name"]: item["template"] for item in source}
        self._variables = dict(variables)

    def __bool__(self) -> bool:
        return bool(self._sources)

    @cached_property
    def _compiled(self) -> dict[str, "jinja2.Template"]:
        import jinja2

        environment = _environment()
        try:
            return {name: environment.from_string(source) for name, source in self._sources.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(f"the checkpoint's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """Prompt text of the chat.

        With `continue_final_message` the prompt stops at the end of the last message's content, which must be an
        assistant's, so that the model goes on writing it. RequestError names the field at fault: `messages`, `tools`,
        `chat_template_kwargs` or `continue_final_message`.
        """
        chat = normalize_messages(messages)
        template_kwargs = _check_kwargs(template_kwargs)
        tools = _check_tools(tools)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                    param="continue_final_message",
                )
            if chat[-1]["role"] != "assistant":
                raise RequestError(
                    f"continue_final_message needs a final assistant message; it is of role {chat[-1]['role']!r}",
                    param="continue_final_message",
                )
            chat[-1]["content"] += _END_OF_FINAL_MESSAGE

        compiled = self._compiled
        template = (
            (compiled.get("tool_use") if tools else None) or compiled.get("default") or next(iter(compiled.values()))
        )
        arguments = {**self._variables, **template_kwargs}
        try:
            text = template.render(messages=chat, tools=tools, add_generation_prompt=add_generation_prompt, **arguments)
        except Exception as error:  # a template may raise anything on a chat it does not foresee
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        if not continue_final_message:
            return text
        content, marker, _ = text.rpartition(_END_OF_FINAL_MESSAGE)
        if not marker:
            raise RequestError("the chat template does not show the final message", param="continue_final_message")
        return content


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of `messages` in the one spelling templates handle. Raises RequestError(param="messages").

    Null fields are left out; content is always a string (text parts joined, null and missing are ""); `developer` is
    `system`, which is the only one Qwen3 templates know; `reasoning` is `reasoning_content`; tool call arguments are
    mappings.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        _refuse(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        _refuse("messages is empty; send at least one")
    return [_normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(f"{where} must be an object, not {type(message).__name__}")
    normal = {key: value for key, value in message.items() if value is not None}
    role = normal.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(f"{where}.role is {shown(role)}; it must be one of {', '.join(_ROLES)}")
    normal["role"] = _ROLES[role]
    normal["content"] = _content_text(normal.get("content", ""), f"{where}.content")
    if "reasoning" in normal:
        normal.setdefault("reasoning_content", normal.pop("reasoning"))
    if not isinstance(normal.get("reasoning_content", ""), str):
        _refuse(f"{where}.reasoning_content must be a string")
    if "tool_calls" in normal:
        calls = normal["tool_calls"]
        if not isinstance(calls, list | tuple):
            _refuse(f"{where}.tool_calls must be a list, not {type(calls).__name__}")
        normal["tool_calls"] = [
            _normalize_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return normal


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        _refuse(f"{where} must be a string, a list of parts or null, not {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            _refuse(f"{where}[{index}] is of type {shown(kind)}; this model reads only parts of type 'text'")
        if not isinstance(part.get("text"), str):
            _refuse(f"{where}[{index}].text must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _normalize_tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        _refuse(f"{where} must be an object, not {type(call).__name__}")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(f"{where}.function must be an object with a name")
    function = {**function, "arguments": _parse_arguments(function.get("arguments"), f"{where}.function.arguments")}
    return {**call, "function": function} if "function" in call else function


def _parse_arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not valid JSON: {error}", param="messages") from error
    if not isinstance(arguments, Mapping):
        _refuse(f"{where} must be a JSON object, not {type(arguments).__name__}")
    return arguments


def _check_kwargs(template_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if template_kwargs is None:
        return {}
    if not isinstance(template_kwargs, Mapping) or not all(isinstance(key, str) for key in template_kwargs):
        raise RequestError("chat_template_kwargs must be an object with string keys", param="chat_template_kwargs")
    if taken := sorted(_RESERVED & template_kwargs.keys()):
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(taken)}: these are arguments of their own",
            param="chat_template_kwargs",
        )
    return template_kwargs


def _check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects (JSON schemas of functions)", param="tools")
    return list(tools)


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, param="messages")


def _environment() -> "jinja2.Environment":
    """The Jinja dialect of Hugging Face chat templates, in a sandbox since a template is code from a checkpoint."""
    from jinja2 import TemplateError, ext, nodes, parser, sandbox

    class GenerationTag(ext.Extension):
        """{% generation %} marks assistant text for training; a prompt only needs what is inside."""

        tags = frozenset({"generation"})

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json  # Jinja's own escapes HTML characters
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
