"""The parts of a chat answer: every rule on every cut, and nothing lost or raised whatever the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_engine.tokenization.chat_output import ChatOutputParser, ContentDelta, ReasoningDelta
from qwen_engine.tokenization.tool_calls import ToolArgumentsDelta, ToolCallParser, ToolCallStart

PROMPT = "<|im_start|>assistant\n"
OPEN_PROMPT = "<|im_start|>assistant\n<think>\n"
Answer = tuple[str, str, list[tuple[str, str]], str]


def parse(pieces: Sequence[str], *, prompt: str = PROMPT, reason: str = "stop", **options: Any) -> Answer:
    """(reasoning, content, calls, finish reason), with the order of the deltas checked."""
    parser = ChatOutputParser(prompt, **{"tools": True, **options})
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    tail, reason = parser.finish(reason)
    reasoning, content, calls, ids = "", "", [], []
    for delta in deltas + tail:
        match delta:
            case ReasoningDelta(text):
                assert not content
                assert not calls
                assert text
                reasoning += text
            case ContentDelta(text):
                assert text
                content += text
            case ToolCallStart(index, call_id, name):
                assert index == len(calls)
                ids.append(call_id)
                calls.append([name, ""])
            case ToolArgumentsDelta(index, text):
                assert index == len(calls) - 1
                assert text
                calls[index][1] += text
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("call_") for call_id in ids)
    return reasoning, content, [tuple(call) for call in calls], reason


def everywhere(text: str, **options: Any) -> Answer:
    """The answer of `text`, after checking that pieces of every length give the same."""
    answer = parse([text], **options)
    for width in range(1, min(len(text), 24) + 1):
        assert parse([text[i : i + width] for i in range(0, len(text), width)], **options) == answer
    return answer


def call(name: str = "f", arguments: str = "{}", *, close: bool = True) -> str:
    end = "\n</tool_call>" if close else ""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}{end}'


ARGUMENTS = [
    "{}",
    '{"a": 1}',
    '{"a": -1.5e10, "b": [1, [2, {"c": {}}]], "d": null, "e": true}',
    '{"text": "close </tool_call> and <tool_call> {\\"x\\": 1}} ]"}',
    '{"text": "an open { bracket [ and a \\\\"}',
    '{"text": "quote \\" backslash \\\\ \\u00e9 \\ud83d\\ude00 \\n"}',
    '{"城市": "北京", "emoji": "👨‍👩‍👧‍👦🇩🇪"}',
    '{ "spaced" :\n\t[ ] }',
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_tol_01_tol_04_arguments_are_passed_on_as_written(arguments):
    assert everywhere(call("f", arguments)) == ("", "", [("f", arguments)], "tool_calls")
    assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_tol_02_every_prefix_of_the_arguments_is_shown_as_it_comes(arguments):
    parser = ToolCallParser()
    shown, fed = "", ""
    for char in call("f", arguments):
        fed += char
        shown += "".join(delta.text for delta in parser.feed(char) if isinstance(delta, ToolArgumentsDelta))
        assert arguments.startswith(shown)
        begun = fed.partition('"arguments": ')[2][: len(arguments)]
        assert len(begun) - len(shown) <= len("</tool_call>")
    assert shown == arguments


def test_several_calls_with_thinking_before_and_text_around():
    text = (
        "<think>\nI may write <tool_call> here.\n</think>\n\nLet me look.\n"
        + call("f", '{"a": 1}')
        + "\n"
        + call("g", '{"b": 2}')
        + "\nThat was it."
    )
    calls = [("f", '{"a": 1}'), ("g", '{"b": 2}')]
    assert everywhere(text) == (
        "I may write <tool_call> here.",
        "Let me look.\n\nThat was it.",
        calls,
        "tool_calls",
    )
    assert everywhere(text, parallel_tool_calls=False)[2] == calls[:1]


def test_space_around_calls_is_no_content():
    text = "<think>\n\n</think>\n\n" + "\n\n" + call() + "\n\n" + call("g") + "\n"
    assert everywhere(text) == ("", "", [("f", "{}"), ("g", "{}")], "tool_calls")
    assert everywhere("\n \n") == ("", "\n \n", [], "stop")


@pytest.mark.parametrize(
    ("object_", "expected"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\u5317\\"}"}', '{"a": "北"}'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"arguments": {"a": {"b": "}"}}, "name": "f"}', '{"a": {"b": "}"}}'),
        ('{"id": 5, "more": [{"x": "]}"}], "name": "f", "note": "n", "arguments": {"a": 1}, "z": -0.5}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}}\n}} ', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"b": 2}, "name": "g"}', '{"a": 1}'),
    ],
)
def test_spellings_of_a_call(object_, expected):
    for text in (f"<tool_call>\n{object_}\n</tool_call>", f"<tool_call>{object_}</tool_call>"):
        assert everywhere(text) == ("", "", [("f", expected)], "tool_calls")


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "\n\n",
        "f(1)",
        "{}",
        "[]",
        "{not json}",
        '{"name": }',
        '{"name": "f" "arguments": {}}',
        '{"name": "f",, "arguments": {}}',
        '{"name": "f", "arguments": {a: 1}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 5}',
        '{"name": "f", "arguments": "\\q"}',
        '{"name": "f", "x": nonsense, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": ["f"], "arguments": {}}',
        '{"arguments": {"a": 1}}',
        '{"function": {"name": "f", "arguments": {}}}',
    ],
)
def test_what_is_no_call_is_content_as_a_whole(inside):
    text = f"A <tool_call>{inside}</tool_call> B"
    assert everywhere(text) == ("", text, [], "stop")
    assert everywhere(text + call())[1:3] == (text, [("f", "{}")])


def test_a_call_may_lack_its_closing_tag():
    assert everywhere(call("f", '{"a": 1}', close=False)) == ("", "", [("f", '{"a": 1}')], "tool_calls")
    two = call("f", close=False) + "\n" + call("g", close=False)
    assert everywhere(two)[2] == [("f", "{}"), ("g", "{}")]
    assert everywhere(call("f", close=False) + "}\nDone.")[1] == "\nDone."


def test_a_tag_outside_strings_ends_arguments_that_lack_a_bracket():
    broken = '<tool_call>{"name": "f", "arguments": {"a": [1\n'
    assert everywhere(broken + "</tool_call> B") == ("", " B", [("f", '{"a": [1\n')], "tool_calls")
    assert everywhere(broken + call("g"))[2] == [("f", '{"a": [1\n'), ("g", "{}")]
    no_tag = broken + "<tool_</tool_cal </tool_call>"
    assert everywhere(no_tag)[2] == [("f", '{"a": [1\n<tool_</tool_cal ')]


def test_tol_04_cut_off_by_the_token_limit():
    text = call("f", '{"a": {"b": "c </tool_call>"}, "d": 1}')
    for end in range(len(text)):
        _, content, calls, reason = everywhere(text[:end], reason="length")
        assert reason == "length"
        if calls:
            ((name, arguments),) = calls
            assert (name, content) == ("f", "")
            written = '{"a": {"b": "c </tool_call>"}, "d": 1}'
            assert arguments == written[: max(1, end - text.index(written))]
        else:
            assert content == text[:end]
    assert everywhere("<think>\nabc", reason="length") == ("abc", "", [], "length")


def test_what_follows_the_arguments_and_is_no_rest_of_an_object_is_content():
    for head in ('{"name": "f", "arguments": {}', '{"arguments": {}, "name": "f"', '{"parameters": null, "name": "f"'):
        assert everywhere(f"<tool_call>{head} B</tool_call>") == ("", " B</tool_call>", [("f", "{}")], "tool_calls")
        assert everywhere(f'<tool_call>{head}, "x": "y') == ("", ', "x": "y', [("f", "{}")], "tool_calls")
        assert everywhere(f"<tool_call>{head}") == ("", "", [("f", "{}")], "tool_calls")


def test_without_tools_tags_are_text():
    text = f"A {call()} B"
    assert everywhere(text, tools=False) == ("", text, [], "stop")
    assert everywhere(text, tool_choice="none") == ("", text, [], "stop")
    assert everywhere(f"<think>{text}", tools=False) == (text, "", [], "stop")


@pytest.mark.parametrize(
    ("tool_choice", "expected"),
    [
        (None, "tool_calls"),
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "f"}}, "stop"),
    ],
)
def test_finish_reasons(tool_choice, expected):
    assert everywhere(call(), tool_choice=tool_choice)[3] == expected
    assert everywhere("hello", tool_choice=tool_choice)[3] == "stop"
    assert everywhere(call(), tool_choice=tool_choice, reason="length")[3] == "length"
    assert everywhere(call(), tool_choice=tool_choice, reason="abort")[3] == "abort"


def test_a_call_in_open_thinking_and_one_that_is_only_mentioned():
    assert everywhere("hm\n" + call(), prompt=OPEN_PROMPT) == ("hm", "", [("f", "{}")], "tool_calls")
    text = 'first "<tool_call>", then\n</think>\n\n' + call()
    assert everywhere(text, prompt=OPEN_PROMPT) == ('first "<tool_call>", then', "", [("f", "{}")], "tool_calls")


def test_half_a_surrogate_pair_cannot_leave_the_parser():
    _, _, calls, _ = everywhere('<tool_call>{"name": "f\\ud800", "arguments": "{\\"\\udfff\\": 1}"}</tool_call>')
    assert calls == [("f\ufffd", '{"\ufffd": 1}')]


FRAGMENTS = [
    *[
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ":",
        ",",
        "<",
        "1",
    ],
    *[
        '"name"',
        '"f"',
        '"arguments"',
        '{"name": "f", "arguments": ',
        '{"a": "',
        '"}',
        "null",
        "北京",
        "👍🏽",
        "</tool",
        "text",
    ],
    call("g", '{"k": "v"}'),
]
garbage = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)


@settings(max_examples=120)
@given(garbage, st.sampled_from([PROMPT, OPEN_PROMPT]), st.booleans(), st.data())
def test_any_text_in_any_cut_gives_one_answer_and_loses_nothing(text, prompt, parallel, data):
    options = {"prompt": prompt, "parallel_tool_calls": parallel}
    answer = parse([text], **options)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert parse(list(text), **options) == answer
    assert parse(pieces, **options) == answer
    reasoning, content, calls, _ = answer
    if not calls:
        assert not set(letters(reasoning + content)) - set(letters(text))
        assert letters(reasoning + content) == letters(text)
    # Whatever is shown comes from the text, in order; only framing is left out.
    assert is_subsequence(reasoning, text)
    assert is_subsequence(content, text)
    for _, arguments in calls:
        assert arguments == "{}" or is_subsequence(arguments, text.replace('\\"', '"'))


def letters(text: str) -> str:
    """Text without what the rules may strip of an answer without calls: tags of thinking and space."""
    for tag in ("<think>", "</think>"):
        text = text.replace(tag, "")
    return "".join(text.split())


def is_subsequence(part: str, text: str) -> bool:
    rest = iter(text)
    return all(char in rest for char in part)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(
    st.lists(st.dictionaries(st.text(max_size=6), json_values, max_size=3), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 9),
)
def test_calls_with_any_arguments_come_back_byte_for_byte(many, ensure_ascii, width):
    written = [json.dumps(arguments, ensure_ascii=ensure_ascii) for arguments in many]
    text = "\n".join(call(f"f{index}", arguments) for index, arguments in enumerate(written))
    expected = [(f"f{index}", arguments) for index, arguments in enumerate(written)]
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    assert parse(pieces) == ("", "", expected, "tool_calls")
