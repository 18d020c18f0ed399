"""Plans as bytes: what goes in comes out, small and quickly, and nothing but a plan is taken for one."""

from __future__ import annotations

import dataclasses
import pickle
import struct
from array import array

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_engine.request import INT64_MAX, INT64_MIN, Request, SamplingParams
from qwen_engine.scheduling.block_manager import BlockManager, block_table
from qwen_engine.scheduling.plan_codec import (
    INT32_MAX,
    PlanError,
    decode_plan,
    encode_plan,
)
from qwen_engine.scheduling.scheduler import Scheduler
from qwen_engine.scheduling.step_plan import SlotInit, StepPlan

IDS = st.integers(0, INT32_MAX)
TEXT = st.text(st.characters(codec=None), min_size=1, max_size=12)  # lone surrogates too
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0.02, 2.0),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.integers(-1, INT64_MAX),
    min_p=st.floats(0.0, 1.0),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.one_of(st.floats(-2.0, 2.0), st.integers(-2, 2)),
    repetition_penalty=st.floats(0.1, 10.0),
    seed=st.none() | st.integers(INT64_MIN, INT64_MAX),
    logit_bias=st.none() | st.dictionaries(IDS, st.floats(-100, 100), max_size=5),
    allowed_token_ids=st.none() | st.lists(IDS, min_size=1, max_size=5),
    bad_words=st.lists(TEXT, max_size=3),
    stop=st.none() | TEXT | st.lists(TEXT, max_size=3),
    stop_token_ids=st.none() | st.lists(IDS, max_size=5),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | st.integers(1, INT64_MAX),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
) | st.just(SamplingParams(temperature=0.0, min_tokens=3))


@st.composite
def slot_inits(draw: st.DrawFn) -> SlotInit:
    token_ids = array("i", draw(st.lists(IDS, max_size=40)))
    first = draw(st.integers(0, 2**20))
    return SlotInit(
        slot=draw(IDS),
        first_token=first,
        token_ids=token_ids,
        num_prompt_tokens=draw(st.integers(0, first + len(token_ids))),
        num_computed_tokens=draw(st.integers(first, first + len(token_ids))),
        prefix=None,
        block_ids=block_table(draw(st.lists(IDS, max_size=8))),
        params=draw(PARAMS),
        seed=draw(st.integers(INT64_MIN, INT64_MAX)),
        stop_ids=draw(st.lists(IDS, max_size=4)),
        bad_word_ids=draw(st.lists(st.lists(IDS, max_size=3), max_size=3)),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    added: list[SlotInit] = []
    for entry in draw(st.lists(slot_inits(), max_size=3)):
        prefix = draw(st.none() | st.sampled_from([(e.slot, len(e.block_ids)) for e in added if e.block_ids] or [None]))
        added.append(entry._replace(prefix=prefix) if entry.slot not in {e.slot for e in added} else entry)
    rows = draw(st.lists(st.tuples(IDS, st.integers(1, INT32_MAX)), max_size=40))
    return StepPlan(
        step=draw(st.integers(0, INT64_MAX)),
        slots=[slot for slot, _ in rows],
        num_tokens=[count for _, count in rows],
        added=added,
        new_blocks=draw(st.lists(st.tuples(IDS, IDS), max_size=10)),
        freed_slots=draw(st.lists(IDS, max_size=10)),
    )


def steady_plan() -> StepPlan:
    """256 decoding rows in mixed-up slots; every 16th gets a block."""
    slots = [(index * 37) % 256 for index in range(256)]
    return StepPlan(
        step=123_456,
        slots=slots,
        num_tokens=[1] * 256,
        new_blocks=[(slot, 100_000 + slot) for slot in slots[::16]],
        freed_slots=[7],
    )


def small_plan(**params: object) -> StepPlan:
    entry = SlotInit(
        slot=1,
        first_token=0,
        token_ids=array("i", [5, 6, 7]),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        prefix=None,
        block_ids=block_table([4]),
        params=SamplingParams(**params),
        seed=9,
        stop_ids=[2],
        bad_word_ids=[[8, 9]],
    )
    return StepPlan(step=0, slots=[1, 3], num_tokens=[3, 1], added=[entry], new_blocks=[(3, 2)], freed_slots=[0])


def changed(change) -> bytes:
    """A small plan's bytes after `change` has altered its fields."""
    fields = msgpack.unpackb(encode_plan(small_plan(top_k=5)))
    change(fields)
    return msgpack.packb(fields)


def with_params(**params: object):
    """What gives the added slot of a plan's fields these parameters."""
    return lambda fields: fields["added"][0].update(params=msgpack.packb(params))


@given(plans())
def test_any_plan_comes_back_equal(plan: StepPlan) -> None:
    decoded = decode_plan(encode_plan(plan))
    assert decoded == plan
    for before, after in zip(plan.added, decoded.added):
        assert dataclasses.asdict(before.params) == dataclasses.asdict(after.params)


def test_a_plan_of_256_decoding_rows_is_under_two_kilobytes() -> None:
    data = encode_plan(steady_plan())
    assert len(data) < 1400
    assert decode_plan(data) == steady_plan()


def test_default_sampling_parameters_cost_one_byte() -> None:
    assert len(encode_plan(small_plan(top_k=5))) - len(encode_plan(small_plan())) == len(msgpack.packb("top_k")) + 1


@pytest.mark.parametrize("fields", [{"json": {"type": "object"}}, {"json_object": True}, {"choice": ["a", "é"]}])
def test_constraints_come_back_equal(fields) -> None:
    plan = small_plan(structured_outputs=fields)
    assert decode_plan(encode_plan(plan)) == plan


def test_plans_of_a_real_scheduler_come_back_equal() -> None:
    scheduler = Scheduler(
        BlockManager(num_blocks=8, block_size=4),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=32,
        vocab_size=100,
    )
    for index in range(4):
        params = SamplingParams(max_tokens=6, seed=-(2**40), logit_bias={3: 1.5}, stop_token_ids=[9])
        scheduler.add(Request(f"r{index}", [index, 2, 3, 4, 5, 6], params, seed=index, bad_word_ids=[[8, 9]]))
    num_plans = 0
    while (plan := scheduler.schedule()) is not None:
        assert decode_plan(encode_plan(plan)) == plan
        scheduler.apply(plan.step, [1] * len(plan.slots))
        num_plans += 1
    assert num_plans > 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.pop("step"), r"lacks fields \['step'\]"),
        (lambda f: f.update(extra=1), "unknown fields .*extra"),
        (lambda f: f.update(step=-1), "step is -1"),
        (lambda f: f.update(step=True), "step is True"),
        (lambda f: f.update(step="0"), "step is '0'"),
        (lambda f: f.update(slots=[1, 3]), "slots is"),
        (lambda f: f.update(slots=b"\x01\x00\x00"), "slots is"),
        (lambda f: f.update(slots=struct.pack("<2i", 1, -3)), "slots holds -3"),
        (lambda f: f.update(slots=struct.pack("<i", 1)), "num_tokens has 2 rows; field slots has 1"),
        (lambda f: f.update(num_tokens=struct.pack("<2i", 0, 2)), "num_tokens holds 0"),
        (lambda f: f.update(num_tokens=struct.pack("<2i", 1, INT32_MAX)), "has 2147483647 rows"),
        (lambda f: f.update(num_tokens=struct.pack("<3i", 3, 1, 1)), "3 entries; it must have pairs"),
        (lambda f: f.update(new_blocks=struct.pack("<i", 3)), "new_blocks has 1 entries"),
        (lambda f: f.update(new_blocks=struct.pack("<2i", 3, -2)), "new_blocks holds -2"),
        (lambda f: f.update(freed_slots=None), "freed_slots is None"),
        (lambda f: f.update(added={}), "added is {}"),
        (lambda f: f["added"].append(7), "added slot is 7"),
        (lambda f: f["added"][0].pop("seed"), r"lacks fields \['seed'\]"),
        (lambda f: f["added"][0].update(colour="red"), "unknown fields .*colour"),
        (lambda f: f["added"][0].update(slot=-1), "slot is -1"),
        (lambda f: f["added"][0].update(seed=2**63), "seed is 9223372036854775808"),
        (lambda f: f["added"][0].update(num_prompt_tokens=4), "num_prompt_tokens is 4; .* 0 to 3"),
        (lambda f: f["added"][0].update(num_computed_tokens=4), "num_computed_tokens is 4"),
        (lambda f: f["added"][0].update(token_ids="abcd"), "token_ids is 'abcd'"),
        (lambda f: f["added"][0].update(prefix=3), "prefix is 3; it must be a slot and a number of blocks"),
        (lambda f: f["added"][0].update(prefix=[0, 0]), "prefix is 0"),
        (lambda f: f["added"][0].update(prefix=[1, 1]), "prefix is 1 blocks of slot 1; 0 of it come before"),
        (lambda f: f["added"].append({**f["added"][0], "prefix": [1, 2]}), "2 blocks of slot 1; 1 of it come before"),
        (lambda f: f["added"][0].update(bad_word_ids=b""), "bad_word_ids is b''"),
        (lambda f: f["added"][0].update(bad_word_ids=[[1]]), r"bad_word_ids is \[1\]"),
        (lambda f: f["added"][0].update(params={}), "params is {}; it must be a packed map"),
        (lambda f: f["added"][0].update(params=b""), "params of 0 bytes is not msgpack"),
        (lambda f: f["added"][0].update(params=msgpack.packb([])), r"params are \[\]"),
        (with_params(beam=2), "must be a map of sampling parameters"),
        (with_params(temperature=3.0), "out of range: temperature is 3.0"),
        (with_params(stop_token_ids=[1]), r"stop_token_ids is \[1\]"),
        (with_params(logit_bias={"1": 1.0}), "logit_bias is"),
        (with_params(logit_bias=[b"\x01\0\0\0", b""]), "logit_bias has 1 ids"),
    ],
)
def test_altered_fields_are_refused_by_name(change, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        decode_plan(changed(change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pickle.dumps({"step": 0}),
        msgpack.packb([1, 2]),
        msgpack.packb(None),
        msgpack.packb({1: 2}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        encode_plan(small_plan())[:-1],
        encode_plan(small_plan()) + b"\x00",
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_sec_01_bytes_that_are_no_plan_are_refused(data: bytes) -> None:
    with pytest.raises(PlanError):
        decode_plan(data)


@given(st.binary(max_size=200))
def test_sec_01_random_bytes_raise_nothing_but_plan_error(data: bytes) -> None:
    with pytest.raises(PlanError):
        decode_plan(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": [1]}, "1 slots and 2 entries"),
        ({"slots": [1, 2**31]}, "slots holds a value"),
        ({"slots": [1, -1]}, "slots holds -1"),
        ({"slots": [1, 1.5]}, "slots holds a value"),
        ({"num_tokens": [1, 0]}, "num_tokens holds 0"),
        ({"step": -1}, "step is -1"),
        ({"new_blocks": [(0, -5)]}, "new_blocks holds -5"),
        ({"freed_slots": [2**40]}, "freed_slots holds a value"),
    ],
)
def test_what_the_other_side_could_not_read_is_not_encoded(fields: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        encode_plan(dataclasses.replace(small_plan(), **fields))


def test_numbers_of_an_added_slot_are_checked_before_they_travel() -> None:
    plan = small_plan()
    for fields in (
        {"seed": 2**63},
        {"slot": -1},
        {"num_computed_tokens": 4},
        {"token_ids": array("i", [-1, 0, 0])},
        {"prefix": (0, 1)},
        {"block_ids": block_table([3, -1])},
    ):
        with pytest.raises(PlanError, match=next(iter(fields))):
            encode_plan(dataclasses.replace(plan, added=[plan.added[0]._replace(**fields)]))
