from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_engine.request import SamplingParams
from qwen_engine.tokenization.output_text import OutputText
from qwen_engine.tokenization.reasoning import ReasoningSplitter


def run(tokenizer, params, groups, *, reason, prompt=()):
    """Drives a sequence as the engine does; returns (deltas, stop string, tokens kept, text)."""
    output = OutputText(tokenizer, prompt, params)
    deltas, kept = [], []
    for index, group in enumerate(groups):
        delta, matched = output.append(group, finish_reason=reason if index == len(groups) - 1 else None)
        deltas.append(delta)
        kept.extend(group[: output.num_tokens_used])
        assert output.text == "".join(deltas)
        if matched is not None:
            return deltas, matched, kept, output.text
    return deltas, None, kept, output.text


def oracle(tokenizer, params, ids, *, reason):
    """Reads one character at a time, knowing which token completed it."""
    shown = ids[:-1] if reason == "stop" and not params.include_stop_str_in_output else ids
    text, seen = "", b""
    for count, id_ in enumerate(shown, start=1):
        if not (params.skip_special_tokens and id_ in tokenizer.special_ids):
            seen += tokenizer.token_bytes(id_)
        waiting = unfinished_bytes(seen) if count < len(shown) else 0
        sure = seen[: len(seen) - waiting].decode(errors="replace")
        for char in sure[len(text) :]:
            text += char
            complete = [item for item in params.stop if text.endswith(item)]
            if complete and count > params.min_tokens:
                matched = max(complete, key=len)
                end = len(text) if params.include_stop_str_in_output else len(text) - len(matched)
                return text[:end], matched
    return text, None


def unfinished_bytes(data):
    """Length of the begun character at the end of `data`."""
    for size in (3, 2, 1):
        tail = data[-size:]
        try:
            tail.decode()
        except UnicodeDecodeError as error:
            if (error.start, error.reason) == (0, "unexpected end of data"):
                return len(tail)
    return 0


def split(ids, cuts):
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


@st.composite
def sequences(draw, tokenizer):
    pieces = st.sampled_from(["hello", "END", "EN", " wo", "rld", "我", "能", "👍", "a", "b", "<|im_end|>", "<think>"])
    ids = tokenizer.encode("".join(draw(st.lists(pieces, min_size=1, max_size=8))))
    noise = draw(st.lists(st.integers(-1, tokenizer.vocab_size + 3), max_size=3))
    position = draw(st.integers(0, len(ids)))
    ids = ids[:position] + noise + ids[position:]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    starts = draw(st.lists(st.integers(0, max(len(text) - 1, 0)), max_size=3))
    stop = tuple(part for start in starts if (part := text[start : start + draw(st.integers(1, 5))]))
    params = SamplingParams(
        stop=stop + tuple(draw(st.lists(st.sampled_from(["END", "NDE", "lo w", "能我"]), max_size=2))),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 6)),
    )
    return ids, params


@given(data=st.data(), reason=st.sampled_from(["length", "stop", "abort"]))
@settings(max_examples=300)
def test_text_stop_and_tokens_kept_do_not_depend_on_grouping(tiny, data, reason):
    ids, params = data.draw(sequences(tiny))
    groups = split(ids, data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=6)))
    _, matched, kept, text = run(tiny, params, groups, reason=reason)
    assert (text, matched) == oracle(tiny, params, ids, reason=reason)
    _, *whole = run(tiny, params, [ids], reason=reason)
    assert [matched, kept, text] == whole


@given(data=st.data(), reason=st.sampled_from(["length", "stop"]))
@settings(max_examples=200)
def test_text_without_stop_strings_is_the_decoding_of_the_ids(tiny, data, reason):
    ids, params = data.draw(sequences(tiny))
    params = SamplingParams(skip_special_tokens=params.skip_special_tokens)
    groups = split(ids, data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=6)))
    shown = ids[:-1] if reason == "stop" else ids
    _, matched, kept, text = run(tiny, params, groups, reason=reason)
    assert (matched, kept) == (None, ids)
    assert text == tiny.decode(shown, skip_special_tokens=params.skip_special_tokens)


def test_tokens_after_the_match_in_the_same_call_are_ignored(tiny):
    ids = tiny.encode("hello END and more")
    output = OutputText(tiny, [], SamplingParams(stop=("END",)))
    assert output.append(ids, finish_reason=None) == ("hello ", "END")
    assert tiny.decode(ids[: output.num_tokens_used]) == "hello END"
    assert output.append(ids, finish_reason="length") == ("", None)
    assert (output.num_tokens_used, output.text) == (0, "hello ")


def test_stp_01_a_stop_split_over_tokens_is_never_shown(tiny):
    ids = tiny.encode("ABC DEFGHIJ K")
    for size in (1, 2, 3, 4, 5):
        groups = [ids[start : start + size] for start in range(0, len(ids), size)]
        deltas, matched, _, _ = run(tiny, SamplingParams(stop=("DEFGHIJ", "GHIJ K")), groups, reason="length")
        assert ("".join(deltas), matched) == ("ABC ", "DEFGHIJ")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("reason", ["length", "stop", "abort"])
def test_stp_02_held_text_is_flushed_whatever_ends_generation(tiny, reason, include):
    ids = tiny.encode("the EN") + ([tiny.eos_token_id] if reason == "stop" else [])
    deltas, matched, kept, text = run(
        tiny, SamplingParams(stop=("END",), include_stop_str_in_output=include), [[id_] for id_ in ids], reason=reason
    )
    assert (text, matched, kept) == ("the EN", None, ids)
    assert "EN" in deltas[-1] or include


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_the_stop_token_is_in_the_text_only_if_asked_for_and_not_hidden(tiny, include, skip):
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    ids = [*tiny.encode("hello"), tiny.eos_token_id]
    expected = "hello<|im_end|>" if include and not skip else "hello"
    assert run(tiny, params, [ids], reason="stop")[3] == expected
    plain = tiny.encode("hello world")
    assert run(tiny, params, [plain], reason="stop")[3] == tiny.decode(plain if include else plain[:-1])


def test_stp_05_both_stops_in_one_token_cut_at_the_first(words):
    ids = words.encode("hello stop here world")
    for stop in (("world", "here"), ("here", "world")):
        deltas, matched, kept, _ = run(words, SamplingParams(stop=stop), [ids], reason="length")
        assert ("".join(deltas), matched, kept) == ("hello stop ", "here", ids[:3])


def test_stp_09_a_stop_completed_by_the_last_allowed_token_is_reported(tiny):
    ids = tiny.encode("hello END")
    _, matched, kept, text = run(tiny, SamplingParams(stop=("END",)), [[id_] for id_ in ids], reason="length")
    assert (matched, kept, text) == ("END", ids, "hello ")


def test_stp_10_a_marker_token_stays_whole_unless_its_end_begins_a_stop(tiny):
    ids = tiny.encode("x</think>y")
    for stop in ("</thi!", "think", "XYZ"):
        deltas = run(tiny, SamplingParams(stop=(stop,)), [[id_] for id_ in ids], reason="length")[0]
        assert "</think>" in deltas or stop == "think"


def test_stops_that_end_within_min_tokens_are_ignored(words):
    ids = words.encode("stop hello stop here")
    for min_tokens, expected in [(0, ""), (1, "stop hello "), (2, "stop hello "), (3, "stop hello stop here")]:
        assert run(words, SamplingParams(stop=("stop",), min_tokens=min_tokens), [ids], reason="length")[3] == expected


def test_a_stop_that_begins_within_min_tokens_and_ends_later_counts(tiny):
    ids = tiny.encode("ABCD")
    assert len(ids) == 4
    assert run(tiny, SamplingParams(stop=("BC",), min_tokens=2), [ids], reason="length")[:3] == (["A"], "BC", ids[:3])


@pytest.mark.parametrize(("min_tokens", "expected"), [(1, ("a", "\ufffd")), (2, ("a\ufffd", None))])
def test_flushed_text_counts_as_that_of_the_last_token(tiny, min_tokens, expected):
    ids = tiny.encode("a😀")[:2]
    _, matched, kept, text = run(tiny, SamplingParams(stop=("\ufffd",), min_tokens=min_tokens), [ids], reason="length")
    assert (text, matched) == expected
    assert kept == ids


def test_lpb_04_tokens_spell_the_text_though_text_is_held_back(tiny):
    """Text may come later than its tokens, but no token or character is lost or doubled."""
    ids = tiny.encode("ABCDEFGH, ABCDEFGHI? 我 no")
    output, spelled, counts = OutputText(tiny, [], SamplingParams(stop=("ABCDEFGHIJ",))), b"", 0
    for index, id_ in enumerate(ids):
        output.append([id_], finish_reason="length" if index == len(ids) - 1 else None)
        counts += output.num_tokens_used
        spelled += tiny.token_bytes(id_)
        assert spelled.startswith(output.text.encode())
    assert counts == len(ids)
    assert spelled.decode() == output.text == "ABCDEFGH, ABCDEFGHI? 我 no"


@pytest.mark.parametrize("detokenize", [False, True])
def test_without_text_every_token_counts(tiny, detokenize):
    tokenizer = None if detokenize else tiny
    output = OutputText(tokenizer, [1], SamplingParams(detokenize=detokenize))
    assert output.append([5, 6], finish_reason=None) == ("", None)
    assert output.num_tokens_used == 2
    assert output.append([-1, 7, 8], finish_reason="stop") == ("", None)
    assert (output.num_tokens_used, output.text) == (3, "")


def test_dtk_05_a_bad_id_harms_only_its_own_sequence(tiny):
    ids = tiny.encode("hello 我")
    outputs = [OutputText(tiny, [], SamplingParams(stop=("END",))) for _ in range(4)]
    for position, id_ in enumerate(ids):
        reason = "length" if position == len(ids) - 1 else None
        for row, output in enumerate(outputs):
            output.append(
                [{1: -1, 2: tiny.vocab_size + 5}.get(position, id_) if row == 2 else id_], finish_reason=reason
            )
    assert [output.text for row, output in enumerate(outputs) if row != 2] == ["hello 我"] * 3
    assert outputs[2].text == tiny.decode([id_ for position, id_ in enumerate(ids) if position not in (1, 2)])


def test_dtk_06_merging_calls_of_a_slow_reader_loses_nothing(tiny):
    ids = tiny.encode("The quick 👨‍👩‍👧‍👦 fox, 我能吞下玻璃 END") * 3
    expected = run(tiny, SamplingParams(stop=("ENDx",)), [[id_] for id_ in ids], reason="length")[3]
    for lag in range(2, 20):
        groups = [ids[start : start + lag] for start in range(0, len(ids), lag)]
        assert run(tiny, SamplingParams(stop=("ENDx",)), groups, reason="length")[3] == expected == tiny.decode(ids)


UNDECIDED_PROMPT = "<|im_start|>assistant\n"


def run_thinking(tokenizer, text, width, *, stop):
    """Drives `text`, `width` tokens a call, with stop strings kept out of thinking; returns (text, stop string)."""
    output = OutputText(tokenizer, [], SamplingParams(stop=stop), reasoning=ReasoningSplitter(UNDECIDED_PROMPT))
    ids = tokenizer.encode(text)
    for start in range(0, len(ids), width):
        is_last = start + width >= len(ids)
        _, matched = output.append(ids[start : start + width], finish_reason="length" if is_last else None)
        if matched is not None:
            return output.text, matched
    return output.text, None


@pytest.mark.parametrize("width", [1, 2, 5, 100])
def test_stop_strings_end_the_answer_and_not_the_thinking(tiny, width):
    thinking = "<think>\nnot END, not\n\nhere</think>\n\n"
    assert run_thinking(tiny, thinking + "so: END it", width, stop=("END",)) == (thinking + "so: ", "END")
    assert run_thinking(tiny, thinking + "a\n\nb", width, stop=("\n\n",)) == (thinking + "a", "\n\n")
    assert run_thinking(tiny, "so: END it", width, stop=("END",)) == ("so: ", "END")
    assert run_thinking(tiny, "\n\nso", width, stop=("\n\n",)) == ("", "\n\n")
    assert run_thinking(tiny, "<think>END", width, stop=("END",)) == ("<think>END", None)
    # Nothing matches across the border, and text that was held back is not lost.
    assert run_thinking(tiny, "<think>E</think>ND", width, stop=("END", "E</think>")) == ("<think>E</think>ND", None)
    assert run_thinking(tiny, thinking + "EN", width, stop=("END",)) == (thinking + "EN", None)
    assert run_thinking(tiny, "<think>a\n</thi", width, stop=("END",)) == ("<think>a\n</thi", None)


@pytest.mark.parametrize("width", [1, 2, 5, 100])
def test_stop_strings_do_not_move_the_border_of_the_thinking(tiny, width):
    text = "<think>\nabc\n</think>\n\nxyz"
    shown, matched = run_thinking(tiny, text, width, stop=("zzzzzzzz",))
    assert (shown, matched) == (text, None)
    splitter = ReasoningSplitter(UNDECIDED_PROMPT)
    assert splitter.feed(shown) == ("abc", "xyz")


@pytest.mark.parametrize("stop", [(), ("END",)])
@pytest.mark.parametrize("width", [1, 2, 5, 100])
def test_tokens_of_the_thinking_are_counted_one_by_one(tiny, width, stop):
    thinking = "<think>\nnot END, é né 你好\n</think>"
    for text, num_thinking in (
        (thinking + "\n\nThe answer.", len(tiny.encode(thinking))),
        (thinking[:-8], len(tiny.encode(thinking[:-8]))),
        ("The answer.", 0),
    ):
        splitter = ReasoningSplitter(UNDECIDED_PROMPT)
        output = OutputText(tiny, [], SamplingParams(stop=stop), reasoning=splitter)
        ids = tiny.encode(text)
        for start in range(0, len(ids), width):
            output.append(ids[start : start + width], finish_reason="length" if start + width >= len(ids) else None)
        assert output.text == text
        assert splitter.num_reasoning_tokens == num_thinking
