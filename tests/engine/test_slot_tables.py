"""A rank's tables follow the plans: after each step they hold the tokens and blocks of every running request."""

from __future__ import annotations

import random

import torch

from qwen_engine.engine.slot_tables import SlotTables
from qwen_engine.request import Request, SamplingParams
from qwen_engine.scheduling.block_manager import BlockManager
from qwen_engine.scheduling.plan_codec import decode_plan, encode_plan
from qwen_engine.scheduling.scheduler import Scheduler

NUM_SLOTS, MAX_LEN, SIZE = 6, 64, 4


def test_tables_of_requests_that_share_prefixes_are_those_of_the_scheduler():
    """Requests come in groups with a common beginning, end early, or are preempted in a pool that is too small."""
    rng = random.Random(0)
    scheduler = Scheduler(
        BlockManager(num_blocks=20, block_size=SIZE),
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=64,
        max_model_len=MAX_LEN,
        vocab_size=100,
    )
    options = {"max_num_seqs": NUM_SLOTS, "max_model_len": MAX_LEN, "block_size": SIZE, "vocab_size": 100}
    tables = SlotTables(**options, device=torch.device("cpu"))
    contexts = [[1] * 30, [1] * 20 + [2] * 10, [3] * 25]
    num_sharing = num_steps = 0
    while num_steps < 400:
        for _ in range(rng.choice([0, 0, 0, 4])):
            prompt = [*rng.choice(contexts)[: rng.randint(0, 30)], *rng.choices(range(100), k=rng.randint(1, 9))]
            params = SamplingParams(max_tokens=rng.randint(1, 20))
            scheduler.add(Request(str(scheduler._num_arrivals), prompt, params))
        if scheduler.running and rng.random() < 0.1:
            scheduler.finish(rng.choice(scheduler.running).request_id, "abort")
        plan = scheduler.schedule()
        if plan is None:
            continue
        arrived = decode_plan(encode_plan(plan))
        tables.apply(arrived)
        for request in scheduler.running:
            slot, num_known = request.slot, len(request.token_ids)
            blocks = tables.block_tables[slot, : len(request.block_ids)]
            assert blocks.tolist() == list(request.block_ids)
            first = next((entry.first_token for entry in arrived.added if entry.slot == slot), num_known)
            assert tables.token_table[slot, first:num_known].tolist() == list(request.token_ids[first:])
        scheduler.apply(plan.step, [rng.randrange(100) for _ in scheduler.sampling_requests])
        num_sharing += sum(entry.prefix is not None for entry in plan.added)
        num_steps += 1
    assert num_sharing > 20
    assert scheduler.num_preemptions > 10
