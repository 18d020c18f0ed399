"""Thinking, text and tool calls as clients of both chat endpoints get them, streamed and whole, through real HTTP."""

from __future__ import annotations

import dataclasses
import json
import threading
import urllib.request
from collections import defaultdict
from typing import Any

import openai
import pytest
from fault_tools import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming._deltas import accumulate_delta
from scripted import MODEL, ScriptedServer

from qwen_engine.server.json_response import to_json
from qwen_engine.tokenization import structured

MESSAGES = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": PARAMETERS}} for name in ("f", "g")
]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
THINKING = "<think>\nhm, f?\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "北京 🌧"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def ask(scripted: ScriptedServer, **options: Any) -> Any:
    return scripted.openai.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **options})


def message_of(completion: Any, index: int = 0) -> dict[str, Any]:
    """A message without the random ids of its calls, once they were seen to be good."""
    message = completion.choices[index].message.to_dict()
    assert message.get("tool_calls") != []
    return without_ids(message)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [dict(call) for call in message.get("tool_calls", ())]
    ids = [call.pop("id") for call in calls]
    assert len(set(ids)) == len(ids)
    assert all(id_.startswith("call_") for id_ in ids)
    return {**message, "tool_calls": calls} if calls else message


def streamed(scripted: ScriptedServer, **options: Any) -> tuple[list[dict[str, Any]], list[str], Any]:
    """(messages, finish reasons) by choice, put together by the OpenAI package, and the usage."""
    chunks = list(ask(scripted, stream=True, stream_options={"include_usage": True}, **options))
    usage = chunks.pop().usage
    messages: dict[int, dict[str, Any]] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        delta = choice.delta.to_dict()
        if choice.index not in messages:
            assert delta == {"role": "assistant", "content": ""}
        elif choice.finish_reason is None:
            assert choice.index not in reasons
            assert len(delta.keys() - {"reasoning"}) == 1
            assert all(delta.values())
        else:
            assert delta == {}
            reasons[choice.index] = choice.finish_reason
        messages[choice.index] = accumulate_delta(messages.get(choice.index, {}), delta)
    for message in messages.values():
        for index, call in enumerate(message.get("tool_calls", ())):
            assert call.pop("index") == index
    return [messages[i] for i in sorted(messages)], [reasons[i] for i in sorted(reasons)], usage


def test_a_stream_brings_thinking_text_and_calls_in_openais_deltas(scripted):
    scripted.write(THINKING + "I look." + CALL + "\n" + OTHER_CALL)
    chunks = list(ask(scripted, tools=TOOLS, stream=True))
    assert all(chunk.object == "chat.completion.chunk" and len(chunk.choices) == 1 for chunk in chunks)
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
    kinds = [next(iter(delta)) if len(delta) == 1 else "/".join(sorted(delta)) for delta in deltas[1:-1]]
    runs = [kind for kind, before in zip(kinds, ["", *kinds]) if kind != before]
    assert runs == ["reasoning/reasoning_content", "content", "tool_calls"]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    starts = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in starts] == [
        (0, "function", {"name": "f", "arguments": ""}),
        (1, "function", {"name": "g", "arguments": ""}),
    ]
    assert all(call.keys() == {"index", "function"} for call in calls if call not in starts)
    assert all(call["function"].keys() == {"arguments"} for call in calls if call not in starts)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert deltas[-1] == {}


def test_the_openai_packages_own_stream_gives_the_whole_message(scripted):
    scripted.write(THINKING + CALL)
    with scripted.openai.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == {"city": "北京 🌧"}
    assert message.reasoning_content == message.reasoning == "hm, f?"
    message = ask(scripted, tools=TOOLS).choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.arguments == '{"city": "北京 🌧"}'


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_by_the_engine_calls_fields_as_the_client_does(scripted, monkeypatch, stream):
    def refuse(kind: str, *arguments: Any) -> None:
        if kind == "add":
            ((fields,),) = arguments
            scripted.client._refuse([fields[0]], "it is too much", "max_tokens", True)

    monkeypatch.setattr(scripted.client, "_send", refuse)
    for options, param in (({"max_tokens": 5}, "max_tokens"), ({"max_completion_tokens": 5}, "max_completion_tokens")):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(scripted, stream=stream, **options)
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError) as caught:
        scripted.openai.responses.create(model=MODEL, input="x", max_output_tokens=5, stream=stream)
    assert caught.value.param == "max_output_tokens"


PIECES = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "\n", "\n\n", " ", "<tool_call>", "</tool_call>", CALL, OTHER_CALL, THINKING),
            *(
                "text",
                "你好",
                "🐍",
                "👩‍👩‍👧",
                "STOP",
                "<",
                '{"name"',
                ': "f"',
                ', "arguments": {"a": [1, "}"]}',
                "}",
                "}}",
            ),
        ]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    texts=st.lists(PIECES, min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 5, 100]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "tools": st.just(TOOLS),
            "parallel_tool_calls": st.booleans(),
            "max_tokens": st.integers(1, 30),
            "stop": st.just(["STOP", "xt你"]),
            "extra_body": st.just({"chat_template_kwargs": {"enable_thinking": False}}),
        },
    ),
)
def test_what_a_stream_adds_up_to_is_the_whole_answer(scripted, texts, group, options):
    """Whatever the text, however it is cut, with any number of samples."""
    scripted.write(*texts, group=group)
    options = {**options, "n": len(texts), "temperature": 1.0}
    whole = ask(scripted, **options)
    messages, reasons, usage = streamed(scripted, **options)
    assert reasons == [choice.finish_reason for choice in whole.choices]
    for index, message in enumerate(messages):
        expected = message_of(whole, index)
        message = without_ids(message)
        # A stream has to begin before it is known whether there will be any text.
        assert {**message, "content": message["content"] or None} == {
            **expected,
            "content": expected["content"] or None,
        }
    assert usage == whole.usage
    assert 0 <= usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens


def test_thinking_that_is_cut_off_is_all_there_is(scripted):
    scripted.write("<think>\nA long thought that does not end.")
    whole = ask(scripted, max_tokens=6)
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert choice.message.reasoning_content.startswith("A long")
    assert whole.usage.completion_tokens_details.reasoning_tokens == 6


@pytest.mark.parametrize("group", [1, 3, 100])
def test_reasoning_tokens_are_those_up_to_the_end_of_the_thinking(scripted, group):
    thinking, answer = "<think>\nIs it raining?\n</think>", "\n\nIt is 雨."
    scripted.write(thinking + answer, group=group)
    for usage in (ask(scripted).usage, streamed(scripted)[2]):
        assert usage.completion_tokens_details.reasoning_tokens == scripted.num_tokens(thinking)
        assert usage.completion_tokens == scripted.num_tokens(thinking + answer) + 1
    scripted.write("No thinking.", group=group)
    assert ask(scripted).usage.completion_tokens_details.reasoning_tokens == 0
    assert scripted.openai.completions.create(model=MODEL, prompt="x").usage.completion_tokens_details is None


def test_rsn_01_a_prompt_that_closes_the_thinking_leaves_content_only(scripted):
    scripted.write("Just text.")
    message = ask(scripted, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert scripted.client.prompt.endswith("<think>\n\n</think>\n\n")
    assert message.to_dict() == {"role": "assistant", "content": "Just text."}
    scripted.write("<think>abc</think>xyz")
    split = {"reasoning_content": "abc", "reasoning": "abc", "content": "xyz"}
    for thinking, parts in ((False, {"content": "<think>abc</think>xyz"}), (True, split)):
        options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}}}
        (message,), _, _ = streamed(scripted, **options)
        assert message == {"role": "assistant", **parts} == message_of(ask(scripted, **options))


def test_stop_strings_end_the_answer_but_not_the_thinking(scripted):
    scripted.write("<think>\nShould I STOP?\n</think>\n\nYes. STOP here.")
    message = ask(scripted, stop=["STOP"]).choices[0].message
    assert (message.reasoning_content, message.content) == ("Should I STOP?", "Yes. ")
    (message,), reasons, _ = streamed(scripted, stop=["STOP"])
    assert (message["reasoning_content"], message["content"], reasons) == ("Should I STOP?", "Yes. ", ["stop"])
    # A completion has no thinking.
    text = scripted.openai.completions.create(model=MODEL, prompt="x", stop=["STOP"], max_tokens=50).choices[0].text
    assert text == "<think>\nShould I "


@pytest.mark.parametrize("group", [1, 2, 3, 100])
def test_rsn_05_text_held_back_for_a_stop_string_moves_no_border(scripted, group):
    scripted.write("<think>\nabc zz\n</think>\n\nxyz zzz.", group=group)
    for options in ({}, {"stop": ["zzzzzzzz"]}, {"stop": ["zz\n</think>zz", "</think>\n\nz"]}):
        (message,), _, usage = streamed(scripted, **options)
        assert (message["reasoning_content"], message["content"]) == ("abc zz", "xyz zzz.")
        whole = ask(scripted, **options)
        assert without_ids(message) == message_of(whole)
        assert usage == whole.usage


def test_without_the_alias_thinking_has_one_name(scripted, monkeypatch):
    monkeypatch.setattr(
        scripted.service, "options", dataclasses.replace(scripted.service.options, reasoning_alias=False)
    )
    scripted.write(THINKING + "Hi")
    assert set(message_of(ask(scripted))) == {"role", "content", "reasoning_content"}
    assert set(streamed(scripted)[0][0]) == {"role", "content", "reasoning_content"}


def test_tool_choice_none_offers_no_tools_and_leaves_tags_in_the_text(scripted):
    scripted.write(CALL)
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        choice = ask(scripted, **options).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")
        assert '"name": "f"' not in scripted.client.prompt
    assert ask(scripted, tools=TOOLS, tool_choice="auto").choices[0].finish_reason == "tool_calls"
    assert json.dumps(TOOLS[0]) in scripted.client.prompt


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "none"}},
        {"type": "function"},
        {"type": "function", "function": 5},
        {"type": "custom", "custom": {"name": "f"}},
        "always",
    ],
)
def test_a_tool_choice_that_means_nothing_is_refused(scripted, choice):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(scripted, tools=TOOLS, tool_choice=choice)
    assert caught.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as caught:
        scripted.openai.responses.create(model=MODEL, input="x", tools=FLAT_TOOLS, tool_choice=choice)
    assert caught.value.param == "tool_choice"
    for choice in ("auto", "required"):
        with pytest.raises(openai.BadRequestError, match="needs tools"):
            ask(scripted, tool_choice=choice)


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", ["f", "g"], "tool_calls"),
        ({"type": "function", "function": {"name": "g"}}, ["g"], "stop"),
    ],
)
def test_a_call_that_has_to_be_made_is_enforced_by_the_engine(scripted, choice, names, reason):
    """The engine is told which tools; what looks like a call while the model still thinks is none."""
    scripted.write("<think>\nMaybe " + CALL + "?\n</think>\n\n" + OTHER_CALL)
    whole = ask(scripted, tools=TOOLS, tool_choice=choice)
    spec = scripted.client.params.structured_outputs
    assert [tool["function"]["name"] for tool in json.loads(spec.tool_calls)] == names
    assert all(json.dumps(tool) in scripted.client.prompt for tool in TOOLS)
    message = message_of(whole)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["g"]
    assert (message["reasoning"], message["content"]) == (f"Maybe {CALL}?", None)
    assert whole.choices[0].finish_reason == reason
    (streamed_message,), reasons, usage = streamed(scripted, tools=TOOLS, tool_choice=choice)
    assert without_ids(streamed_message) == {**message, "content": ""}
    assert (reasons, usage) == ([reason], whole.usage)
    flat = choice if isinstance(choice, str) else {"type": "function", **choice["function"]}
    response = scripted.openai.responses.create(model=MODEL, input="x", tools=FLAT_TOOLS, tool_choice=flat)
    assert [item.name for item in response.output if item.type == "function_call"] == ["g"]
    assert scripted.client.params.structured_outputs == spec


def test_a_call_can_be_aborted_while_its_grammar_is_checked(scripted, monkeypatch):
    """And however many such checks are under way, what has no grammar is served."""
    gate = threading.Event()
    check = structured._check
    monkeypatch.setattr(structured, "_check", lambda spec: gate.wait(60) and check(spec))
    answers = []

    def ask_with_grammar(number: int) -> None:
        answers.append(
            scripted.openai.completions.with_raw_response.create(
                model=MODEL,
                prompt="x",
                extra_body={"structured_outputs": {"choice": ["yes"]}},
                extra_headers={"X-Request-Id": f"checked-{number}"},
            ).parse()
        )

    scripted.write("yes")
    threads = [threading.Thread(target=ask_with_grammar, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: scripted.service.num_calls == 8)
        assert ask(scripted).choices[0].message.content == "yes"
        aborted = scripted.openai.post("/abort", body={"request_id": "checked-3"}, cast_to=object)
        assert aborted == {"aborted": 1}
    finally:
        gate.set()
        for thread in threads:
            thread.join(60)
    reasons = {answer.id: answer.choices[0].finish_reason for answer in answers}
    assert reasons == {f"cmpl-checked-{i}": "abort" if i == 3 else "stop" for i in range(8)}
    wait_until(lambda: scripted.service.num_calls == scripted.client.num_sequences == 0)


def test_without_parallel_calls_only_the_first_is_passed_on(scripted):
    scripted.write(CALL + OTHER_CALL)
    options = {"tools": TOOLS, "parallel_tool_calls": False}
    assert [call.function.name for call in ask(scripted, **options).choices[0].message.tool_calls] == ["f"]
    assert [call["function"]["name"] for call in streamed(scripted, **options)[0][0]["tool_calls"]] == ["f"]


def test_a_conversation_goes_on_with_the_results_of_calls(scripted):
    """The answer can be sent back as it came, and the model sees its thinking, its call and the result."""
    scripted.write(THINKING + CALL)
    message = ask(scripted, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    scripted.write("It rains.")
    for sent in (
        message.to_dict(),
        {"role": "assistant", "reasoning": "hm, f?", "tool_calls": message.to_dict()["tool_calls"]},
    ):
        answer = ask(scripted, tools=TOOLS, messages=[*MESSAGES, sent, result])
        assert answer.choices[0].message.content == "It rains."
        turn = "<|im_start|>assistant\n<think>\nhm, f?\n</think>\n\n" + CALL + "<|im_end|>\n"
        assert turn + "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in scripted.client.prompt


def test_responses_hold_items_for_thinking_text_and_calls(scripted):
    scripted.write(THINKING + "I look." + CALL)
    response = scripted.openai.responses.create(model=MODEL, input="Weather?", tools=FLAT_TOOLS)
    assert json.dumps(TOOLS[0]) in scripted.client.prompt
    reasoning, text, call = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "hm, f?", [])
    assert (text.type, response.output_text) == ("message", "I look.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "f", {"city": "北京 🌧"})
    assert call.call_id.startswith("call_")
    assert {item.status for item in response.output} == {response.status} == {"completed"}
    assert response.usage.output_tokens_details.reasoning_tokens == scripted.num_tokens(THINKING.rstrip())
    assert [tool.name for tool in response.tools] == ["f", "g"]

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in response.output), result]
    scripted.write("It rains.")
    answer = scripted.openai.responses.create(model=MODEL, input=history, tools=FLAT_TOOLS)
    assert answer.output_text == "It rains."
    turn = "<|im_start|>assistant\n<think>\nhm, f?\n</think>\n\nI look.\n" + CALL + "<|im_end|>\n"
    assert turn + "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in scripted.client.prompt


def test_a_streamed_response_tells_of_every_item(scripted):
    scripted.write(THINKING + "I look." + CALL)
    with scripted.openai.responses.stream(model=MODEL, input="Weather?", tools=FLAT_TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    item = ["output_item.added", "content_part.added", "{}.done", "content_part.done", "output_item.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(kind.format("reasoning_text") for kind in item),
        *(kind.format("output_text") for kind in item),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert final.output[2].parsed_arguments == {"city": "北京 🌧"}
    for index, kind in enumerate(("reasoning_text", "output_text", "function_call_arguments")):
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        done = next(event for event in events if event.type == f"response.{kind}.done")
        expected = done.arguments if kind == "function_call_arguments" else done.text
        assert "".join(event.delta for event in deltas) == expected != ""
        assert {event.output_index for event in deltas} == {done.output_index} == {index}
        assert {event.item_id for event in deltas} == {done.item_id} == {final.output[index].id}


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    text=PIECES,
    group=st.sampled_from([1, 3, 100]),
    options=st.fixed_dictionaries({}, optional={"tools": st.just(FLAT_TOOLS), "max_output_tokens": st.integers(1, 30)}),
)
def test_the_items_of_a_stream_are_those_of_the_whole_response(scripted, text, group, options):
    scripted.write(text, group=group)
    whole = scripted.openai.responses.create(model=MODEL, input="x", **options)
    events = list(scripted.openai.responses.create(model=MODEL, input="x", stream=True, **options))
    final = events[-1].response
    assert events[-1].type == f"response.{final.status}" == f"response.{whole.status}"
    assert [comparable(item) for item in final.output] == [comparable(item) for item in whole.output]
    assert final.usage == whole.usage
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in final.output]
    texts = [""] * len(done)
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] += event.delta
    assert texts == [item.arguments if item.type == "function_call" else item.content[0].text for item in done]


def comparable(item: Any) -> dict[str, Any]:
    """An item without its random ids."""
    return {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")}


def test_items_that_cut_a_turn_in_other_ways_are_gathered(scripted):
    scripted.write("ok")
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "rain"}]}
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        *(call, {**call, "call_id": "call_2", "name": "g"}, output, {**output, "call_id": "call_2"}),
    ]
    scripted.openai.responses.create(model=MODEL, input=items, tools=FLAT_TOOLS)
    calls = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in "fg")
    turn = "<|im_start|>assistant\n<think>\nshort\n</think>\n\n" + calls + "<|im_end|>\n<|im_start|>user"
    assert turn + "\n<tool_response>\nrain\n</tool_response>" * 2 + "<|im_end|>" in scripted.client.prompt


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_chunk_of_text_alone_is_written_as_one_with_more_in_it(scripted, path):
    scripted.write(f'{THINKING}"quoted" \\ and\ttab, \x00 \x1f, é 北京 🌧 \u2028 </tag')
    prompt = {"messages": MESSAGES} if path == "chat/completions" else {"prompt": "x"}
    options = {**prompt, "stream": True, "n": 2, "seed": 1, "stream_options": {"include_usage": True}}
    plain = forms_and_texts(scripted, path, options)
    assert plain == forms_and_texts(scripted, path, {**options, "return_token_ids": True})
    assert len(plain[1]) == (2 if path == "completions" else 6)


def forms_and_texts(
    scripted: ScriptedServer, path: str, body: dict[str, Any]
) -> tuple[set[str], dict[tuple[int, str], str]]:
    """A stream's chunks without their texts and token ids, and the joined texts by choice and field.

    How the text is cut is up to how fast it is read. Each chunk's JSON is checked to be what the encoder writes.
    """
    request = urllib.request.Request(f"{scripted.url}/v1/{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as response:
        *events, done, rest = response.read().split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    forms, texts = set(), defaultdict(str)
    for event in events:
        chunk = json.loads(event.removeprefix(b"data: "))
        assert event == b"data: " + to_json(chunk)
        del chunk["id"], chunk["created"]
        for choice in chunk["choices"]:
            choice.pop("token_ids", None)
            fields = choice.get("delta", choice)
            for name in fields.keys() & {"text", "content", "reasoning", "reasoning_content"}:
                texts[choice["index"], name] += fields[name]
                fields[name] = ""
        forms.add(json.dumps(chunk))
    return forms, texts
