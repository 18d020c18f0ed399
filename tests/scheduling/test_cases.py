"""Faults that other engines have had, each as a test of the scheduler on a fake device."""

from __future__ import annotations

import copy

import pytest
from fake_device import VOCAB_SIZE, Driver

from qwen_engine.errors import RequestError

depths = pytest.mark.parametrize("depth", [1, 2])


def prompt_of(length, start=0):
    return [(start + index * index) % VOCAB_SIZE for index in range(length)]


def row_of(plan, request):
    """Tokens of the request in this step; 0 if it has no row."""
    return dict(zip(plan.slots, plan.num_tokens)).get(request.slot, 0)


def run_watching_index(driver):
    while driver.scheduler.has_work or driver.launched:
        driver.step()
        driver.check_index()
    driver.check_idle()


def preempt_with_outputs(num_outputs, *, prompt_length, depth=1, **options):
    """A request that an older one has just preempted, after `num_outputs` tokens; blocks of 4.

    The older prompt is as long as it takes to enter a new block in that step, and the pool as large as what both hold.
    """
    older_length = 4 + (1 - num_outputs) % 4
    num_blocks = (older_length + num_outputs - 1) // 4 + -(-(prompt_length + num_outputs - 1) // 4)
    driver = Driver(num_blocks=num_blocks, block_size=4, depth=depth, **options)
    driver.add("older", prompt_of(older_length), max_tokens=num_outputs + 3)
    request = driver.add("younger", prompt_of(prompt_length, start=5), max_tokens=num_outputs + 6)
    while not request.num_preemptions:
        driver.step()
    assert driver.scheduler.num_preemptions == 1
    return driver, request


def resume(driver, request):
    """Steps until the preempted request is added again; returns that step's plan and its entry."""
    while True:
        plan = driver.launch()
        if plan is not None:
            for entry in plan.added:
                if entry.slot == request.slot:
                    return plan, entry
        driver.settle()


def test_sch_01_a_request_larger_than_the_pool_is_refused_and_blocks_nobody():
    driver = Driver(num_blocks=8, block_size=16, max_model_len=1024)
    with pytest.raises(RequestError, match=r"203 tokens; the whole pool holds 128"):
        driver.add("large", prompt_of(200))
    for index in range(3):
        driver.add(f"small-{index}", prompt_of(5, index))
    driver.run()
    driver.check_outputs()
    assert len(driver.requests) == 3


def test_sch_04_refused_requests_leave_nothing_behind():
    driver = Driver(num_blocks=16, block_size=4, max_model_len=32, max_num_waiting=30)
    invalid = [
        ("too long", prompt_of(33), {}),
        ("empty", [], {}),
        ("bad id", [VOCAB_SIZE], {}),
        ("bad salt", [1], {"salt": ""}),
        ("bad priority", [1], {"priority": "high"}),
        ("bad min_tokens", [1], {"min_tokens": 9}),
    ]
    free_slots = list(driver.scheduler._free_slots)
    num_refused = 0
    for index in range(200):
        if index % 10 == 0:
            driver.add(f"valid-{index}", prompt_of(7, index))
        name, prompt, options = invalid[index % len(invalid)]
        for sample in range(4):
            with pytest.raises(RequestError):
                driver.add(f"{name}-{index}-{sample}", prompt, **options)
            num_refused += 1
        driver.step()
    driver.run()
    driver.check_outputs()
    assert (num_refused, len(driver.requests)) == (800, 20)
    assert sorted(driver.scheduler._free_slots) == sorted(free_slots)
    driver.add("after", prompt_of(7))
    driver.run()
    driver.check_outputs()


@depths
def test_sch_06_arrivals_and_aborts_in_steps_that_preempt(depth):
    driver = Driver(num_blocks=8, block_size=4, depth=depth, max_num_seqs=10)
    for index in range(10):
        driver.add(f"long-{index}", prompt_of(4, index), max_tokens=29)
    num_arrivals, num_aborts = 0, 0
    while driver.scheduler.has_work:
        before = driver.scheduler.num_preemptions
        if num_arrivals < 10:
            driver.add(f"new-{num_arrivals}", prompt_of(3, num_arrivals), max_tokens=2)
            num_arrivals += 1
        plan = driver.launch()
        if driver.scheduler.num_preemptions > before and num_aborts < 3:
            driver.abort(driver.scheduler.running[-1].request_id)
            num_aborts += 1
        if plan is None or len(driver.launched) >= depth:
            driver.settle()
    driver.run()
    driver.check_outputs()
    assert num_aborts == 3
    assert sum(request.finish_reason == "abort" for request in driver.requests) == 3


def test_sch_06_a_step_that_only_preempts_is_no_step():
    """The older request waits for its last token, the younger one runs out of blocks: nothing is left to compute."""
    driver = Driver(num_blocks=4, block_size=4)
    older = driver.add("older", prompt_of(7), max_tokens=2)
    younger = driver.add("younger", prompt_of(3), max_tokens=14)
    for _ in range(6):
        assert driver.launch() is not None
    assert driver.launch() is None
    assert (older.num_preemptions, younger.num_preemptions) == (0, 1)
    before = copy.copy(vars(driver.scheduler))
    assert driver.launch() is None
    assert vars(driver.scheduler) == before
    driver.run()
    driver.check_outputs()


def test_sch_08_a_prompt_above_the_budget_is_computed_in_chunks():
    driver = Driver(num_blocks=32, block_size=16, max_num_batched_tokens=32, max_model_len=256)
    request = driver.add("long", prompt_of(100))
    rows = []
    while not request.num_output_tokens:
        rows += driver.step().num_tokens
    assert rows == [32, 32, 32, 4]
    driver.run()
    driver.check_outputs()


def test_sch_08_a_long_prompt_does_not_stall_running_requests():
    driver = Driver(num_blocks=64, block_size=16, max_num_batched_tokens=32, max_model_len=256)
    running = driver.add("running", prompt_of(5), max_tokens=20)
    driver.step()
    driver.add("long", prompt_of(200))
    for num_outputs in range(2, 9):
        assert driver.step().num_tokens == [1, 31 if num_outputs < 8 else 14]
        assert running.num_output_tokens == num_outputs
    driver.run()
    driver.check_outputs()


@depths
def test_sch_10_an_id_is_unique_while_it_lives_and_free_afterwards(depth):
    driver = Driver(num_blocks=16, depth=depth)
    first = driver.add("X", prompt_of(5), max_tokens=20)
    for _ in range(5):
        driver.step()
    with pytest.raises(RequestError, match="'X' is in use"):
        driver.add("X", prompt_of(9))
    while first.finish_reason is None:
        driver.step()
    driver.add("X", prompt_of(9), max_tokens=20)
    driver.run()
    driver.check_outputs()
    assert [request.finish_reason for request in driver.requests] == ["length", "length"]


@depths
def test_sch_10_the_result_of_an_aborted_request_does_not_reach_its_namesake(depth):
    driver = Driver(num_blocks=16, depth=depth)
    driver.add("X", prompt_of(5), max_tokens=20)
    driver.step()
    for _ in range(depth):
        driver.launch()
    driver.abort("X")
    driver.add("X", prompt_of(6, 3), max_tokens=20)
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize(("length", "num_hit"), [(32, 16), (16, 0), (33, 32), (17, 16), (15, 0), (1, 0)])
def test_pfx_01_a_fully_cached_prompt_still_computes_its_last_token(length, num_hit):
    driver = Driver(num_blocks=16, block_size=16, max_num_batched_tokens=64)
    first = driver.add("cold", prompt_of(length))
    driver.run()
    second = driver.add("warm", prompt_of(length))
    plan = driver.step()
    assert row_of(plan, second) == length - num_hit
    driver.run()
    driver.check_outputs()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_hit)
    assert driver.outputs[id(first)] == driver.outputs[id(second)]


def test_pfx_01_full_hits_and_misses_mix_in_a_batch():
    driver = Driver(num_blocks=32, block_size=16, max_num_batched_tokens=128)
    driver.add("cold", prompt_of(32))
    driver.run()
    hits = [driver.add(f"hit-{index}", prompt_of(32)) for index in range(2)]
    misses = [driver.add(f"miss-{index}", prompt_of(32, 3 + index)) for index in range(2)]
    plan = driver.step()
    assert [row_of(plan, request) for request in hits + misses] == [16, 16, 32, 32]
    driver.run()
    driver.check_outputs()


def test_pfx_02_recycled_blocks_are_not_hit():
    driver = Driver(num_blocks=6, block_size=16, max_num_batched_tokens=128)
    cold = driver.add("A", prompt_of(33))
    run_watching_index(driver)
    for name, start in (("B", 2), ("C", 4)):
        driver.add(name, prompt_of(90, start))
        run_watching_index(driver)
    again = driver.add("A", prompt_of(33))
    run_watching_index(driver)
    driver.check_outputs()
    assert again.num_cached_tokens == 0
    assert driver.outputs[id(again)] == driver.outputs[id(cold)]


@depths
@pytest.mark.parametrize("budget", [8, 20, 24, 1000])
def test_pfx_04_only_blocks_of_applied_steps_are_hit(depth, budget):
    """Unwritten KV is None on the fake device, so an early hit fails there."""
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=budget, depth=depth)
    requests = [driver.add(str(index), [*prompt_of(12), index]) for index in range(8)]
    driver.launch()
    driver.check_index()
    assert not driver.block_manager._block_of, "published before the step is applied"
    driver.settle()
    assert driver.block_manager._block_of
    run_watching_index(driver)
    driver.check_outputs()
    if budget == 1000:
        assert not any(request.num_cached_tokens for request in requests)  # all in one step: nothing to hit yet
    else:
        assert requests[-1].num_cached_tokens == 12


def test_pfx_06_a_hit_is_looked_up_at_admission_not_remembered():
    driver = Driver(num_blocks=6, block_size=4, max_num_batched_tokens=32)
    driver.add("seed", prompt_of(12), max_tokens=1)
    driver.run()
    driver.add("other", prompt_of(9, start=3), max_tokens=16)
    driver.step()
    hit = driver.add("hit", [*prompt_of(12), 1])
    driver.step()
    assert len(driver.block_manager.match(hit.block_keys)) == 3
    assert not hit.block_ids
    run_watching_index(driver)
    driver.check_outputs()
    assert hit.num_cached_tokens == 0


def test_pfx_08_salts_keep_prefixes_apart():
    driver = Driver(num_blocks=32, block_size=16, max_num_batched_tokens=64)
    cached = []
    for index, salt in enumerate(["A", "B", "A", None, None]):
        request = driver.add(str(index), prompt_of(64), salt=salt)
        driver.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 48, 0, 48]
    driver.check_outputs()


def test_pfx_10_a_shared_block_is_counted_once():
    driver = Driver(num_blocks=12, block_size=4, max_num_batched_tokens=32)
    driver.add("seed", prompt_of(16), max_tokens=1)
    driver.run()
    sharing = [driver.add(name, [*prompt_of(16), token]) for name, token in (("A", 1), ("B", 2))]
    driver.step()
    assert [len(request.block_ids) for request in sharing] == [5, 5]
    assert driver.block_manager.num_free_blocks == 12 - 4 - 2
    run_watching_index(driver)
    assert driver.block_manager.num_free_blocks == 12
    driver.add("evicts a part", prompt_of(35, start=7), max_tokens=1)
    driver.step()
    run_watching_index(driver)
    assert driver.block_manager.num_free_blocks == 12
    driver.check_outputs()


@depths
def test_pfx_11_the_blocks_of_computed_positions_never_change(depth):
    driver = Driver(num_blocks=16, block_size=4, depth=depth)
    holder = driver.add("holder", prompt_of(16), max_tokens=30)
    driver.step()
    driver.step()
    warm = driver.add("warm", prompt_of(16), max_tokens=10)
    seen = []
    while warm.finish_reason is None:
        driver.step()
        if warm.block_ids:
            assert list(warm.block_ids[: len(seen)]) == seen
            seen = list(warm.block_ids)
    assert warm.num_cached_tokens == 12
    assert seen[:3] == list(holder.block_ids[:3])
    assert not set(seen[3:]) & set(holder.block_ids)
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize(("chunk", "num_hit"), [(8, 8), (6, 4)])
@pytest.mark.parametrize("applied", [True, False])
def test_pfx_12_an_aborted_chunk_leaves_only_computed_blocks(chunk, num_hit, applied):
    driver = Driver(num_blocks=16, block_size=4, max_num_batched_tokens=chunk)
    driver.add("first", prompt_of(20))
    driver.launch()
    if applied:
        driver.settle()
    driver.abort("first")
    again = driver.add("again", prompt_of(20))
    run_watching_index(driver)
    driver.check_outputs()
    assert again.num_cached_tokens == (num_hit if applied else 0)


@depths
def test_pre_01_a_resumed_request_is_sent_with_every_token_that_has_no_kv(depth):
    driver, request = preempt_with_outputs(5, prompt_length=6, depth=depth)
    plan, entry = resume(driver, request)
    assert request.num_output_tokens == 5
    assert entry.first_token == entry.num_computed_tokens == 8
    assert entry.token_ids == request.token_ids[8:]
    assert (entry.num_prompt_tokens, entry.first_token + len(entry.token_ids)) == (6, 11)
    assert entry.num_computed_tokens + row_of(plan, request) == 11
    driver.run()
    driver.check_outputs()


@depths
@pytest.mark.parametrize("budget", [2, 16])
def test_pre_02_a_resumed_request_computes_from_its_hit_to_its_end(depth, budget):
    driver, request = preempt_with_outputs(5, prompt_length=6, depth=depth)
    driver.scheduler.max_num_batched_tokens = budget
    plan, entry = resume(driver, request)
    assert entry.num_computed_tokens == 8  # its own two full blocks are still there
    assert row_of(plan, request) == min(3, budget)
    assert request.num_cached_tokens == 0, "tokens it cached itself are no saving for its user"
    driver.run()
    driver.check_outputs()


@depths
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_pre_03_preempted_requests_return_everything(depth, enable_prefix_caching):
    results = []
    for num_blocks in (3 * 17, 1000):
        driver = Driver(
            num_blocks=num_blocks,
            max_num_seqs=6,
            max_num_batched_tokens=24,
            depth=depth,
            enable_prefix_caching=enable_prefix_caching,
        )
        for index in range(6):
            driver.add(str(index), prompt_of(8, index), max_tokens=60, eos_token_ids=[10] if index == 5 else [])
        driver.run()
        driver.check_outputs()
        driver.check_preemptions()
        assert (driver.scheduler.num_preemptions > 0) == (num_blocks < 1000)
        results.append([(driver.outputs[id(request)], request.finish_reason) for request in driver.requests])
    assert results[0] == results[1]


@depths
def test_pre_06_a_resumed_request_samples_only_after_all_its_tokens(depth):
    driver, request = preempt_with_outputs(40, prompt_length=3, depth=depth, enable_prefix_caching=False)
    driver.scheduler.max_num_batched_tokens = 8
    plan, entry = resume(driver, request)
    assert (len(entry.token_ids), entry.num_computed_tokens) == (43, 0)
    computed = row_of(plan, request)
    while computed < 43:
        assert request.num_tokens == 43, "it sampled before its KV was complete"
        plan = driver.launch()
        computed += row_of(plan, request)
        driver.settle()
    assert computed == 43
    driver.run()
    driver.check_outputs()


@depths
def test_pre_07_a_resumed_request_gets_all_its_blocks_and_a_reserve(depth):
    driver = Driver(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=12, depth=depth)
    for index, max_tokens in enumerate((28, 28, 12)):
        driver.add(f"decoder-{index}", prompt_of(4, index), max_tokens=max_tokens)
    victim = driver.add("victim", prompt_of(21, 7), max_tokens=8)
    num_resumed = 0
    while driver.scheduler.has_work or driver.launched:
        before = list(driver.scheduler.running)
        plan = driver.launch()
        if plan is not None and victim.slot in [entry.slot for entry in plan.added]:
            num_resumed += victim.num_preemptions > 0
            assert len(victim.block_ids) * 4 >= len(victim.token_ids)
            assert driver.block_manager.num_free_blocks >= len(before)
        if plan is None or len(driver.launched) >= depth:
            driver.settle()
    driver.check_idle()
    driver.check_outputs()
    assert num_resumed == victim.num_preemptions == driver.scheduler.num_preemptions == 1
    num_tokens = sum(len(request.token_ids) - 1 for request in driver.requests)
    assert driver.device.num_computed_tokens <= num_tokens + len(victim.token_ids)
    assert driver.num_steps <= 28 + 8 + depth


@pytest.mark.parametrize("prompt_length", [9, 10, 12])
def test_mem_04_a_pool_for_k_full_sequences_runs_k_without_preemption(prompt_length):
    num_seqs, max_len, size = 4, 32, 4
    driver = Driver(
        num_blocks=num_seqs * max_len // size, block_size=size, max_num_seqs=num_seqs, max_model_len=max_len
    )
    driver.add("seed", prompt_of(8))
    driver.run()
    requests = [
        driver.add(str(index), [*prompt_of(8), *[index] * (prompt_length - 8)], max_tokens=None)
        for index in range(num_seqs)
    ]
    driver.step()
    driver.step()
    assert len(driver.scheduler.running) == num_seqs
    driver.run()
    driver.check_outputs()
    assert driver.scheduler.num_preemptions == 0
    assert [(r.num_cached_tokens, len(r.token_ids)) for r in requests] == [(8, max_len)] * num_seqs
