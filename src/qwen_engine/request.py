"""What a user asks for: `SamplingParams`, `RequestSpec` (a checked request) and `Request` (one sequence of it).

A `Request` is owned by the scheduler from admission to its end; `num_computed_tokens` is its only progress.
Ranges are checked here, in one place; what depends on the model (vocabulary, context) is checked by
`SamplingParams.check_model`.
"""

from __future__ import annotations

import enum
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from struct import error as StructError
from struct import pack
from typing import Any, Protocol

from qwen_engine.checks import (
    check_integer,
    check_number,
    checked_strings,
    checked_token_ids,
    is_number,
    plain,
    refuse_unknown_names,
)
from qwen_engine.errors import RequestError, shown
from qwen_engine.structured_outputs import StructuredOutputs, as_structured_outputs

logger = logging.getLogger(__name__)

GREEDY_TEMPERATURE = 0.01
"""Temperatures up to this one choose the most likely token; smaller positive ones are raised to it."""
MAX_SAMPLES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64  # every slot has room for the most and longest in use
MAX_LOGIT_BIAS = 1024
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so n samples of one seed get n different seeds


class TokenConstraint(Protocol):
    """Decides, token by token, which ids may come next in one sequence (`TokenMatcher` in tokenization/structured)."""

    @property
    def error(self) -> str | None: ...
    def mask(self) -> bytes: ...
    def accept(self, token_id: int) -> None: ...


@refuse_unknown_names
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose and end the tokens of a request. Out-of-range values raise RequestError naming the parameter.

    n: independent samples of one prompt.
    temperature: 0 (or ≤ 0.01) takes the most likely token, the lowest id on ties, whatever the other fields say.
    top_k: keep the k most likely tokens; 0 and -1 keep all. top_p: keep the smallest set with this much probability.
    min_p: keep tokens with at least min_p times the top probability. Applied in the order min_p, top_k, top_p; tokens
    as likely as the last one kept are kept too.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens in the output.
    repetition_penalty: logits of tokens in prompt or output are divided (if positive) or multiplied by it.
    seed: makes the noise of a request depend on seed and position only; None (or -1) takes one from the engine.
    logit_bias: token id → value added to its logit, clamped to [-100, 100]. allowed_token_ids: all others are masked.
    bad_words: strings that may not be completed, unless nothing else is allowed.
    stop, stop_token_ids: end the output; stop strings are cut off unless include_stop_str_in_output.
    ignore_eos: the checkpoint's end-of-sequence ids do not end the output.
    min_tokens: no end of any kind before. max_tokens: None, and more than fit, is up to the
    context limit.
    logprobs, prompt_logprobs: also return raw log-probabilities (before penalties and temperature) of this many top
    tokens, and of the one that stands there; -1: of the whole vocabulary. The engine's max_logprobs is the most.
    structured_outputs: what the text has to be, a `StructuredOutputs` or a mapping of its fields. The output then ends
    when it is complete, before `min_tokens` if need be. Thinking before the answer is free.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if (number := plain(value)) is not value:
                object.__setattr__(self, name, number)
        check_integer("n", self.n, 1, MAX_SAMPLES)
        check_number("temperature", self.temperature, 0.0, 2.0)
        if 0 < self.temperature < GREEDY_TEMPERATURE:
            logger.warning("temperature %g is raised to %g, which is greedy", self.temperature, GREEDY_TEMPERATURE)
            object.__setattr__(self, "temperature", GREEDY_TEMPERATURE)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_integer("top_k", self.top_k, -1, INT64_MAX)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.seed is not None:
            check_integer("seed", self.seed, INT64_MIN, INT64_MAX)
        check_integer("min_tokens", self.min_tokens, 0, INT64_MAX)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, INT64_MAX)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", param="min_tokens"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1, INT64_MAX)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {shown(getattr(self, name))}; it must be true or false", param=name)
        self._normalise_collections()
        if self.n > 1 and self.is_greedy:
            raise RequestError(f"n is {self.n}, but greedy samples are all equal; raise temperature", param="n")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead", param="stop")
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", as_structured_outputs(self.structured_outputs))
            if self.allowed_token_ids is not None:
                raise RequestError(
                    "allowed_token_ids and structured_outputs could leave no token to choose; give one of them",
                    param="allowed_token_ids",
                )

    def _normalise_collections(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", checked_strings("stop", stop, MAX_STOP_STRINGS, MAX_STOP_CHARS))
        bad_words = checked_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        object.__setattr__(self, "bad_words", bad_words)
        stop_token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        ids = checked_token_ids("stop_token_ids", stop_token_ids, MAX_STOP_TOKEN_IDS)
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(ids)))
        if self.allowed_token_ids is not None:
            allowed = checked_token_ids("allowed_token_ids", self.allowed_token_ids, INT64_MAX)
            if not allowed:
                raise RequestError("allowed_token_ids is empty; no token could be chosen", param="allowed_token_ids")
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(allowed)))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def check_model(self, *, vocab_size: int, max_logprobs: int, eos_token_ids: Sequence[int] = ()) -> None:
        """Checks what depends on the model: ids lie in the vocabulary, logprob counts under the cap.

        max_logprobs: the cap, -1 for none. eos_token_ids: the end-of-sequence ids this request obeys.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise RequestError(f"{name} holds id {shown(token_id)}; ids are 0 to {vocab_size - 1}", param=name)
        ends = {*self.stop_token_ids, *eos_token_ids}
        if self.structured_outputs is not None and not ends:
            raise RequestError(
                "structured output ends at an end-of-sequence token, but this request has none: leave ignore_eos out",
                param="ignore_eos",
            )
        if self.min_tokens and self.allowed_token_ids is not None and ends.issuperset(self.allowed_token_ids):
            raise RequestError(
                f"allowed_token_ids only holds ids that end the output, and min_tokens is {self.min_tokens}",
                param="allowed_token_ids",
            )
        limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (vocab_size if value == -1 else value) > limit:
                asked = f"{value}, all {vocab_size}" if value == -1 else value
                raise RequestError(f"{name} is {asked}; at most {limit} are returned (max_logprobs)", param=name)

    def with_counts(self, vocab_size: int) -> SamplingParams:
        """These with the size of the vocabulary where `logprobs` or `prompt_logprobs` is -1."""
        counts = {name: vocab_size for name in ("logprobs", "prompt_logprobs") if getattr(self, name) == -1}
        return replace(self, **counts) if counts else self


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence of tokens and its progress. The scheduler alone changes it.

        token_ids   [ prompt ............... | output ......... ]            values known on the host
        num_tokens  [ ................................................ )     plus tokens sampled by a launched step
        KV written  [ num_computed_tokens ....... )                          by all launched steps

    token_ids are int32; those of a prompt that holds something else, which the scheduler refuses, are as they came.
    packed_prompt: the prompt's ids as they lie in memory; None for such a prompt.
    Computing positions [num_computed_tokens, num_tokens) yields the next token. Between launch and result of a step,
    `num_tokens` is one ahead of `token_ids`; the value is on the device only.
    """

    __slots__ = (
        "admission_step",
        "arrival",
        "bad_word_ids",
        "block_ids",
        "block_keys",
        "cache_salt",
        "constraint",
        "finish_reason",
        "limit_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_tokens",
        "packed_prompt",
        "params",
        "prefix",
        "priority",
        "request_id",
        "scheduled_time",
        "seed",
        "slot",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
        "writing_since",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        packed_prompt: bytes | None = None,
        seed: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        eos_token_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """packed_prompt: what `packed_ids` makes of the prompt, where it is known."""
        if isinstance(prompt_token_ids, str | bytes) or not isinstance(prompt_token_ids, Sequence):
            kind = type(prompt_token_ids).__name__
            raise RequestError(f"prompt is {kind}; it must be a list of token ids", param="prompt")
        check_integer("priority", priority, INT64_MIN, INT64_MAX)
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError(f"cache_salt is {shown(cache_salt)}; it must be a non-empty string", param="cache_salt")
        self.request_id = request_id
        packed = packed_ids(prompt_token_ids) if packed_prompt is None else packed_prompt
        self.token_ids = list(prompt_token_ids) if packed is None else array("i", packed)
        self.packed_prompt = packed
        self.params = params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.bad_word_ids = bad_word_ids
        self.constraint: TokenConstraint | None = None  # of params.structured_outputs; set before it is queued
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )

        self.num_prompt_tokens = len(self.token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.limit_tokens = 0  # prompt + output may not pass this; set at admission to the queue
        self.arrival = 0  # set at admission to the queue
        self.writing_since: int | None = None  # arrivals there had been when all but one of its tokens were scheduled
        self.admission_step = 0  # the step in which it last got its slot and blocks
        self.scheduled_time = 0.0  # time.monotonic() when it first got them

        self.slot = -1
        self.block_ids: array[int] = array("i")  # its block table
        self.prefix: Any = None  # the `Prefix` that its table begins with
        self.block_keys: list[bytes] = []  # prefix-index keys of the leading full blocks
        self.num_published_blocks = 0

        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def packed_ids(token_ids: Sequence[int]) -> bytes | None:
    """Ids as int32; None if an entry is no such number. A bool is none."""
    if [*map(type, token_ids)].count(int) < len(token_ids):
        return None
    try:
        return pack(f"{len(token_ids)}i", *token_ids)
    except StructError:
        return None


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A user's request, tokenized and checked against the model: all that the engine needs to know of it.

    One prompt with `params.n` samples; each is a sequence of its own inside the engine.
    packed_prompt: what `packed_ids` makes of the prompt, so that neither its sequences nor another process do it again.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    priority: int = 0
    cache_salt: str | None = None
    eos_token_ids: Sequence[int] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    packed_prompt: bytes | None = None

    @property
    def sequence_ids(self) -> list[str]:
        return [f"{self.request_id}-{index}" for index in range(self.params.n)]

    def sequence(self, index: int) -> Request:
        """A new sequence to queue, for one of the samples. Raises RequestError for malformed fields."""
        return Request(
            f"{self.request_id}-{index}",
            self.prompt_token_ids,
            self.params,
            packed_prompt=self.packed_prompt,
            seed=_wrap_int64(self.seed + index * _SEED_STEP),
            priority=self.priority,
            cache_salt=self.cache_salt,
            eos_token_ids=self.eos_token_ids,
            bad_word_ids=self.bad_word_ids,
        )


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(
            f"logit_bias is {type(value).__name__}; it must map token ids to numbers", param="logit_bias"
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed", param="logit_bias"
        )
    biases = {}
    for key, bias in ((plain(key), plain(bias)) for key, bias in value.items()):
        try:
            token_id = int(key) if isinstance(key, str) else key
            check_integer("key", token_id, INT64_MIN, INT64_MAX)
        except ValueError:
            raise RequestError(f"logit_bias holds key {shown(key)}; keys are token ids", param="logit_bias") from None
        if not is_number(bias) or bias != bias:
            raise RequestError(f"logit_bias of id {token_id} is {shown(bias)}; it must be a number", param="logit_bias")
        biases[token_id] = float(max(-100, min(100, bias)))
    return biases


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
