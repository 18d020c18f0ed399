"""What the scheduler promises its caller: order, victims, deltas, ends and resets."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from fake_device import Driver

from qwen_engine.scheduling import block_manager as block_manager_module


def ids(requests):
    return [request.request_id for request in requests]


def test_fcfs_serves_in_order_of_arrival_whatever_the_priority():
    driver = Driver(num_blocks=16, max_num_seqs=2)
    for name, priority in (("a", 5), ("b", 0), ("c", -5), ("d", 9)):
        driver.add(name, [1, 2], priority=priority)
    driver.step()
    assert ids(driver.scheduler.running) == ["a", "b"]
    driver.run()
    driver.check_outputs()


def test_priority_serves_the_lowest_number_first_and_equals_by_arrival():
    driver = Driver(num_blocks=16, max_num_seqs=3, policy="priority")
    for name, priority in (("a", 5), ("b", 0), ("c", -5), ("d", 0), ("e", 9)):
        driver.add(name, [1, 2], priority=priority)
    driver.step()
    assert ids(driver.scheduler.running) == ["c", "b", "d"]
    driver.run()
    driver.check_outputs()


def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones():
    driver = Driver(num_blocks=8, block_size=4, max_num_batched_tokens=32)
    driver.add("running", [1] * 8, max_tokens=12)
    driver.step()
    large = driver.add("large", [2] * 24)
    for index in range(30):
        driver.add(f"small-{index}", [3])
    while not large.block_ids:
        assert ids(driver.scheduler.running) in ([], ["running"])
        driver.step()
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize(
    ("policy", "priorities", "victim"),
    [("fcfs", (0, 0, 0), "c"), ("priority", (0, 0, 0), "c"), ("priority", (1, 2, 0), "b")],
)
def test_the_victim_is_the_newest_of_the_least_important(policy, priorities, victim):
    driver = Driver(num_blocks=9, block_size=4, policy=policy)
    requests = [driver.add(name, [1, 2, 3], priority=p, max_tokens=20) for name, p in zip("abc", priorities)]
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert [request.request_id for request in requests if request.num_preemptions] == [victim]
    driver.run()
    driver.check_outputs()


def test_a_steady_decode_step_carries_no_deltas():
    driver = Driver(num_blocks=16, block_size=4)
    driver.add("a", [1, 2], max_tokens=9)
    driver.step()
    plans = [driver.step() for _ in range(4)]
    assert [(plan.added, plan.new_blocks, plan.freed_slots) for plan in plans[:2]] == [([], [], [])] * 2
    assert [len(plan.new_blocks) for plan in plans] == [0, 0, 1, 0]


def test_freed_slots_are_told_once():
    driver = Driver(num_blocks=16, max_num_seqs=2)
    driver.add("a", [1], max_tokens=1)
    driver.add("b", [2], max_tokens=9)
    told = [driver.step().freed_slots for _ in range(4)]
    assert told == [[], [0], [], []]


def test_prompt_logprobs_compute_every_prompt_token():
    """Cached positions would have no logits."""
    driver = Driver(num_blocks=16, block_size=4, max_num_batched_tokens=32)
    driver.add("cold", [1] * 12)
    driver.run()
    request = driver.add("asks", [1] * 12, prompt_logprobs=0)
    plan = driver.step()
    assert plan.num_tokens == [12]
    assert request.num_cached_tokens == 0
    driver.run()
    driver.check_outputs()


def test_without_prefix_caching_nothing_is_shared():
    driver = Driver(num_blocks=16, enable_prefix_caching=False)
    for name in ("a", "b"):
        driver.add(name, [1] * 12)
        driver.run()
    assert [request.num_cached_tokens for request in driver.requests] == [0, 0]
    driver.check_outputs()


def test_finish_of_an_unknown_or_ended_request_is_ignored():
    driver = Driver(num_blocks=16)
    driver.add("a", [1])
    assert driver.scheduler.finish("b", "abort") is None
    assert driver.scheduler.finish("a", "stop", "text").stop_reason == "text"
    assert driver.scheduler.finish("a", "abort") is None
    assert driver.requests[0].finish_reason == "stop"
    driver.check_idle()


def test_applying_another_step_or_another_number_of_tokens_is_an_error():
    for step, token_ids in ((1, [3]), (0, []), (0, [3, 3])):
        driver = Driver(num_blocks=8)
        driver.add("a", [1])
        driver.launch()
        with pytest.raises(AssertionError, match="launched step 0"):
            driver.scheduler.apply(step, token_ids)


def test_a_constrained_request_is_not_decoded_ahead_while_others_are():
    driver = Driver(num_blocks=20, depth=3)
    constrained = driver.add("constrained", [1] * 6, max_tokens=5, constrained=True)
    free = driver.add("free", [2] * 6, max_tokens=5)
    while len(driver.launched) < 3:
        driver.launch()
    assert (constrained.num_tokens, free.num_tokens) == (7, 9)
    driver.settle()
    assert constrained.slot in driver.launch().slots
    driver.run()
    driver.check_outputs()
    alone = Driver(num_blocks=20, depth=3)
    alone.add("alone", [1] * 6, max_tokens=3, constrained=True)
    assert alone.launch() is not None
    assert alone.launch() is None
    alone.run()
    alone.check_outputs()


def prompt_tokens_per_step(driver, request):
    """Tokens of the request that each step computes, until it writes."""
    counts = []
    while request.num_computed_tokens < request.num_prompt_tokens:
        before = request.num_computed_tokens
        driver.step()
        counts.append(request.num_computed_tokens - before)
    return counts


def late_driver(**options):
    options = {"num_blocks": 200, "max_num_batched_tokens": 64, "max_late_chunk_tokens": 10, **options}
    return Driver(**options)


def test_a_prompt_that_comes_while_others_write_gets_small_chunks_until_they_end():
    driver = late_driver()
    driver.add("writer", [1, 2], max_tokens=4)
    driver.step()
    late = driver.add("late", [3] * 100)
    assert prompt_tokens_per_step(driver, late) == [10, 10, 10, 64, 6]
    driver.run()
    driver.check_outputs()


def test_prompts_that_were_there_before_anybody_wrote_are_not_late():
    driver = late_driver()
    requests = [driver.add(str(number), [number] * 50, max_tokens=20) for number in range(4)]
    prompt_tokens_per_step(driver, requests[-1])
    assert driver.num_steps == 4  # 200 tokens and a few that are written meanwhile, 64 a step
    driver.run()
    driver.check_outputs()


def test_each_late_prompt_has_its_own_chunk_so_that_a_long_one_holds_up_no_short_one():
    driver = late_driver()
    driver.add("writer", [1, 2], max_tokens=30)
    driver.step()
    long = driver.add("long", [3] * 100)
    driver.step()
    short = driver.add("short", [4] * 5)
    driver.step()
    assert (long.num_computed_tokens, short.num_computed_tokens) == (20, 5)
    driver.run()
    driver.check_outputs()


def test_chunks_of_a_late_prompt_shrink_with_its_context_and_always_move():
    driver = late_driver(context_cost=0.1)
    driver.add("writer", [1, 2], max_tokens=100)
    driver.step()
    late = driver.add("late", [3] * 150)
    counts = prompt_tokens_per_step(driver, late)
    assert counts[:4] == [10, 5, 4, 3]
    assert counts[-2] == 1
    assert min(counts) == 1
    driver.run()
    driver.check_outputs()


def test_without_the_limit_a_late_prompt_takes_what_the_budget_leaves():
    driver = late_driver(max_late_chunk_tokens=None)
    driver.add("writer", [1, 2], max_tokens=8)
    driver.step()
    late = driver.add("late", [3] * 100)
    assert prompt_tokens_per_step(driver, late) == [63, 37]


def test_a_preempted_request_is_late_only_behind_those_who_wrote_before_it_came():
    driver = Driver(num_blocks=9, block_size=4, max_num_batched_tokens=64, max_late_chunk_tokens=2)
    first, second = (driver.add(name, [1, 2, 3], max_tokens=20) for name in "ab")
    while not second.num_preemptions:
        driver.step()
    assert first.writing_since == second.writing_since == 2  # both had come
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.2}, {"presence_penalty": 1.0}, {"bad_word_ids": [[3, 4]]}], ids=str
)
def test_a_request_that_looks_back_is_sent_with_the_tokens_of_its_hit(options):
    driver = Driver(num_blocks=20, block_size=4)
    prompt = list(range(9))
    driver.add("first", prompt, max_tokens=1)
    driver.run()
    driver.add("plain", [*prompt, 1], max_tokens=1)
    driver.add("looks back", [*prompt, 2], max_tokens=1, **options)
    plain, looks_back = driver.launch().added
    assert plain.num_computed_tokens == looks_back.num_computed_tokens == 8
    assert (plain.first_token, list(plain.token_ids)) == (8, [prompt[8], 1])
    assert (looks_back.first_token, list(looks_back.token_ids)) == (0, [*prompt, 2])


def test_requests_admitted_together_reference_what_each_of_them_shares():
    """In one step: no match, matches that are the same, longer, shorter and of another prefix, and one too many."""
    driver = Driver(num_blocks=60, block_size=4, max_num_seqs=9, max_num_batched_tokens=256)
    short, long, other = [1] * 8, [1] * 16, [2] * 12
    for index, prompt in enumerate((long, other)):
        driver.add(f"seed {index}", [*prompt, 0], max_tokens=1)
    driver.run()
    prompts = ([3], [4], short, short, long, long, long, other, other, short)
    requests = [driver.add(str(index), [*prompt, 5, 6], max_tokens=3) for index, prompt in enumerate(prompts)]
    plan = driver.launch()
    assert [request.num_cached_tokens for request in requests[:-1]] == [0, 0, 8, 8, 16, 16, 16, 12, 12]
    first_short, first_other = (requests[2].slot, 2), (requests[7].slot, 3)
    assert [entry.prefix for entry in plan.added] == [None] * 3 + [first_short] * 4 + [None, first_other]
    assert driver.scheduler.waiting == requests[-1:]
    driver.run()
    driver.check_idle()
    driver.check_outputs()


def test_a_prefix_is_shared_as_far_as_most_of_it_is_the_same_and_freed_with_the_last_table():
    driver = Driver(num_blocks=60, block_size=4, max_num_seqs=5, max_num_batched_tokens=256)
    long, most, less = [1] * 20, [1] * 12, [1] * 4
    driver.add("seed", [*long, 0], max_tokens=1)
    driver.run()
    prompts = ([*long, 5], [*most, 6, 6, 6, 6], [*long, 7], long, [*less, 8])
    requests = [driver.add(str(index), prompt, max_tokens=9) for index, prompt in enumerate(prompts)]
    plan, slot = driver.launch(), requests[0].slot
    assert [request.num_cached_tokens for request in requests] == [20, 12, 20, 16, 4]
    assert [entry.prefix for entry in plan.added] == [None, (slot, 3), (slot, 3), (slot, 3), None]
    assert [len(entry.block_ids) for entry in plan.added] == [6, 1, 3, 2, 2]
    num_free = [driver.block_manager.num_free_blocks]
    for index in (0, 2, 1, 3, 4):
        driver.abort(str(index))
        num_free.append(driver.block_manager.num_free_blocks)
    assert num_free == [60 - 5 - 5, 51, 53, 54, 58, 60]
    driver.run()


def test_a_prefix_in_use_is_shared_in_later_steps_and_sent_once_in_each():
    driver = Driver(num_blocks=60, block_size=4, max_num_seqs=5, max_num_batched_tokens=256)
    driver.add("seed", [*[1] * 20, 0], max_tokens=1)
    driver.run()

    def added(*names):
        requests = [driver.add(name, [*[1] * 20, index], max_tokens=20) for index, name in enumerate(names)]
        return requests, [(entry.prefix, len(entry.block_ids)) for entry in driver.launch().added]

    (first,), entries = added("first")
    assert entries == [(None, 6)]
    (second, third), entries = added("second", "third")
    assert entries == [(None, 6), ((second.slot, 5), 1)]
    assert first.prefix is second.prefix is third.prefix
    driver.block_manager.reset_prefix_cache()
    (cold,), entries = added("after the reset")
    assert (cold.num_cached_tokens, cold.prefix, entries) == (0, None, [(None, 6)])
    driver.run()
    driver.check_outputs()


def test_admission_hashes_no_more_than_it_takes_to_find_what_is_cached(monkeypatch):
    hashed = []

    def count(data: bytes):
        hashed.append(data)
        return blake2b(data)

    monkeypatch.setattr(block_manager_module, "blake2b", count)
    driver = Driver(num_blocks=600, max_num_batched_tokens=2048)
    prompt = [1 + i % 7 for i in range(1200)]
    driver.add("cold", prompt)
    driver.launch()
    assert len(hashed) == 2  # of the salt and the block that missed; the others are hashed when they are published
    driver.run()
    del hashed[:]
    warm, longer = driver.add("warm", prompt), driver.add("longer", [*prompt, *prompt[:40]])
    driver.scheduler.schedule()
    assert (warm.num_cached_tokens, longer.num_cached_tokens) == (1196, 1200)
    assert len(hashed) == 2  # the block behind those that both share, and the one that follows it and misses
