"""`Scheduler.check` can fail: every invariant it verifies, broken by hand."""

from __future__ import annotations

import pytest
from fake_device import Driver, block_keys

from qwen_engine.request import RequestStatus


@pytest.fixture
def scheduler():
    """Two requests running with a shared prefix, two waiting, free slots none; a result is still on its way."""
    driver = Driver(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=32)
    driver.add("seed", [1] * 8, max_tokens=1)
    driver.run()
    for index in range(4):
        driver.add(str(index), [*[1] * 8, index], max_tokens=9)
    driver.step()
    driver.launch()
    driver.scheduler.check()
    return driver.scheduler


def _wrong_text(scheduler):
    scheduler.running[0].token_ids[0] = 2


def _wrong_salt(scheduler):
    scheduler.running[0].cache_salt = "other"


def _published_too_early(scheduler):
    request = scheduler.running[0]
    keys = block_keys([*request.token_ids, 0, 0, 0], 4, None)
    scheduler.block_manager.publish(request.block_ids[2], keys[2])


FAULTS = {
    "a block that was never given": lambda s: s.running[0].block_ids.append(0),
    "a block forgotten": lambda s: s.running[0].block_ids.pop(),
    "wrong text in the index": _wrong_text,
    "wrong salt in the index": _wrong_salt,
    "published before computed": _published_too_early,
    "a table more than have the prefix": lambda s: setattr(s.running[0].prefix, "num_tables", 3),
    "a prefix of another text": lambda s: s.running[0].prefix.keys.reverse(),
    "a prefix that its table does not begin with": lambda s: s.running[0].prefix.block_ids.reverse(),
    "running order": lambda s: s.running.reverse(),
    "waiting order": lambda s: s.waiting.reverse(),
    "a request forgotten": lambda s: s.requests.popitem(),
    "a request in no list": lambda s: s.waiting.pop(),
    "a slot twice": lambda s: setattr(s.running[0], "slot", s.running[1].slot),
    "a slot used and free": lambda s: s._free_slots.append(s.running[0].slot),
    "a slot lost": lambda s: setattr(s, "max_num_seqs", 3),
    "running but not so called": lambda s: setattr(s.running[0], "status", RequestStatus.FINISHED),
    "waiting but not so called": lambda s: setattr(s.waiting[0], "status", RequestStatus.RUNNING),
    "all tokens cached": lambda s: setattr(s.running[0], "num_cached_tokens", s.running[0].num_tokens),
    "computed beyond known": lambda s: setattr(s.running[0], "num_computed_tokens", s.running[0].num_tokens + 1),
    "known beyond the limit": lambda s: setattr(s.running[0], "limit_tokens", s.running[0].num_tokens - 1),
    "values beyond known": lambda s: s.running[0].token_ids.extend([1, 1]),
    "published beyond computed": lambda s: setattr(s.running[0], "num_published_blocks", 3),
    "waiting with blocks": lambda s: setattr(s.waiting[0], "block_ids", [0]),
    "waiting with a slot": lambda s: setattr(s.waiting[0], "slot", 0),
    "waiting with computed tokens": lambda s: setattr(s.waiting[0], "num_computed_tokens", 1),
    "waiting with published blocks": lambda s: setattr(s.waiting[0], "num_published_blocks", 1),
}


@pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS.keys())
def test_check_finds_a_planted_fault(scheduler, plant):
    plant(scheduler)
    with pytest.raises(AssertionError):
        scheduler.check()


def test_check_finds_computed_tokens_without_blocks(scheduler):
    request = scheduler.running[0]
    scheduler.block_manager.release(request.block_ids[2:])
    del request.block_ids[2:]
    with pytest.raises(AssertionError):
        scheduler.check()
