"""POST /v1/completions: text in, text on; also the place where prompts are scored (echo with logprobs)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qwen_engine.frontend.output_processor import RequestState, SampleDelta
from qwen_engine.request import RequestSpec
from qwen_engine.server.json_response import JsonTemplate, to_json
from qwen_engine.server.logprobs import CompletionLogprobs, join_pieces, prompt_logprobs
from qwen_engine.server.protocol import CompletionBody
from qwen_engine.server.service import Call, Service, Write, check_token_ids, write_chunks
from qwen_engine.tokenization.tokenizer import Tokenizer


async def completions(service: Service, body: CompletionBody, request: Request) -> Response:
    body.check()
    with body.naming_fields():
        call = await service.open(
            request,
            body,
            id_prefix="cmpl-",
            num_sequences=len(body.prompts) * max(1, body.n or 1),
            prepare=lambda: _specs(service, body),
        )
        answer = _Answer(service, body, call)
        if body.stream:
            return await call.stream(answer.write_events)
        return await call.whole(answer.whole)


def _specs(service: Service, body: CompletionBody) -> Sequence[RequestSpec]:
    more: dict[str, Any] = {"logprobs": body.logprobs}
    if body.only_scores:
        more["max_tokens"] = 1  # the engine has no request without output; the token is dropped
    elif body.max_tokens is not None:
        more["max_tokens"] = body.max_tokens
    if body.echo and body.logprobs is not None:
        counts = (body.logprobs, body.prompt_logprobs or 0)
        more["prompt_logprobs"] = -1 if -1 in counts else max(counts)
    params = body.sampling_params(service.options.sampling_defaults, **more)
    specs = []
    for prompt in body.prompts:
        if not isinstance(prompt, str):
            check_token_ids(service.tokenizer, prompt, "prompt")
        form: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        form |= {"priority": body.priority or 0, "cache_salt": body.cache_salt}
        spec = service.inputs.process(form, params)
        spec.sequence(0)  # refuses malformed fields
        specs.append(spec)
    return specs


class _Answer:
    """One call's answer, whole or in chunks; a choice's chunks joined are its whole."""

    def __init__(self, service: Service, body: CompletionBody, call: Call) -> None:
        self._body = body
        self._call = call
        samples = call.generation.states[0].spec.params.n
        self._choices = [
            _Choice(service.tokenizer, body, state, index=index * samples + sample)
            for index, state in enumerate(call.generation.states)
            for sample in range(samples)
        ]
        self._held: dict[int, SampleDelta] = {}  # tokens whose text is not certain yet
        self._templates: dict[int, JsonTemplate] = {}
        # Chunks but the last of a choice hold nothing but text that could differ.
        self._has_plain_chunks = not (
            body.echo or body.return_token_ids or body.wants_running_usage or body.logprobs is not None
        )

    def whole(self) -> dict[str, Any]:
        choices = []
        for state in self._call.generation.states:
            for sample in state.output().outputs:
                delta = SampleDelta(
                    sample.index,
                    sample.text,
                    tuple(sample.token_ids),
                    tuple(sample.logprobs or ()),
                    sample.finish_reason,
                    sample.stop_reason,
                )
                choice = self._choices[len(choices)].part(delta)
                if self._body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs or ())
                if self._body.return_token_ids:
                    choice["prompt_token_ids"] = list(state.prompt_token_ids)
                choices.append(choice)
        return {**self._head(), "system_fingerprint": None, "choices": choices, "usage": self._usage()}

    async def write_events(self, write: Write) -> None:
        await write_chunks(write, self._call, self._encode, self._last_chunk)

    def _encode(self, deltas: Sequence[tuple[int, SampleDelta]]) -> Iterator[bytes]:
        """The chunks of what has come, as JSON."""
        for index, delta in deltas:
            if index in self._held:
                delta = self._held.pop(index).then(delta)
            if not delta.text and delta.finish_reason is None:
                self._held[index] = delta
                continue
            if self._has_plain_chunks and delta.finish_reason is None:
                yield self._template(index).fill(delta.text)
            else:
                part = self._choices[index].part(delta)
                yield to_json(self._chunk([part], with_usage=self._body.wants_running_usage))

    def _last_chunk(self) -> dict[str, Any] | None:
        return self._chunk([], with_usage=True) if self._body.wants_usage else None

    def _template(self, index: int) -> JsonTemplate:
        """A chunk of nothing but text."""
        if index not in self._templates:
            choice = self._choices[index]
            self._templates[index] = JsonTemplate(lambda text: self._chunk([choice.part(SampleDelta(0, text, ()))]))
        return self._templates[index]

    def _chunk(self, choices: list[dict[str, Any]], *, with_usage: bool = False) -> dict[str, Any]:
        chunk = {**self._head(), "choices": choices}
        if with_usage:
            chunk["usage"] = self._usage()
        return chunk

    def _head(self) -> dict[str, Any]:
        call = self._call
        return {"id": call.id, "object": "text_completion", "created": call.created, "model": call.model}

    def _usage(self) -> dict[str, Any]:
        return self._call.usage(num_output_tokens=0 if self._body.only_scores else None)


class _Choice:
    """One choice: adds the echoed prompt to its first part, and counts text offsets over all of them."""

    def __init__(self, tokenizer: Tokenizer, body: CompletionBody, state: RequestState, *, index: int) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._state = state
        self._index = index
        self._has_begun = False
        self._logprobs: CompletionLogprobs | None = None
        params = state.spec.params
        if params.logprobs is not None:
            self._logprobs = CompletionLogprobs(
                tokenizer, params.logprobs, skip_special_tokens=params.skip_special_tokens
            )

    def part(self, delta: SampleDelta) -> dict[str, Any]:
        """The next part, or all of it."""
        if self._body.only_scores:
            reason = None if delta.finish_reason is None else "length"
            delta = SampleDelta(delta.index, "", (), (), reason)
        text, logprobs = delta.text, None
        if self._body.echo and not self._has_begun:
            prompt = self._state.spec.prompt
            if prompt is None:
                prompt = self._tokenizer.decode(self._state.prompt_token_ids, skip_special_tokens=False)
            text = prompt + text
            if self._logprobs is not None:
                logprobs = self._logprobs.prompt(self._state.prompt_token_ids, self._state.prompt_logprobs or ())
        self._has_begun = True
        if self._logprobs is not None:
            new = self._logprobs.output(delta.token_ids, delta.logprobs)
            logprobs = new if logprobs is None else join_pieces(logprobs, new)
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice
