"""From tokens to what the user sees: text, stop strings, log-probabilities and times, per request and sample.

A request with n samples is n sequences inside the engine, gathered here under one id. The front end owns this; it tells
the engine to end a sequence whose text hit a stop string. What the engine still brings of an ended sample is ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from qwen_engine.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    SequenceOutput,
)
from qwen_engine.request import RequestSpec, SamplingParams
from qwen_engine.tokenization.output_text import OutputText
from qwen_engine.tokenization.reasoning import ReasoningSplitter
from qwen_engine.tokenization.tokenizer import Tokenizer


class SampleDelta(NamedTuple):
    """What one step added to one sample. Text may lag behind tokens, while it could still become a stop string."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @staticmethod
    def joined(deltas: Sequence[SampleDelta]) -> SampleDelta:
        """Successive deltas of one sample as one."""
        last = deltas[-1]
        if len(deltas) == 1:
            return last
        return SampleDelta(
            last.index,
            "".join([delta.text for delta in deltas]),
            tuple(chain.from_iterable([delta.token_ids for delta in deltas])),
            tuple(chain.from_iterable([delta.logprobs for delta in deltas])),
            last.finish_reason,
            last.stop_reason,
        )

    def then(self, other: SampleDelta) -> SampleDelta:
        """This delta and the next one as one."""
        return SampleDelta.joined((self, other))


class _Sample:
    """One sequence's output so far."""

    def __init__(self, index: int, text: OutputText, params: SamplingParams) -> None:
        self.index = index
        self.text = text
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._shown_logprobs: list[dict[int, Logprob]] = []  # those that somebody has looked at
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_preemptions = 0

    def output(self) -> CompletionOutput:
        shown = self._shown_logprobs
        if self.logprobs is not None:
            shown += [entry.as_dict() for entry in self.logprobs[len(shown) :]]
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else list(shown),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestState:
    """A user's request and what its sequences have brought so far.

    arrival_time: when the user asked, by `time.monotonic()`; None is now.
    new_splitter: for chats, makes what tells the thinking of one sample from its answer, where stop strings count.
    """

    def __init__(
        self,
        spec: RequestSpec,
        tokenizer: Tokenizer | None,
        *,
        arrival_time: float | None = None,
        new_splitter: Callable[[RequestSpec], ReasoningSplitter] | None = None,
    ) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.prompt_token_ids = spec.prompt_token_ids
        self._tokenizer = tokenizer
        params = spec.params
        self._splitters = [None if new_splitter is None else new_splitter(spec) for _ in range(params.n)]
        texts = [OutputText(tokenizer, spec.prompt_token_ids, params, reasoning=item) for item in self._splitters]
        self._samples = {
            sequence_id: _Sample(index, texts[index], params) for index, sequence_id in enumerate(spec.sequence_ids)
        }
        self._num_running = len(self._samples)
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(spec.prompt_token_ids)
        self._prompt_dicts: list[dict[int, Logprob] | None] | None = None  # of what somebody has looked at
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache had for the first sample."""
        self.moved = False
        """Something was taken since the reader last looked; the reader clears it."""
        self.failure: str | None = None
        """Why the engine died under this request; None if it did not."""
        self._arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self._scheduled_s: float | None = None
        self._first_token_s: float | None = None
        self._finished_s: float | None = None

    @property
    def finished(self) -> bool:
        return self._num_running == 0

    @property
    def finish_reasons(self) -> list[str | None]:
        """One for each sample."""
        return [sample.finish_reason for sample in self._samples.values()]

    @property
    def output_lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [len(sample.token_ids) for sample in self._samples.values()]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Output tokens up to the end of the thinking; None for what is no chat."""
        counts = [splitter.num_reasoning_tokens for splitter in self._splitters if splitter is not None]
        return sum(counts) if counts else None

    @property
    def metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self._arrival_time,
            scheduled_s=self._scheduled_s,
            first_token_s=self._first_token_s,
            finished_s=self._finished_s,
            num_preemptions=sum(sample.num_preemptions for sample in self._samples.values()),
        )

    def take(self, output: SequenceOutput, end: Callable[[str, str, int | str | None], None]) -> SampleDelta | None:
        """Takes one step's output of a sequence; returns what it adds, None if nothing that a reader would see.

        Calls `end(sequence id, "stop", stop string)` when the text hit a stop string.
        """
        sample = self._samples[output.sequence_id]
        if sample.finish_reason is not None:
            return None
        if output.prompt_logprobs is not None and self.prompt_logprobs is not None:
            start, entries = output.prompt_logprobs
            self.prompt_logprobs[start : start + len(entries)] = [self._with_text(entry) for entry in entries]
            self._prompt_dicts = None
        token_id = output.token_id
        if token_id is None:
            return None
        self.moved = True
        if not sample.token_ids:
            self._begin(sample, output)
        sample.num_preemptions = output.num_preemptions
        reason, stop_reason = output.finish_reason, output.stop_reason
        text, stop = sample.text.append((token_id,), finish_reason=reason)
        sample.token_ids.append(token_id)
        logprobs: tuple[PositionLogprobs, ...] = ()
        if sample.logprobs is not None and output.logprobs is not None:
            logprobs = (self._with_text(output.logprobs),)
            sample.logprobs += logprobs
        if stop is not None:
            end(output.sequence_id, "stop", stop)
            reason, stop_reason = "stop", stop
        if reason is not None:
            self._end(sample, reason, stop_reason)
        return SampleDelta(sample.index, text, (token_id,), logprobs, reason, stop_reason)

    def abort(self, failure: str | None = None) -> list[SampleDelta]:
        """Ends what still runs with finish_reason "abort"; held-back text is kept, and part of what is returned."""
        if not self.finished:
            self.failure = failure
        deltas = []
        for sample in self._samples.values():
            if sample.finish_reason is None:
                self.moved = True
                text, _ = sample.text.append((), finish_reason="abort")
                self._end(sample, "abort", None)
                deltas.append(SampleDelta(sample.index, text, (), (), "abort"))
        return deltas

    def output(self) -> RequestOutput:
        """Everything so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.spec.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[sample.output() for sample in self._samples.values()],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self._shown_prompt_logprobs(),
            metrics=self.metrics,
        )

    def _shown_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.prompt_logprobs is None:
            return None
        if self._prompt_dicts is None:
            self._prompt_dicts = [None if entry is None else entry.as_dict() for entry in self.prompt_logprobs]
        return list(self._prompt_dicts)

    def _begin(self, sample: _Sample, output: SequenceOutput) -> None:
        """Notes what is known with a sample's first token."""
        if sample.index == 0:
            self.num_cached_tokens = output.num_cached_tokens
        scheduled_s = output.scheduled_time - self._arrival_time
        if self._scheduled_s is None or scheduled_s < self._scheduled_s:
            self._scheduled_s = scheduled_s
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._arrival_time

    def _end(self, sample: _Sample, reason: str, stop_reason: int | str | None) -> None:
        sample.finish_reason = reason
        sample.stop_reason = stop_reason
        self._num_running -= 1
        if self.finished:
            self._finished_s = time.monotonic() - self._arrival_time

    def _with_text(self, entry: PositionLogprobs) -> PositionLogprobs:
        if self._tokenizer is None:
            return entry
        return replace(entry, texts=tuple(map(self._tokenizer.token_str, entry.token_ids)))
