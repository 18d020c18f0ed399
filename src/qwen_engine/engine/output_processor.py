"""From tokens to what the user sees: text, stop strings, log-probabilities and times, per request and sample.

A request with n samples is n sequences inside the engine, gathered here under one id. The front end owns this; it tells
the core to end a sequence whose text hit a stop string.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from qwen_engine.engine.core import TokenOutput
from qwen_engine.request import (
    CompletionOutput,
    PositionLogprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from qwen_engine.tokenization.output_text import OutputText
from qwen_engine.tokenization.tokenizer import Tokenizer


class _Sample:
    """One sequence's output so far."""

    def __init__(self, index: int, text: OutputText, params: SamplingParams) -> None:
        self.index = index
        self.text = text
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestState:
    """A user's request: its prompt, its samples and the sequences that compute them."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        sequences: Sequence[Request],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sequences = sequences
        self.tokenizer = tokenizer
        params = sequences[0].params
        num_prompt = sequences[0].num_prompt_tokens
        self.prompt_token_ids = sequences[0].token_ids[:num_prompt]
        self.samples = {
            sequence.request_id: _Sample(index, OutputText(tokenizer, self.prompt_token_ids, params), params)
            for index, sequence in enumerate(sequences)
        }
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * num_prompt
        self.moved = False
        """Something was taken since the reader last looked; the reader clears it."""
        self.failure: str | None = None
        """Why the engine died under this request; None if it did not."""
        self._arrival_time = time.monotonic()
        self._first_token_s: float | None = None
        self._finished_s: float | None = None

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples.values())

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples.values())

    def take(self, output: TokenOutput, end: Callable[[str, str, int | str | None], None]) -> None:
        """Takes one step's output; calls `end(sequence id, "stop", stop string)` when the text hit a stop string."""
        request = output.request
        sample = self.samples[request.request_id]
        if output.prompt_logprobs is not None and self.prompt_logprobs is not None:
            start, entries = output.prompt_logprobs
            self.prompt_logprobs[start : start + len(entries)] = [self._with_text(entry) for entry in entries]
        if output.token_id is None:
            return
        self.moved = True
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._arrival_time
        _, stop = sample.text.append((output.token_id,), finish_reason=request.finish_reason)
        sample.token_ids.append(output.token_id)
        if sample.logprobs is not None and output.logprobs is not None:
            sample.logprobs.append(self._with_text(output.logprobs))
        if stop is not None:
            end(request.request_id, "stop", stop)
            self._end(sample, "stop", stop)
        elif request.finish_reason is not None:
            self._end(sample, request.finish_reason, request.stop_reason)

    def abort(self, failure: str | None = None) -> None:
        """Ends what still runs with finish_reason "abort"; held-back text is kept."""
        if not self.finished:
            self.failure = failure
        for sample in self.samples.values():
            if sample.finish_reason is None:
                self.moved = True
                sample.text.append((), finish_reason="abort")
                self._end(sample, "abort", None)

    def output(self) -> RequestOutput:
        """Everything so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[sample.output() for sample in self.samples.values()],
            finished=self.finished,
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            metrics=RequestMetrics(
                arrival_time=self._arrival_time,
                first_token_s=self._first_token_s,
                finished_s=self._finished_s,
                num_preemptions=sum(sequence.num_preemptions for sequence in self.sequences),
            ),
        )

    def _end(self, sample: _Sample, reason: str, stop_reason: int | str | None) -> None:
        sample.finish_reason = reason
        sample.stop_reason = stop_reason
        if self.finished:
            self._finished_s = time.monotonic() - self._arrival_time

    def _with_text(self, entry: PositionLogprobs) -> PositionLogprobs:
        if self.tokenizer is None:
            return entry
        return {
            token_id: replace(value, decoded_token=self.tokenizer.token_str(token_id))
            for token_id, value in entry.items()
        }
