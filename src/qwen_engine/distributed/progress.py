"""How far a rank has come: what the watch over a hanging step compares between ranks.

All ranks take the same steps and, in each, enter the same collectives in the same order, so the rank with the smallest
position is the one that the others wait for. Counting costs two additions; positions are read only when a step hangs.
"""

from __future__ import annotations

from collections.abc import Mapping

Position = tuple[int, int]
"""(steps begun, collectives entered in the last of them): ordered, equal on ranks that stand at the same point."""


class Progress:
    """The counters of one rank, written by the thread that runs its steps."""

    __slots__ = ("num_collectives", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_collectives = 0

    def begin_step(self) -> None:
        self.num_collectives = 0
        self.num_steps += 1

    def enter_collective(self) -> None:
        self.num_collectives += 1

    @property
    def position(self) -> Position:
        return self.num_steps, self.num_collectives


def who_is_behind(positions: Mapping[int, Position | None]) -> str:
    """One clause that names the ranks which keep the others waiting. None: that rank does not answer.

    Rank 0 begins a step first, so its number is that of the step which hangs.
    """
    known = {rank: position for rank, position in positions.items() if position is not None}
    front = max(known.values())
    step, num_collectives = front
    where = f"step {step}" + (f", at its collective {num_collectives}" if num_collectives else "")
    clauses = []
    if silent := [rank for rank, position in positions.items() if position is None]:
        clauses.append(f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
    for position in sorted({position for position in known.values() if position < front}):
        ranks = [rank for rank in known if known[rank] == position]
        verb = "has" if len(ranks) == 1 else "have"
        what = f"begun step {step}" if position[0] < step else f"gone beyond collective {position[1]} of step {step}"
        clauses.append(f"{_ranks(ranks)} {verb} not {what}")
    ahead = [rank for rank in known if known[rank] == front]
    if clauses:
        return f"{', '.join(clauses)}; {_ranks(ahead)} {'waits' if len(ahead) == 1 else 'wait'} in {where}"
    return f"all ranks are in {where}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
