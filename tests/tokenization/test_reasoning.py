"""Thinking and answer are told apart by the text alone, whatever the pieces it comes in."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_engine.tokenization.reasoning import Part, ReasoningSplitter, generation_prefix

UNDECIDED = "<|im_start|>user\n<think>hi</think><|im_end|>\n<|im_start|>assistant\n"
CLOSED = UNDECIDED + "<think>\n\n</think>\n\n"
OPEN = UNDECIDED + "<think>\n"
OPEN_WITHOUT_BREAK = UNDECIDED + "<think>"
CONTINUED = UNDECIDED + "The answer"
PROMPTS = [UNDECIDED, CLOSED, OPEN, OPEN_WITHOUT_BREAK, CONTINUED]
REAL_CALL = re.compile(r'<tool_call>\s{0,8}\{\s{0,8}"')

FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "{",
    '"',
    "<",
    ">",
    "th",
    "think>",
    "答",
    "👍",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def split(text: str, prompt: str, pieces: Sequence[str], **options: bool) -> tuple[str, str, list[tuple[Part, str]]]:
    """(reasoning, content, every part in order), the last of which has nothing left out."""
    by_text, by_part = ReasoningSplitter(prompt, **options), ReasoningSplitter(prompt, **options)
    results = [by_text.feed(piece) for piece in pieces] + [by_text.finish()]
    parts = [part for piece in pieces for part in by_part.split(piece)] + by_part.flush()
    assert "".join(piece for _, piece in parts) == text
    reasoning, content = ("".join(texts) for texts in zip(*results))
    assert reasoning == "".join(piece for part, piece in parts if part is Part.REASONING)
    assert content == "".join(piece for part, piece in parts if part is Part.CONTENT)
    return reasoning, content, parts


def whole(text: str, prompt: str, **options: bool) -> tuple[str, str]:
    return split(text, prompt, [text], **options)[:2]


def cut(text: str, width: int) -> list[str]:
    return [text[i : i + width] for i in range(0, len(text), width)]


def reference(text: str, prompt: str, *, detect_calls: bool) -> tuple[str, str]:
    """The rules on a complete text, with regular expressions."""
    if prompt in (CLOSED, CONTINUED):
        return "", text
    opening = re.match(r"\s*<think>\n?", text)
    if opening:
        text = text[opening.end() :]
    elif prompt == UNDECIDED:
        return "", text
    elif prompt == OPEN_WITHOUT_BREAK:
        text = text.removeprefix("\n")
    close = text.find("</think>")
    call = REAL_CALL.search(text) if detect_calls else None
    if call and (close < 0 or call.start() < close):
        return text[: call.start()].removesuffix("\n"), text[call.start() :]
    if close < 0:
        return text, ""
    content = text[close + len("</think>") :]
    return text[:close].removesuffix("\n"), re.sub(r"\A\n{1,2}", "", content)


@settings(max_examples=150)
@given(texts, st.sampled_from(PROMPTS), st.booleans(), st.data())
def test_any_cut_gives_what_the_rules_say_of_the_whole_text(text, prompt, detect_calls, data):
    expected = reference(text, prompt, detect_calls=detect_calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    for parts in ([text], list(text), pieces):
        assert split(text, prompt, parts, detect_calls=detect_calls)[:2] == expected


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (UNDECIDED, "<think>\nabc\n</think>\n\nxyz", ("abc", "xyz")),
        (UNDECIDED, "<think>\n\n</think>\n\nxyz", ("", "xyz")),
        (UNDECIDED, "<think>abc\n\n</think>\n\n\nxyz", ("abc\n", "\nxyz")),
        (UNDECIDED, "\n<think>abc</think>", ("abc", "")),
        (UNDECIDED, "xyz <think>abc</think>", ("", "xyz <think>abc</think>")),
        (UNDECIDED, "\n \n", ("", "\n \n")),
        (UNDECIDED, "<thi", ("", "<thi")),
        (UNDECIDED, "<think>\nabc\n", ("abc\n", "")),
        (UNDECIDED, "<think>\nabc\n</thin", ("abc\n</thin", "")),
        (OPEN, "abc</think>xyz", ("abc", "xyz")),
        (OPEN, "<think>abc</think>xyz", ("abc", "xyz")),
        (OPEN, "\nabc</think>xyz", ("\nabc", "xyz")),
        (OPEN_WITHOUT_BREAK, "\nabc</think>xyz", ("abc", "xyz")),
        (OPEN, "abc", ("abc", "")),
        (OPEN, "</think>", ("", "")),
        (CLOSED, "abc</think>xyz", ("", "abc</think>xyz")),
        (CLOSED, "\n\nabc", ("", "\n\nabc")),
        (CONTINUED, " is <think>", ("", " is <think>")),
    ],
)
def test_rsn_03_rsn_06_the_rules(prompt, text, expected):
    for width in (1, 2, 3, 7, 100):
        assert split(text, prompt, cut(text, width))[:2] == expected


def test_without_a_turn_start_the_whole_prompt_is_judged():
    assert whole("abc</think>xyz", "<think>") == ("abc", "xyz")
    assert whole("<think>abc</think>xyz", "") == ("abc", "xyz")
    assert whole("abc</think>xyz", "Once upon\na time") == ("", "abc</think>xyz")


def test_a_tag_in_an_earlier_turn_says_nothing():
    assert whole("<think>a</think>b", UNDECIDED) == ("a", "b")


CALL = '<tool_call>\n{"name": "f"}'


def test_a_call_ends_open_thinking_but_a_mentioned_tag_does_not():
    thought = 'I could write <tool_call> or <tool_call>{...} or "<tool_call>"'
    text = f"<think>\n{thought}\n{CALL}"
    for width in (1, 3, 100):
        assert split(text, UNDECIDED, cut(text, width), detect_calls=True)[:2] == (thought, CALL)
    assert whole(text, UNDECIDED) == (f"{thought}\n{CALL}", "")
    closed = f"<think>\n{thought}\n</think>\n\n{CALL}"
    assert whole(closed, UNDECIDED, detect_calls=True) == (thought, CALL)


def test_little_is_held_back():
    splitter = ReasoningSplitter(OPEN, detect_calls=True)
    shown = 0
    text = "a < b\n" * 10 + "<tool_call>" + " " * 100 + "</thinking>"
    for count, char in enumerate(text, start=1):
        shown += len(splitter.feed(char)[0])
        assert count - shown <= len("\n<tool_call>") + 9


@pytest.mark.parametrize(
    ("prompt", "pieces", "expected"),
    [
        (UNDECIDED, ["<think>", "\n", "a", "b", "</think>", "\n\n", "x", "y"], 5),
        (UNDECIDED, ["\n", "<think>", "a", "</think>", "x"], 4),
        (UNDECIDED, ["\n", "x"], 0),
        (UNDECIDED, ["\n"], 0),
        (OPEN, ["a", "b"], 2),
        (OPEN, [" "], 1),
        (OPEN, ["a", "", "</think>", "x"], 3),
        (CLOSED, ["a", "</think>"], 0),
    ],
)
def test_reasoning_tokens_are_those_up_to_the_closing_tag(prompt, pieces, expected):
    splitter = ReasoningSplitter(prompt)
    for piece in pieces:
        splitter.feed(piece)
    splitter.finish()
    assert splitter.num_reasoning_tokens == expected


def test_the_prefix_of_a_prompt_given_as_ids(tiny, qwen):
    for tokenizer in (tiny, qwen):
        for prompt in PROMPTS:
            assert (
                generation_prefix(tokenizer, tokenizer.encode(prompt))
                == "<|im_start|>" + prompt.split("<|im_start|>")[-1]
            )
        assert generation_prefix(tokenizer, tokenizer.encode("hello")) == "hello"
        assert generation_prefix(tokenizer, []) == ""


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_the_qwen3_template_is_understood(qwen, options):
    messages = [{"role": "user", "content": "hi"}]
    prompt = qwen.chat_template_text(messages, chat_template_kwargs=options)
    answer = "xyz" if options.get("enable_thinking") is False else "<think>\nabc\n</think>\n\nxyz"
    reasoning, content = whole(answer, prompt)
    assert content == "xyz"
    assert reasoning == ("abc" if "<think>" in answer else "")
