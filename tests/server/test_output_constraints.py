"""Structured output and enforced calls as clients get them: a random model, held to what the request says."""

from __future__ import annotations

import json
import re
import threading
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from fault_tools import wait_until
from server_tools import Server

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "What is a list?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class Item(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["list", "dict"]
    size: Annotated[int, pydantic.Field(ge=0, le=99)]
    name: Annotated[str, pydantic.Field(max_length=4)]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


TOOLS = [tool("f", city={"enum": ["Rome", "東京"]}), tool("g", count={"type": "integer", "minimum": 1, "maximum": 9})]
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "item", "schema": Item.model_json_schema()}}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def ids(server: Server) -> dict[str, str]:
    """Of tokens, as keys of `logit_bias`."""
    texts = ("<|im_end|>", "}", "<think>", "</think>", "\n")
    return {text: str(server.ask("/tokenize", {"prompt": text}).json["tokens"][0]) for text in texts}


@pytest.fixture(scope="module")
def short(ids: dict[str, str]) -> dict[str, float]:
    """Ends things wherever the grammar allows it: a random model would go on for as long as it may."""
    return {ids["<|im_end|>"]: 100, ids["}"]: 100}


@pytest.fixture(autouse=True)
def idle_afterwards(server: Server) -> None:
    yield
    wait_until(server.is_idle)


def chat(server: Server, **options: Any) -> dict[str, Any]:
    """A whole answer's only choice, once its stream was seen to bring the same."""
    body = {"messages": MESSAGES, "max_tokens": 200, "seed": 3, **options}
    answer = server.ask(CHAT, body)
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    message: dict[str, Any] = {}
    reasons = []
    for event in server.stream(CHAT, body):
        (part,) = event["choices"]
        for name, value in part["delta"].items():
            if name == "tool_calls":
                message.setdefault(name, []).extend(value)
            else:
                message[name] = message.get(name, "") + value
        reasons.append(part["finish_reason"])
    expected = choice["message"]
    assert (message["content"] or None) == expected["content"]
    assert message.get("reasoning_content") == expected.get("reasoning_content")
    assert calls_of(message.get("tool_calls", ())) == calls_of(expected.get("tool_calls", ()))
    assert [reason for reason in reasons if reason] == [choice["finish_reason"]]
    return choice


def calls_of(parts: Any) -> list[tuple[str, str]]:
    """(name, arguments) of calls, or of the deltas that they came in."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if "id" in part:
            calls.append((part["function"]["name"], part["function"]["arguments"]))
        else:
            name, arguments = calls.pop()
            calls.append((name, arguments + part["function"]["arguments"]))
    return calls


def test_the_openai_package_parses_what_its_schema_asked_for(client):
    options = {"model": "tiny", "messages": MESSAGES, "response_format": Item, "max_tokens": 300}
    completion = client.chat.completions.parse(**options, seed=1, extra_body=NO_THINKING)
    assert isinstance(completion.choices[0].message.parsed, Item)
    assert completion.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**options, seed=0, extra_body=NO_THINKING) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Item)
    response = client.responses.parse(
        model="tiny", input="x", text_format=Item, max_output_tokens=300, reasoning={"effort": "none"}
    )
    assert isinstance(response.output_parsed, Item)
    assert response.text.format.to_dict()["schema"]["properties"].keys() == {"kind", "size", "name"}


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"structured_outputs": {"choice": ["yes", "no", "東京"]}}, lambda text: text in ("yes", "no", "東京")),
        ({"structured_outputs": {"regex": "[a-c]{3,5}(-[0-9]){2}"}}, re.compile("[a-c]{3,5}(-[0-9]){2}").fullmatch),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{1,4}/ ">"'}}, re.compile("<[a-z]{1,4}>").fullmatch),
        ({"structured_outputs": {"json": Item.model_json_schema(), "regex": None}}, Item.model_validate_json),
        ({"structured_outputs": {"json": json.dumps(Item.model_json_schema())}}, Item.model_validate_json),
        ({"response_format": JSON_FORMAT}, Item.model_validate_json),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
    ],
)
def test_completions_and_chats_keep_to_what_was_asked(server, short, fields, check):
    content = chat(server, logit_bias=short, **NO_THINKING, **fields)["message"]["content"]
    assert check(content)
    body = {"prompt": ["x", "def f("], "n": 2, "seed": 5, "max_tokens": 200, "logit_bias": short, **fields}
    choices = server.ask(COMPLETIONS, body).json["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 4
    assert all(check(choice["text"]) for choice in choices)
    texts = [""] * 4
    for event in server.stream(COMPLETIONS, body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in choices]


def test_calls_that_have_to_be_made_are_made(server, short):
    for seed in range(2):
        options = {"tools": TOOLS, "seed": seed, "logit_bias": short, **NO_THINKING}
        choice = chat(server, tool_choice="required", **options)
        assert choice["finish_reason"] == "tool_calls"
        check_call(choice)
        choice = chat(server, tool_choice={"type": "function", "function": {"name": "g"}}, **options)
        assert check_call(choice) == "g"
        assert choice["finish_reason"] == "stop"
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "x", "tools": flat, "tool_choice": "required", "reasoning": {"effort": "none"}}
    response = server.ask(RESPONSES, {**body, "max_output_tokens": 60}).json
    assert {item["type"] for item in response["output"]} == {"function_call"}


def test_a_named_function_and_one_that_may_not_be_parallel_are_called_once(server, ids):
    """By a model that would go on for ever."""
    bias = {ids["\n"]: 100, ids["<|im_end|>"]: -100}
    options = {"tools": TOOLS, "logit_bias": bias, **NO_THINKING}
    choice = chat(server, tool_choice="required", **options)
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) > 1
    named = {"type": "function", "function": {"name": "g"}}
    for more in ({"tool_choice": named}, {"tool_choice": named, "parallel_tool_calls": True}):
        choice = chat(server, **more, **options)
        assert choice["finish_reason"] == "stop"
        assert check_call(choice) == "g"
    choice = chat(server, tool_choice="required", parallel_tool_calls=False, **options)
    assert choice["finish_reason"] == "tool_calls"
    check_call(choice)


def check_call(choice: dict[str, Any]) -> str:
    message = choice["message"]
    assert message["content"] is None
    ((name, arguments),) = calls_of(message["tool_calls"])
    values = json.loads(arguments)
    if name == "f":
        assert values in ({"city": "Rome"}, {"city": "東京"})
    else:
        assert values.keys() == {"count"}
        assert 1 <= values["count"] <= 9
    return name


@pytest.mark.parametrize("opens", [True, False])
def test_a_model_may_think_first_and_the_answer_after_it_is_held(server, ids, opens):
    bias = {ids["<think>"]: 50 if opens else -100, ids["</think>"]: 100, ids["<|im_end|>"]: 100}
    for more in ({"response_format": JSON_FORMAT}, {"tools": TOOLS, "tool_choice": "required"}):
        body = {"messages": MESSAGES, "logit_bias": bias, "seed": 2, "max_tokens": 200, **more}
        answer = server.ask(CHAT, body).json
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == (2 if opens else 0)
        if "tools" in more:
            check_call(choice)
        else:
            Item.model_validate_json(choice["message"]["content"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {**JSON_FORMAT, "type": "text"}}, "response_format"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}}, None),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "word"}}}},
            "response_format",
        ),
        (
            CHAT,
            {"response_format": JSON_FORMAT, "structured_outputs": {"choice": ["a"]}},
            "structured_outputs",
        ),
        (CHAT, {"response_format": JSON_FORMAT, "tools": TOOLS}, "response_format"),
        (CHAT, {"response_format": JSON_FORMAT, "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"response_format": JSON_FORMAT, "ignore_eos": True}, "ignore_eos"),
        (CHAT, {"tools": [tool("f", a={"type": "word"})], "tool_choice": "required"}, "tools"),
        (CHAT, {"structured_outputs": {"tool_calls": TOOLS}}, "structured_outputs.tool_calls"),
        (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"json_object": False}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"json": "{"}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"json": {"properties": {"a": "string"}}}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"json": {"$ref": "#/nothing"}}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"regex": "[a"}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [300]}, "allowed_token_ids"),
        (COMPLETIONS, {"guided_choice": ["a"]}, "guided_choice"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "word"}}}},
            "text.format",
        ),
    ],
)
def test_sec_07_what_cannot_be_kept_is_refused_by_name(server, path, fields, param):
    body = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}[path]
    answer = server.ask(path, {**body, **fields, "stream": True})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == (param or "response_format.json_schema.schema")


def test_requests_with_and_without_a_grammar_do_not_change_each_other(server, short):
    free = {"prompt": "def mean(data):", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    held = {"prompt": "x", "max_tokens": 200, "logit_bias": short, "response_format": JSON_FORMAT}
    choice = {"prompt": "y", "seed": 1, "structured_outputs": {"choice": ["yes", "no"]}}
    bodies = [free, {**held, "seed": 1}, {**held, "seed": 2}, choice]
    alone = [server.ask(COMPLETIONS, body).json["choices"] for body in bodies]
    mixed: list[Any] = [None] * len(bodies) * 3

    def ask(index: int) -> None:
        mixed[index] = server.ask(COMPLETIONS, bodies[index % len(bodies)]).json["choices"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(mixed))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert mixed == alone * 3


def test_the_server_is_whole_after_all_that(server):
    assert not [line for line in server.log if "Traceback" in line or "ERROR" in line]
