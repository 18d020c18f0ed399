"""Messages between the API process and the engine process: msgpack arrays, data only, the kind first.

    to the engine     add, abort, stop, reset_prefix_cache, shutdown
    from the engine   hello, ready, refused, step, aborted, failed

A token that needs no more is a row of two: sequence and token id.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from qwen_engine.outputs import PositionLogprobs, SequenceOutput
from qwen_engine.request import RequestSpec
from qwen_engine.scheduling.plan_codec import decode_params, encode_params

Message = Sequence[Any]


@dataclass(frozen=True, slots=True)
class EngineProcessSpec:
    """What the engine process is told at its start."""

    config: dict[str, Any]
    model_folder: str
    address: str
    beat_fd: int
    log_level: int
    log_format: str


class EngineStats(NamedTuple):
    """The engine at one moment. kv_usage: share of KV blocks that live requests hold; num_preemptions: since start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0


class EngineFacts(NamedTuple):
    """What the engine found out at its start."""

    max_model_len: int
    num_kv_blocks: int
    block_size: int
    device: str
    dtype: str


class WireOutput(NamedTuple):
    """A `SequenceOutput` that has crossed. `num_cached_tokens` and `scheduled_time` are only sure to be sent with a
    sequence's first token and with its last.
    """

    sequence_id: str
    token_id: int | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: tuple[int, list[PositionLogprobs]] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_time: float = 0.0


def pack(*message: Any) -> bytes:
    return msgpack.packb(message, unicode_errors="surrogatepass")


def unpack(data: bytes) -> Message:
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


def encode_spec(spec: RequestSpec) -> list[Any]:
    """The request without its text, which the engine has no use for."""
    return [
        spec.request_id,
        list(spec.prompt_token_ids) if spec.packed_prompt is None else spec.packed_prompt,
        encode_params(spec.params),
        spec.seed,
        spec.priority,
        spec.cache_salt,
        list(spec.eos_token_ids),
        [list(ids) for ids in spec.bad_word_ids],
    ]


def decode_spec(fields: Sequence[Any]) -> RequestSpec:
    request_id, prompt, params, seed, priority, cache_salt, eos_token_ids, bad_word_ids = fields
    packed_prompt = prompt if isinstance(prompt, bytes) else None
    return RequestSpec(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=prompt if packed_prompt is None else array("i", packed_prompt),
        params=decode_params(params),
        seed=seed,
        priority=priority,
        cache_salt=cache_salt,
        eos_token_ids=eos_token_ids,
        bad_word_ids=bad_word_ids,
        packed_prompt=packed_prompt,
    )


def encode_output(output: SequenceOutput, *, is_first: bool) -> tuple[Any, ...]:
    if not (is_first or output.finish_reason or output.logprobs or output.prompt_logprobs or output.num_preemptions):
        return (output.sequence_id, output.token_id)
    prompt = output.prompt_logprobs
    return (
        output.sequence_id,
        output.token_id,
        output.finish_reason,
        output.stop_reason,
        None if output.logprobs is None else _encode_logprobs(output.logprobs),
        None if prompt is None else [prompt[0], [_encode_logprobs(entry) for entry in prompt[1]]],
        output.num_cached_tokens,
        output.num_preemptions,
        output.scheduled_time,
    )


def decode_output(row: Sequence[Any]) -> WireOutput:
    output = WireOutput(*row)
    if output.logprobs is not None:
        output = output._replace(logprobs=_decode_logprobs(output.logprobs))
    if output.prompt_logprobs is not None:
        start, entries = output.prompt_logprobs
        output = output._replace(prompt_logprobs=(start, [_decode_logprobs(entry) for entry in entries]))
    return output


def _encode_logprobs(entry: PositionLogprobs) -> list[Any]:
    return [entry.token_ids, entry.logprobs, entry.ranks]


def _decode_logprobs(entry: Any) -> PositionLogprobs:
    return PositionLogprobs(*map(tuple, entry))
