"""A framework's client, langchain-openai, which reads answers more strictly than the package it is made on."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from scripted import MODEL, ScriptedServer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京 🌧", "days": 2}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THINKING = "<think>\nhm\n</think>\n\n"
ANSWER = "It rains 🌧 in 北京."
CITY = {
    "title": "city",
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"{city}: rain for {days} days"


def clock() -> str:
    """The time."""
    return "noon"


@pytest.fixture(autouse=True)
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves this machine, whatever its environment says."""
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")


def model(scripted: ScriptedServer, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=scripted.url + "/v1", api_key="key", max_retries=0, **options)


def calls_of(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    assert not message.invalid_tool_calls
    assert len({call["id"] for call in message.tool_calls}) == len(message.tool_calls)
    return [(call["name"], call["args"]) for call in message.tool_calls]


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    return message


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_text_usage_and_an_end(scripted, stream):
    scripted.write(THINKING + ANSWER)
    chat = model(scripted, temperature=0.5, max_completion_tokens=50, stream_usage=True)
    messages = [("system", "Be brief."), ("human", "What is the weather?")]
    message = joined(list(chat.stream(messages))) if stream else chat.invoke(messages)
    assert message.content == ANSWER
    assert not message.tool_calls
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.response_metadata["model_name"] == MODEL
    usage = message.usage_metadata
    num_thinking = scripted.num_tokens("<think>\nhm\n</think>")
    assert usage["output_tokens"] == scripted.num_tokens(THINKING + ANSWER) + 1
    assert usage["output_token_details"]["reasoning"] == num_thinking
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert (scripted.client.params.temperature, scripted.client.params.max_tokens) == (0.5, 50)
    assert "Be brief." in scripted.client.prompt


def test_a_stream_comes_in_pieces_also_asynchronously(scripted):
    scripted.write(ANSWER)

    async def read() -> list[AIMessageChunk]:
        return [chunk async for chunk in model(scripted).astream("What is the weather?")]

    for chunks in (list(model(scripted).stream("What is the weather?")), asyncio.run(read())):
        assert sum(bool(chunk.content) for chunk in chunks) > 3
        assert joined(chunks).content == ANSWER


@pytest.mark.parametrize("group", [1, 4, 100])
def test_tool_calls_are_the_same_streamed_and_whole(scripted, group):
    scripted.write(THINKING + CALL + "\n" + OTHER_CALL, group=group)
    chat = model(scripted).bind_tools([weather, clock])
    whole = chat.invoke("What is the weather?")
    streamed = joined(list(chat.stream("What is the weather?")))
    expected = [("weather", {"city": "北京 🌧", "days": 2}), ("clock", {})]
    assert calls_of(whole) == calls_of(streamed) == expected
    assert whole.content == streamed.content == ""
    assert whole.response_metadata["finish_reason"] == streamed.response_metadata["finish_reason"] == "tool_calls"


def test_a_tools_result_goes_back_to_the_model(scripted):
    scripted.write(CALL)
    chat = model(scripted).bind_tools([weather])
    question = HumanMessage("What is the weather?")
    asked = chat.invoke([question])
    (call,) = asked.tool_calls
    scripted.write(ANSWER)
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert chat.invoke([question, asked, result]).content == ANSWER
    assert "<tool_response>\n北京 🌧: rain for 2 days\n</tool_response>" in scripted.client.prompt
    assert '{"name": "weather", "arguments": {"city": "北京 🌧", "days": 2}}' in scripted.client.prompt


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_asked_for_in_a_way_the_server_knows(scripted, method):
    arguments = '{"name": "北京"}'
    call = f'<tool_call>\n{{"name": "city", "arguments": {arguments}}}\n</tool_call>'
    scripted.write(arguments if method == "json_schema" else call)
    chat = model(scripted).with_structured_output(CITY, method=method)
    assert chat.invoke("Which city?") == {"name": "北京"}
    assert scripted.client.params.structured_outputs is not None


def test_errors_have_the_class_that_callers_catch(scripted):
    scripted.write("x")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        model(scripted, max_completion_tokens=10**6).invoke("x")
    assert caught.value.code == "context_length_exceeded"
