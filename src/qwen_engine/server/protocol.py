"""Bodies of requests, as pydantic models: what is accepted, of which type, and what is ignored on purpose.

Unknown fields are refused; types are not converted ("5" is no number). null means "not given" everywhere. Ranges are
checked where `SamplingParams` checks them, so HTTP and Python refuse the same values with the same words.

A body has room for millions of errors, each of a kilobyte, and only the first is told: lists stop at their first bad
item (`Items`), and objects of the client's own keys are limited (`Map`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from qwen_engine.errors import RequestError, shown
from qwen_engine.request import MAX_LOGIT_BIAS, SamplingParams
from qwen_engine.server.errors import ApiError, unsupported

MAX_PROMPTS = 2048
MAX_TIMEOUT_S = 86400.0
IGNORED = "Accepted and ignored."


def _check_size(content: object) -> object:
    if isinstance(content, dict) and len(content) > MAX_LOGIT_BIAS:
        raise ValueError(f"it has {len(content)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    return content


_Item = TypeVar("_Item")
Items = Annotated[list[_Item], Field(fail_fast=True)]
Map = Annotated[dict[str, _Item], BeforeValidator(_check_size)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, content: object) -> object:
        """The others would be an error each."""
        if not isinstance(content, dict):
            return content
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in content if name not in known]
        return {name: value for name, value in content.items() if name in known or name == unknown[0]}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="The schema is always kept.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def constraint(self) -> dict[str, Any] | None:
        """As fields of `StructuredOutputs`."""
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class StructuredOutputsBody(Body):
    """vLLM's name for what the text of an output has to be: exactly one of the fields."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="Lark or EBNF.")

    @property
    def constraint(self) -> dict[str, Any]:
        """As fields of `StructuredOutputs`. Raises ApiError unless there is one."""
        given = self.model_dump(by_alias=True, exclude_none=True)
        given = {name: value for name, value in given.items() if value is not False}
        if len(given) != 1:
            names = ", ".join(field.alias or name for name, field in type(self).model_fields.items())
            reason = f"structured_outputs has {len(given)} constraints; it must have one of {names}"
            raise ApiError(400, reason, param="structured_outputs")
        return given


class SamplingBody(Body):
    """Sampling parameters that everything which generates takes: those of `SamplingParams`, by their names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: Map[float] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None


class GenerationBody(SamplingBody):
    """Fields that completions and chat completions share."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = Field(None, description="Accepted only if equal to n.")
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Adds token_ids to every choice.")
    priority: int | None = Field(None, description="Lower goes first, with --scheduling-policy priority.")
    cache_salt: str | None = Field(None, description="Requests share cached prefixes with those of an equal salt.")
    timeout: float | None = Field(None, description="Seconds after which the request ends, with what there is by then.")
    user: Any = Field(None, description=IGNORED)
    metadata: Any = Field(None, description=IGNORED)
    store: Any = Field(None, description=IGNORED)
    service_tier: Any = Field(None, description=IGNORED)
    safety_identifier: Any = Field(None, description=IGNORED)
    prompt_cache_key: Any = Field(None, description=IGNORED)
    client_names: ClassVar[Mapping[str, str]] = {}
    """Fields that the client has sent under other names."""

    @property
    def prompt_field(self) -> str:
        """The client's name of the field that the prompt came in."""
        raise NotImplementedError

    @property
    def limit(self) -> tuple[str, int | None]:
        """The output limit, and the client's name of its field."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ApiError for combinations that no field's type can exclude."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported(
                "best_of", f"best_of is {shown(self.best_of)}; only n, which is {self.n or 1}, is supported"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.timeout is not None and not 0 < self.timeout <= MAX_TIMEOUT_S:
            reason = f"timeout is {self.timeout:g}; it must be in (0, {MAX_TIMEOUT_S:g}] seconds"
            raise ApiError(400, reason, param="timeout")
        self._check_format()
        if len(self.constraints) > 1:
            first, second, *_ = self.constraints
            reason = f"{first} and {second} both say what the output has to be; give one of them"
            raise ApiError(400, reason, param=second)

    def _check_format(self) -> None:
        given = self.response_format
        if given is not None and (given.type == "json_schema") != (given.json_schema is not None):
            name = self._client_name("response_format")
            reason = f"{name} of type {given.type} {'has' if given.json_schema else 'needs'} a schema"
            raise ApiError(400, reason, param=name)

    @property
    def constraints(self) -> dict[str, dict[str, Any]]:
        """What the output has to be: the field that says so → its meaning as fields of `StructuredOutputs`.

        One at most, once `check` has passed.
        """
        found = {}
        if self.response_format is not None and (constraint := self.response_format.constraint) is not None:
            found[self._client_name("response_format")] = constraint
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.constraint
        return found

    @contextlib.contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Makes RequestErrors raised inside name fields as the client does; for once `check` has passed."""
        try:
            yield
        except RequestError as error:
            raise error.renamed(self._field_names) from error

    @property
    def _field_names(self) -> dict[str, str]:
        """What a RequestError calls a field → what the client calls it, or what the client has sent instead."""
        names = {**self.client_names, "prompt": self.prompt_field, "max_tokens": self.limit[0]}
        for name in self.constraints:
            names["structured_outputs"] = "tools" if name == "tool_choice" else name
        return names

    def _client_name(self, name: str) -> str:
        return self.client_names.get(name, name)

    def sampling_params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """`defaults`, what the body gives, and `more`, the later over the earlier. Raises RequestError."""
        names = ("n", *SamplingBody.model_fields, "prompt_logprobs")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        structure = next(iter(self.constraints.values()), None)
        return SamplingParams(**{**defaults, **given, "structured_outputs": structure, **more})

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = Field(None, description="Default 16; 0 together with echo only scores the prompt.")
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = Field(None, description="Not supported.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: object) -> object:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt:
            if len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
                raise ValueError(f"it holds {len(prompt)} prompts; at most {MAX_PROMPTS} fit in a request")
            kinds = {*map(type, prompt)}
            if kinds in ({str}, {int}):
                return prompt
            if kinds == {list} and all(ids and {*map(type, ids)} == {int} for ids in prompt):
                return prompt
        raise ValueError("it must be a text, token ids, or a list of several of either kind, and not empty")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def prompt_field(self) -> str:
        return "prompt"

    @property
    def limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    @property
    def only_scores(self) -> bool:
        return self.max_tokens == 0 and bool(self.echo)

    def check(self) -> None:
        super().check()
        if self.suffix not in (None, ""):
            raise unsupported("suffix", "suffix is not supported")


class Tool(BaseModel):
    """Passed to the chat template as it came, so whatever it holds is kept."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: dict[str, Any]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Items[dict[str, Any]]
    max_tokens: int | None = Field(None, description="Default: up to the context limit.")
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens, and stronger than it.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description='"none" turns thinking off; other values are ignored.')
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = Field(None, description="Default: unless continue_final_message is true.")
    continue_final_message: bool | None = None
    verbosity: Any = Field(None, description=IGNORED)
    modalities: Any = Field(None, description=IGNORED)

    def check(self) -> None:
        self._check_tool_choice()
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.shown_tools and not self.forced_tools and self.constraints:
            (name,) = self.constraints
            reason = f"{name} leaves no room for calls of the tools; leave them out, or set tool_choice to none"
            raise unsupported(name, reason)

    def _check_tool_choice(self) -> None:
        if self.tool_choice in (None, "none"):
            return
        if not self.tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        if self.tool_choice != "auto" and not self.forced_tools:
            raise ApiError(
                400,
                f"tool_choice is {shown(self.tool_choice)}; it must be none, auto, required, or "
                '{"type": "function", "function": {"name": NAME}} with the name of one of the tools',
                param="tool_choice",
            )

    @property
    def constraints(self) -> dict[str, dict[str, Any]]:
        found = super().constraints
        if self.forced_tools:
            found["tool_choice"] = {"tool_calls": self.forced_tools, "parallel_tool_calls": self.may_call_several}
        return found

    @property
    def template_options(self) -> dict[str, Any]:
        """The keyword options of `Tokenizer.apply_chat_template`."""
        continues = bool(self.continue_final_message)
        thinking = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {
            "tools": self.shown_tools,
            "add_generation_prompt": not continues
            if self.add_generation_prompt is None
            else self.add_generation_prompt,
            "continue_final_message": continues,
            "chat_template_kwargs": {**thinking, **(self.chat_template_kwargs or {})},
        }

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call, as they came."""
        if self.tool_choice == "none" or not self.tools:
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """Those of which one has to be called."""
        tools = self.shown_tools or []
        if self.tool_choice in (None, "auto", "required"):
            return tools if self.tool_choice == "required" else []
        name = _named_function(self.tool_choice)
        return [tool for tool in tools if name is not None and tool["function"].get("name") == name]

    @property
    def may_call_several(self) -> bool:
        """A function that is named has to be called once."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, dict)

    @property
    def prompt_field(self) -> str:
        return self._client_name("messages")

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return self._client_name("max_completion_tokens"), self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def _field_names(self) -> dict[str, str]:
        return {**super()._field_names, "logprobs": "top_logprobs"}


def _named_function(tool_choice: str | dict[str, Any]) -> str | None:
    """The function that has to be called; None if that is not what the choice says."""
    if isinstance(tool_choice, str) or tool_choice.get("type") != "function":
        return None
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages with the options of chat completions."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    tools: Items[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")

    @property
    def template_options(self) -> dict[str, Any]:
        return ChatBody(
            messages=[],
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        ).template_options


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Items[int]


class AbortBody(Body):
    """POST /v1/abort: ends a request in flight, by its X-Request-Id or by the id in its answer."""

    request_id: str
