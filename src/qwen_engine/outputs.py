"""What a user gets: `RequestOutput` and its parts, and what one step brings the front end (`SequenceOutput`)."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Logprob:
    """Raw log-probability of one token at one position, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PositionLogprobs(Mapping[int, Logprob]):
    """Token id → Logprob at one position: the top ones by rank, and always the token that stands there.

    Kept as plain tuples, and a `Logprob` is made when it is looked at. Python's garbage collector walks through all
    objects as soon as their number has grown by a quarter, but leaves out tuples of numbers; with an object for every
    value that would hold up an engine for a tenth of a second every few dozen steps.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    texts: tuple[str | None, ...] | None = None

    def __getitem__(self, token_id: int) -> Logprob:
        if token_id not in self.token_ids:
            raise KeyError(token_id)
        index = self.token_ids.index(token_id)
        text = None if self.texts is None else self.texts[index]
        return Logprob(self.logprobs[index], self.ranks[index], text)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def items(self) -> ItemsView[int, Logprob]:
        return self.as_dict().items()

    def values(self) -> ValuesView[Logprob]:
        return self.as_dict().values()

    def __repr__(self) -> str:
        return repr(self.as_dict())

    def as_dict(self) -> dict[int, Logprob]:
        """All at once: for a whole vocabulary a search for each would take minutes."""
        texts = (None,) * len(self) if self.texts is None else self.texts
        return dict(zip(self.token_ids, map(Logprob, self.logprobs, self.ranks, texts)))


class SequenceOutput(Protocol):
    """What one step brought one sequence, as the front end reads it.

    token_id: the token sampled, None for a step that only computed prompt tokens. prompt_logprobs: (index of the first
    prompt token covered, one entry per token). scheduled_time: when it first got a slot, by `time.monotonic()`.
    """

    @property
    def sequence_id(self) -> str: ...
    @property
    def token_id(self) -> int | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...
    @property
    def logprobs(self) -> PositionLogprobs | None: ...
    @property
    def prompt_logprobs(self) -> tuple[int, Sequence[PositionLogprobs]] | None: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def scheduled_time(self) -> float: ...


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request in seconds; `arrival_time` is a `time.monotonic()` reading, the others are spans from it.

    scheduled_s: until the first of its samples got a slot.
    """

    arrival_time: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request. `finish_reason` is "stop", "length", "abort", or None while it runs.

    stop_reason: the stop string or stop token id that ended it; None for end-of-sequence and length.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Raw log-probability of all tokens together; None if no logprobs were asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token_id].logprob for token_id, entry in zip(self.token_ids, self.logprobs))

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything known of a request so far. `out["text"]`, `out["token_ids"]` are short for `out.outputs[0]`'s."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None

    def __getitem__(self, name: str) -> Any:
        if name in self:
            return getattr(self.outputs[0], name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")
