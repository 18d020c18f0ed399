"""Stop strings in text that arrives in pieces.

Rule: the text is read character by character and the first stop string to be complete ends it; if several are complete
at the same character, the longest (which starts earliest) counts. Neither the order of the list nor the way the text
is cut into pieces can change the result.

An Aho-Corasick automaton gives this in a constant number of steps per character for any number of stop strings: its
state is the longest suffix of the text that begins a stop string, which is exactly the text to hold back.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class _Automaton(NamedTuple):
    """Arrays over nodes; node 0 is the empty prefix, every other node a prefix of some stop string."""

    children: list[dict[str, int]]
    fallback: list[int]  # the node's longest proper suffix that is a node too
    complete: list[str | None]  # longest stop string that ends here
    undecided: list[int]  # characters, length of the longest suffix that a stop string could still continue


@lru_cache(maxsize=64)  # requests of one client tend to share their stop strings
def _build(stop: tuple[str, ...]) -> _Automaton:
    children: list[dict[str, int]] = [{}]
    complete: list[str | None] = [None]
    for text in stop:
        node = 0
        for char in text:
            if char not in children[node]:
                children[node][char] = len(children)
                children.append({})
                complete.append(None)
            node = children[node][char]
        complete[node] = text

    fallback = [0] * len(children)
    undecided = [0] * len(children)
    queue = deque((child, 0, char, 1) for char, child in children[0].items())
    while queue:  # breadth first: a fallback is shorter than its node, so it is finished before
        node, parent, char, length = queue.popleft()
        if parent:
            suffix = fallback[parent]
            while suffix and char not in children[suffix]:
                suffix = fallback[suffix]
            fallback[node] = children[suffix].get(char, 0)
        complete[node] = complete[node] or complete[fallback[node]]
        undecided[node] = length if children[node] else undecided[fallback[node]]
        queue.extend((child, node, next_char, length + 1) for next_char, child in children[node].items())
    return _Automaton(children, fallback, complete, undecided)


class StopChecker:
    """Finds the first stop string in one sequence's text and holds back what could become part of one.

    `stop` holds non-empty strings. With `include_stop_str_in_output` nothing needs to be held back, because a match
    does not take back text that came before its end.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool) -> None:
        self._automaton = _build(tuple(stop))
        self._include = include_stop_str_in_output
        self._node = 0
        self._held = ""

    def feed(self, new_text: str, *, can_match: bool = True) -> tuple[str, str | None]:
        """Text that is now safe to show, and the stop string if one is complete; text after a match is dropped.

        With `can_match=False` stop strings that end in this piece are ignored, but one may begin in it and end later.
        """
        children, fallback, complete, undecided = self._automaton
        node = self._node
        if not node and children[0].keys().isdisjoint(new_text):  # nothing held and no stop string begins: most text
            return new_text, None
        for index, char in enumerate(new_text):
            while node and char not in children[node]:
                node = fallback[node]
            node = children[node].get(char, 0)
            if can_match and (matched := complete[node]) is not None:
                text = self._held + new_text[: index + 1]
                self._node, self._held = 0, ""
                return text if self._include else text[: -len(matched)], matched
        self._node = node
        text = self._held + new_text
        safe = len(text) - (0 if self._include else undecided[node])
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The held text, once nothing more can follow."""
        held, self._node, self._held = self._held, 0, ""
        return held
