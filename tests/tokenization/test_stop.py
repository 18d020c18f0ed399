from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_engine.tokenization.stop import StopChecker

STOPS = st.lists(st.text("ab我", min_size=1, max_size=5), min_size=1, max_size=5)


def run(stop, pieces, *, include=False):
    """Emitted pieces, the matched stop, and what a flush adds when nothing matched."""
    checker = StopChecker(stop, include_stop_str_in_output=include)
    emitted = []
    for piece in pieces:
        emit, matched = checker.feed(piece)
        emitted.append(emit)
        if matched is not None:
            return emitted, matched
    emitted.append(checker.flush())
    return emitted, None


def oracle(stop, text, *, include=False):
    for end in range(1, len(text) + 1):
        complete = [item for item in stop if text[:end].endswith(item)]
        if complete:
            matched = max(complete, key=len)
            return text[: end if include else end - len(matched)], matched
    return text, None


def longest_open_suffix(stop, text):
    sizes = [n for item in stop for n in range(1, len(item)) if text.endswith(item[:n])]
    return max(sizes, default=0)


def split(text, cuts):
    edges = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(
    stop=STOPS, text=st.text("ab我x", max_size=25), cuts=st.lists(st.integers(0, 25), max_size=6), include=st.booleans()
)
@settings(max_examples=400)
def test_result_equals_a_character_reader_for_any_chunking(stop, text, cuts, include):
    emitted, matched = run(stop, split(text, [min(cut, len(text)) for cut in cuts]), include=include)
    assert ("".join(emitted), matched) == oracle(stop, text, include=include)


@given(stop=STOPS, text=st.text("ab我x", max_size=25), order=st.randoms())
@settings(max_examples=200)
def test_result_is_independent_of_the_order_of_stops(stop, text, order):
    shuffled = order.sample(stop, len(stop))
    assert run(shuffled, list(text)) == run(stop, list(text))


@given(stop=STOPS, text=st.text("ab我x", max_size=25))
@settings(max_examples=300)
def test_stp_01_held_text_is_the_longest_suffix_that_begins_a_stop(stop, text):
    checker = StopChecker(stop, include_stop_str_in_output=False)
    shown = ""
    for index, char in enumerate(text, start=1):
        emit, matched = checker.feed(char)
        shown += emit
        if matched is not None:
            break
        assert index - len(shown) == longest_open_suffix(stop, text[:index])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stop", [["DEFGHIJ"], ["DEFGHIJ", "GHIJ K"], ["GHIJ KL", "DEFGHIJ", "DEFX"]])
def test_stp_01_no_character_of_a_matched_stop_is_shown(stop, size):
    text = "ABC DEFGHIJ K"
    emitted, matched = run(stop, [text[start : start + size] for start in range(0, len(text), size)])
    assert ("".join(emitted), matched) == ("ABC ", "DEFGHIJ")


def test_stp_02_held_text_is_flushed_when_no_stop_follows():
    emitted, matched = run(["END"], ["the ", "E", "N"])
    assert (emitted, matched) == (["the ", "", "", "EN"], None)


@pytest.mark.parametrize("stop", [["world", "hello"], ["hello", "world"]])
@pytest.mark.parametrize("pieces", [["say hello world"], list("say hello world"), ["say hel", "lo world"]])
def test_stp_05_the_earliest_stop_in_the_text_wins(stop, pieces):
    emitted, matched = run(stop, pieces)
    assert ("".join(emitted), matched) == ("say ", "hello")


def test_of_stops_complete_at_one_character_the_longest_wins():
    for stop in (["c", "abc"], ["abc", "c"]):
        assert run(stop, ["xabcd"]) == (["x"], "abc")


def test_a_stop_inside_a_longer_one_ends_the_text_first():
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")


def test_including_the_stop_shows_text_at_once_and_ends_with_it():
    assert run(["END"], ["E", "EN", "D and more"], include=True) == (["E", "EN", "D"], "END")


def test_a_stop_that_may_not_match_yet_is_shown_but_can_begin_a_later_one():
    checker = StopChecker(["aa"], include_stop_str_in_output=False)
    assert checker.feed("aa", can_match=False) == ("a", None)
    assert checker.feed("ab") == ("", "aa")


def test_cost_per_character_does_not_grow_with_the_number_or_length_of_stops():
    """Counts steps, not seconds: a text that keeps almost matching long stops."""
    lookups = 0

    class CountingDict(dict):
        def __contains__(self, key):
            nonlocal lookups
            lookups += 1
            return super().__contains__(key)

    checker = StopChecker(["a" * 2000 + "b", *(f"{'a' * n}c" for n in range(1, 200))], include_stop_str_in_output=False)
    automaton = checker._automaton
    checker._automaton = automaton._replace(children=[CountingDict(node) for node in automaton.children])
    text = ("a" * 3000 + "x") * 3
    assert checker.feed(text) == (text, None)
    assert lookups <= 2 * len(text)
