"""Random traffic through scheduler, block manager and a fake device, with up to three steps launched ahead.

Whatever happens, every request returns what it returns alone; the driver asserts the rest after every step.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from fake_device import VOCAB_SIZE, Driver
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from qwen_engine.errors import RequestError
from qwen_engine.scheduling.block_manager import RecentPrompts

SALTS = [None, None, "a", "b"]
CONTEXTS = [[1] * 12, [1] * 12 + [2] * 9, [3, 4, 5] * 6]
"""Prompts begin with one of these, so that prefixes are shared, over whole blocks and parts of them."""


@pytest.fixture(autouse=True, scope="module")
def short_prompts_take_over_keys() -> Iterator[None]:
    """As long ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecentPrompts, "_LEAST_TOKENS", 1)
        yield


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 14) | st.just(60),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.sampled_from([0, 1, 3, 30]),
        policy=st.sampled_from(["fcfs", "priority"]),
        depth=st.integers(1, 3),
        max_num_waiting=st.sampled_from([None, None, 3]),
        max_late_chunk_tokens=st.sampled_from([None, 1, 4]),
        context_cost=st.sampled_from([0.0, 0.2]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, max_num_seqs, extra_budget, **options):
        self.driver = Driver(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + extra_budget, max_model_len=40, **options
        )
        self.num_requests = 0

    @rule(
        context=st.sampled_from(CONTEXTS),
        num_shared=st.integers(0, 21),
        rest=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        min_tokens=st.integers(0, 6),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        eos_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=1),
        salt=st.sampled_from(SALTS),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        constrained=st.booleans(),
        num_alike=st.sampled_from([1, 1, 3]),
    )
    def arrive(self, context, num_shared, rest, max_tokens, min_tokens, num_alike, **options):
        min_tokens = min(min_tokens, max_tokens or min_tokens)
        for shorter in range(num_alike):  # they end in other blocks, so that together they share what they can
            self.num_requests += 1
            before = len(self.driver.scheduler.requests)
            try:
                self.driver.add(
                    str(self.num_requests),
                    context[: max(0, num_shared - 2 * shorter)] + rest,
                    max_tokens=max_tokens,
                    min_tokens=min_tokens,
                    **options,
                )
            except RequestError:
                assert len(self.driver.scheduler.requests) == before
        self.driver.scheduler.check()

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.driver.step()

    @rule()
    def launch_only(self):
        if len(self.driver.launched) < 3:
            self.driver.launch()

    @precondition(lambda self: self.driver.launched)
    @rule()
    def settle_only(self):
        self.driver.settle()

    @precondition(lambda self: self.driver.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.scheduler.requests))))

    @rule()
    def reset_prefix_cache(self):
        self.driver.block_manager.reset_prefix_cache()
        self.driver.scheduler.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.run()
            self.driver.check_outputs()
            if self.driver.scheduler.policy == "fcfs":
                self.driver.check_preemptions()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=50)


def soak(driver: Driver, rng: random.Random, num_steps: int) -> None:
    """Arrivals a little faster than the pool can serve, with pauses in which it runs empty."""
    scheduler = driver.scheduler
    arriving, end = True, driver.num_steps + num_steps
    while driver.num_steps < end:
        if len(scheduler.waiting) > 8 or not scheduler.has_work:
            arriving = not scheduler.has_work
        while arriving and rng.random() < 0.4:
            context = rng.choice(CONTEXTS)
            max_tokens = rng.choice([None, 1, rng.randint(1, 40)])
            with contextlib.suppress(RequestError):  # some can never fit in the smaller pools
                driver.add(
                    str(len(driver.requests)),
                    context[: rng.randint(0, len(context))] + rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 12)),
                    max_tokens=max_tokens,
                    min_tokens=rng.randint(0, min(5, max_tokens or 5)),
                    stop_token_ids=rng.choices(range(VOCAB_SIZE), k=rng.choice([0, 0, 1])),
                    eos_token_ids=rng.choice([(), (7,)]),
                    salt=rng.choice(SALTS),
                    priority=rng.randint(0, 2),
                    prompt_logprobs=rng.choice([None] * 9 + [0]),
                    constrained=len(driver.requests) % 4 == 0,
                )
        if rng.random() < 0.02 and scheduler.requests:
            driver.abort(rng.choice(list(scheduler.requests)))
        if rng.random() < 0.003:
            driver.block_manager.reset_prefix_cache()
        driver.depth = rng.choice([1, 2, 2, 3])
        driver.step()
    driver.run()
    driver.check_outputs()


def test_a_late_result_publishes_nothing_for_a_request_that_was_preempted_and_is_back():
    """Its new blocks are still empty when the result of its old chunk arrives, and a twin would hit them."""
    driver = Driver(num_blocks=18, block_size=1, max_num_seqs=2, max_num_batched_tokens=5)
    driver.add("older", [1] * 4, max_tokens=10)
    driver.step()
    younger = driver.add("younger", [2] * 12, max_tokens=1)
    for num_computed in (4, 8, 0):  # two chunks, then the older one takes its blocks
        driver.launch()
        assert younger.num_computed_tokens == num_computed
    driver.abort("older")
    driver.launch()
    assert younger.num_computed_tokens == 5
    while driver.launched:
        driver.settle()
        driver.check_index()
    driver.run()
    driver.check_outputs()


SOAK_STEPS = 2_600
SOAKS = [
    # num_blocks, block_size, max_num_seqs, budget, policy
    (9, 4, 4, 4, "fcfs"),
    (9, 4, 4, 9, "priority"),
    (16, 4, 6, 40, "fcfs"),
    (16, 4, 6, 40, "priority"),
    (30, 1, 3, 7, "fcfs"),
    (7, 8, 5, 16, "fcfs"),
    (7, 8, 5, 16, "priority"),
    (40, 4, 12, 24, "fcfs"),
    (50, 4, 8, 64, "fcfs"),
    (80, 2, 8, 60, "priority"),
]


def test_soaks_add_up_to_twenty_thousand_steps():
    assert SOAK_STEPS * len(SOAKS) >= 20_000


@pytest.mark.parametrize(("num_blocks", "block_size", "max_num_seqs", "budget", "policy"), SOAKS)
def test_random_traffic_returns_what_each_request_returns_alone(num_blocks, block_size, max_num_seqs, budget, policy):
    driver = Driver(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=60,
        policy=policy,
        max_late_chunk_tokens=3 if block_size == 4 and budget > 9 else None,
        context_cost=0.05,
    )
    soak(driver, random.Random(num_blocks * 100 + budget), SOAK_STEPS)
    assert driver.num_steps >= SOAK_STEPS
    if policy == "fcfs":
        driver.check_preemptions()
    # The traffic must have met what it is meant to meet.
    assert sum(request.num_preemptions for request in driver.requests) > 20
    assert sum(request.num_cached_tokens for request in driver.requests) > 200
    assert driver.num_sharing > 20 or num_blocks < 50
    assert {request.finish_reason for request in driver.requests} == {"stop", "length", "abort"}
    assert len({id(request) for request in driver.requests}) > 100
