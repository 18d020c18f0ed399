"""StepPlans as bytes: the only wire format between ranks. Data only (msgpack), strict in both directions.

A plan is a msgpack map with exactly the fields of `StepPlan`; an added slot is one with exactly those of `SlotInit`.
Lists of ids travel as little-endian int32 strings, the tokens per row as (tokens, rows) runs, and of the sampling
parameters only those that differ from their default. A steady decode step is 4 bytes a row.

The driver encodes, worker ranks decode; both refuse what the other could not read, with a `PlanError` naming the field.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any

import msgpack
import numpy as np

from qwen_engine.errors import QwenEngineError, RequestError, shown
from qwen_engine.request import INT64_MAX, INT64_MIN, SamplingParams
from qwen_engine.scheduling.step_plan import SlotInit, StepPlan

INT32_MAX = 2**31 - 1

_PLAN_FIELDS = frozenset(field.name for field in dataclasses.fields(StepPlan))
_SLOT_FIELDS = frozenset(SlotInit._fields)
_PARAM_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_ID_PARAMS = frozenset({"allowed_token_ids", "stop_token_ids"})


class PlanError(QwenEngineError, ValueError):
    """A plan that cannot be put into bytes, or bytes that are not a plan."""


def encode_plan(plan: StepPlan) -> bytes:
    """The plan as bytes. PlanError where a value does not fit the format."""
    slots, num_tokens = plan.slots, plan.num_tokens
    if len(slots) != len(num_tokens):
        raise PlanError(f"plan {plan.step} has {len(slots)} slots and {len(num_tokens)} entries of num_tokens")
    runs = [(value, sum(1 for _ in rows)) for value, rows in groupby(num_tokens)]
    return _pack(
        {
            "step": _checked_int("step", plan.step, 0, INT64_MAX),
            "slots": _pack_ids("slots", slots),
            "num_tokens": _pack_ids("num_tokens", list(chain.from_iterable(runs)), low=1),
            "added": [_slot_fields(entry) for entry in _checked_prefixes(plan.added)],
            "new_blocks": _pack_ids("new_blocks", list(chain.from_iterable(plan.new_blocks))),
            "freed_slots": _pack_ids("freed_slots", plan.freed_slots),
        }
    )


def decode_plan(data: bytes) -> StepPlan:
    """The plan that `encode_plan` was given, with lists and block tables. PlanError for any other bytes."""
    fields = _unpack("plan", data)
    _check_fields("plan", fields, _PLAN_FIELDS)
    slots = _unpack_ids("slots", fields["slots"])
    new_blocks = _unpack_ids("new_blocks", fields["new_blocks"])
    return StepPlan(
        step=_checked_int("step", fields["step"], 0, INT64_MAX),
        slots=slots,
        num_tokens=_expand_runs(_unpack_ids("num_tokens", fields["num_tokens"], low=1), num_rows=len(slots)),
        added=_checked_prefixes([_slot_init(entry) for entry in _checked_list("added", fields["added"])]),
        new_blocks=_pairs("new_blocks", new_blocks),
        freed_slots=_unpack_ids("freed_slots", fields["freed_slots"]),
    )


def encode_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from their default, ready for msgpack."""
    fields = {}
    for name, default in _PARAM_DEFAULTS.items():
        value = getattr(params, name)
        if value == default:
            continue
        if name in _ID_PARAMS:
            value = _pack_ids(name, value)
        elif name == "logit_bias":
            value = [_pack_ids(name, list(value)), struct.pack(f"<{len(value)}d", *value.values())]
        elif name == "structured_outputs":
            value = dataclasses.asdict(value)
        fields[name] = value
    return fields


def decode_params(fields: object) -> SamplingParams:
    """The inverse of `encode_params`. PlanError for anything else."""
    if not isinstance(fields, dict) or not fields.keys() <= _PARAM_DEFAULTS.keys():
        raise PlanError(f"plan's params are {shown(fields)}; they must be a map of sampling parameters")
    values = dict(fields)
    for name in _ID_PARAMS & values.keys():
        values[name] = _unpack_ids(name, values[name])
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise PlanError(f"plan's params are out of range: {error}") from error


def _slot_fields(entry: SlotInit) -> dict[str, Any]:
    fields = {
        "slot": entry.slot,
        "first_token": entry.first_token,
        "token_ids": _pack_array("token_ids", entry.token_ids),
        "num_prompt_tokens": entry.num_prompt_tokens,
        "num_computed_tokens": entry.num_computed_tokens,
        "prefix": entry.prefix,
        "block_ids": _pack_array("block_ids", entry.block_ids),
        "params": _pack(encode_params(entry.params)),
        "seed": entry.seed,
        "stop_ids": _pack_ids("stop_ids", entry.stop_ids),
        "bad_word_ids": [_pack_ids("bad_word_ids", ids) for ids in entry.bad_word_ids],
    }
    _check_slot_numbers(fields, num_given=len(entry.token_ids))
    return fields


def _slot_init(fields: object) -> SlotInit:
    _check_fields("added slot", fields, _SLOT_FIELDS)
    token_ids = _unpack_array("token_ids", fields["token_ids"])
    _check_slot_numbers(fields, num_given=len(token_ids))
    return SlotInit(
        slot=fields["slot"],
        first_token=fields["first_token"],
        token_ids=token_ids,
        num_prompt_tokens=fields["num_prompt_tokens"],
        num_computed_tokens=fields["num_computed_tokens"],
        prefix=_prefix(fields["prefix"]),
        block_ids=_unpack_array("block_ids", fields["block_ids"]),
        params=_unpack_params(fields["params"]),
        seed=fields["seed"],
        stop_ids=_unpack_ids("stop_ids", fields["stop_ids"]),
        bad_word_ids=[
            _unpack_ids("bad_word_ids", ids) for ids in _checked_list("bad_word_ids", fields["bad_word_ids"])
        ],
    )


def _unpack_params(data: object) -> SamplingParams:
    if not isinstance(data, bytes):
        raise PlanError(f"plan field params is {shown(data)}; it must be a packed map")
    return _params_of(data)


@functools.lru_cache(maxsize=64)
def _params_of(data: bytes) -> SamplingParams:
    """Requests that come together often have equal ones, and to check them is most of what a slot takes to decode."""
    return decode_params(_unpack("params", data))


def _check_slot_numbers(fields: dict[str, Any], *, num_given: int) -> None:
    _checked_int("slot", fields["slot"], 0, INT32_MAX)
    first = _checked_int("first_token", fields["first_token"], 0, INT32_MAX)
    _checked_int("num_prompt_tokens", fields["num_prompt_tokens"], 0, first + num_given)
    _checked_int("num_computed_tokens", fields["num_computed_tokens"], first, first + num_given)
    _checked_int("seed", fields["seed"], INT64_MIN, INT64_MAX)


def _prefix(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise PlanError(f"plan field prefix is {shown(value)}; it must be a slot and a number of blocks")
    return _checked_int("prefix", value[0], 0, INT32_MAX), _checked_int("prefix", value[1], 1, INT32_MAX)


def _checked_prefixes(added: list[SlotInit]) -> list[SlotInit]:
    """These, if all prefixes are those of tables that come before."""
    num_blocks: dict[int, int] = {}
    for entry in added:
        slot, num_shared = entry.prefix or (entry.slot, 0)
        if num_shared > num_blocks.get(slot, 0):
            raise PlanError(
                f"plan field prefix is {num_shared} blocks of slot {slot}; {num_blocks.get(slot, 0)} of it come before"
            )
        num_blocks[entry.slot] = num_shared + len(entry.block_ids)
    return added


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise PlanError(f"plan field logit_bias is {shown(value)}; it must be a list of ids and biases")
    token_ids = _unpack_ids("logit_bias", value[0])
    if not isinstance(value[1], bytes) or len(value[1]) != 8 * len(token_ids):
        raise PlanError(f"plan field logit_bias has {len(token_ids)} ids and biases {shown(value[1])}")
    return dict(zip(token_ids, struct.unpack(f"<{len(token_ids)}d", value[1])))


def _pack(fields: dict[str, Any]) -> bytes:
    try:
        # Prompts may hold lone surrogates, and so may the stop strings and bad words of a request.
        return msgpack.packb(fields, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError) as error:
        raise PlanError(f"plan cannot be packed: {error}") from error


def _unpack(name: str, data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise PlanError(f"{name} of {len(data)} bytes is not msgpack: {error}") from error


def _pack_ids(name: str, values: Sequence[int], low: int = 0) -> bytes:
    try:
        data = struct.pack(f"<{len(values)}i", *values)
    except struct.error as error:
        raise PlanError(f"plan field {name} holds a value that is no 32-bit integer: {error}") from error
    _check_low(name, values, low)
    return data


def _unpack_ids(name: str, data: object, low: int = 0) -> list[int]:
    data = _checked_id_bytes(name, data)
    values = list(struct.unpack(f"<{len(data) // 4}i", data))
    _check_low(name, values, low)
    return values


def _pack_array(name: str, values: array[int]) -> bytes:
    ids = np.asarray(values, dtype="<i4")
    _check_low(name, [ids.min(initial=0)], 0)
    return ids.tobytes()


def _unpack_array(name: str, data: object) -> array[int]:
    ids = np.frombuffer(_checked_id_bytes(name, data), dtype="<i4")
    _check_low(name, [ids.min(initial=0)], 0)
    return array("i", ids.astype(np.int32).tobytes())


def _check_low(name: str, values: Iterable[int], low: int) -> None:
    least = min(values, default=low)
    if least < low:
        raise PlanError(f"plan field {name} holds {least}; it must be at least {low}")


def _expand_runs(runs: list[int], *, num_rows: int) -> list[int]:
    pairs = _pairs("num_tokens", runs)
    total = sum(count for _, count in pairs)
    if total != num_rows:
        raise PlanError(f"plan field num_tokens has {total} rows; field slots has {num_rows}")
    return [value for value, count in pairs for _ in range(count)]


def _pairs(name: str, values: list[int]) -> list[tuple[int, int]]:
    if len(values) % 2:
        raise PlanError(f"plan field {name} has {len(values)} entries; it must have pairs")
    return list(zip(values[::2], values[1::2]))


def _checked_int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise PlanError(f"plan field {name} is {shown(value)}; it must be an integer from {low} to {high}")
    return value


def _checked_id_bytes(name: str, value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) % 4:
        raise PlanError(f"plan field {name} is {shown(value)}; it must be a string of 4-byte integers")
    return value


def _checked_list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"plan field {name} is {shown(value)}; it must be a list")
    return value


def _check_fields(name: str, fields: object, expected: frozenset[str]) -> None:
    if not isinstance(fields, dict):
        raise PlanError(f"{name} is {shown(fields)}; it must be a map")
    if fields.keys() != expected:
        missing, unknown = sorted(expected - fields.keys()), sorted(map(shown, fields.keys() - expected))
        raise PlanError(f"{name} lacks fields {missing} and has unknown fields {unknown}")
