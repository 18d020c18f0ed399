"""A rank without a model, and a driver that runs a scheduler on it: every wrong, stale or unwritten KV read is caught.

The "KV" of a position is a number that depends on every token up to it and on the request's salt, as real KV depends on
the whole context; the salt travels as the request's seed. A sampled token is a function of that number, so what a
request must return is known without any scheduler: `solo_run`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from struct import pack
from typing import Any

from qwen_engine.request import Request, SamplingParams
from qwen_engine.scheduling.block_manager import BlockManager, extend_block_keys
from qwen_engine.scheduling.plan_codec import decode_plan, encode_plan
from qwen_engine.scheduling.scheduler import Scheduler
from qwen_engine.scheduling.step_plan import SlotInit, StepPlan

VOCAB_SIZE = 11


def block_keys(token_ids: Sequence[int], block_size: int, salt: str | None) -> list[bytes]:
    """The keys of the full blocks of these tokens."""
    keys: list[bytes] = []
    extend_block_keys(keys, pack(f"{len(token_ids)}i", *token_ids), block_size, salt)
    return keys


class _UnreadConstraint:
    """The scheduler looks at whether there is a constraint and not at what it says."""

    error = None

    def mask(self) -> bytes:
        raise AssertionError("the scheduler asked for a mask")

    def accept(self, token_id: int) -> None:
        raise AssertionError(f"the scheduler showed token {token_id}")


UNREAD = _UnreadConstraint()


def seed_of(salt: str | None) -> int:
    return sum((index + 1) * ord(char) for index, char in enumerate(salt or ""))


def extend_chain(chain: list[int], token_ids: Iterable[int], seed: int) -> None:
    """Appends the KV of each further token."""
    for token_id in token_ids:
        chain.append(hash((chain[-1] if chain else seed, token_id)))


def sample(kv: int, *, banned: Iterable[int]) -> int:
    """The token that follows a context; the next allowed one if it is banned."""
    token_id = kv // 7 % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def solo_run(request: Request, *, limit_tokens: int) -> tuple[list[int], str]:
    """(output tokens, finish reason) of a request alone, by definition and without a scheduler or a pool."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    chain: list[int] = []
    extend_chain(chain, prompt, request.seed)
    output: list[int] = []
    while True:
        token_id = sample(chain[-1], banned=request.stop_ids if len(output) < request.params.min_tokens else ())
        output.append(token_id)
        extend_chain(chain, [token_id], request.seed)
        if token_id in request.stop_ids:
            return output, "stop"
        if len(prompt) + len(output) == limit_tokens:
            return output, "length"


@dataclass(slots=True)
class _Slot:
    init: SlotInit
    chain: list[int]  # KV that each known token must have
    block_ids: list[int]
    num_computed: int

    @property
    def num_missing(self) -> int:
        return len(self.chain) - self.num_computed


@dataclass(slots=True)
class FakeDevice:
    """Applies StepPlans as a rank does, and asserts everything a rank relies on.

    kv: block → KV of each of its positions; None is unwritten.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv: list[list[int | None]] = field(init=False)
    slots: dict[int, _Slot] = field(default_factory=dict)
    num_computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.kv = [[None] * self.block_size for _ in range(self.num_blocks)]

    def execute(self, plan: StepPlan) -> list[int]:
        """Runs a step; returns the token of every sampling row, in plan order."""
        self._apply_deltas(plan)
        self._check_rows(plan)
        rows = [(self.slots[slot], count) for slot, count in zip(plan.slots, plan.num_tokens)]
        for slot, _ in rows:  # before anything is written: a hit may only be on what an earlier step has computed
            self._check_context(slot, slot.num_computed)
        for slot, count in rows:
            self._write(slot, count)
        tokens = []
        for slot, _ in rows:
            self._check_context(slot, slot.num_computed)
            if not slot.num_missing:
                tokens.append(self._sample(slot))
        return tokens

    def _apply_deltas(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            del self.slots[slot]
        added: list[int] = []
        for entry in plan.added:
            assert 0 <= entry.slot < self.max_num_seqs
            assert entry.slot not in self.slots, "a slot is taken while it is in use"
            assert 0 <= entry.first_token <= entry.num_computed_tokens < entry.first_token + len(entry.token_ids)
            assert not entry.first_token or (not entry.params.has_penalties and not entry.bad_word_ids)
            # Tokens with KV need not come along; that it is theirs shows in the outputs.
            block_ids = list(entry.block_ids)
            if entry.prefix:
                source, num_shared = entry.prefix
                assert source in added, "a table begins with that of a slot which is not in the plan before it"
                assert 0 < num_shared <= len(self.slots[source].block_ids), "a prefix is longer than its table"
                block_ids = self.slots[source].block_ids[:num_shared] + block_ids
            added.append(entry.slot)
            chain = [self.kv[block_ids[i // self.block_size]][i % self.block_size] for i in range(entry.first_token)]
            assert None not in chain, "a hit on a block that has not been computed"
            extend_chain(chain, entry.token_ids, entry.seed)
            self.slots[entry.slot] = _Slot(entry, chain, block_ids, entry.num_computed_tokens)
        for slot, block_id in plan.new_blocks:
            self.slots[slot].block_ids.append(block_id)

    def _check_rows(self, plan: StepPlan) -> None:
        assert plan.slots, "an empty step"
        assert len(plan.slots) == len(plan.num_tokens) == len(set(plan.slots)), "a slot is scheduled twice"
        assert min(plan.num_tokens) >= 1, "a row without tokens"
        assert sum(plan.num_tokens) <= self.max_num_batched_tokens, "the budget is exceeded"
        added = {entry.slot for entry in plan.added}
        assert added <= set(plan.slots), "a slot is taken without work"
        assert {slot for slot, _ in plan.new_blocks} <= set(plan.slots), "a block is given without work"
        is_decode = [self.slots[slot].num_missing == 1 and slot not in added for slot in plan.slots]
        assert is_decode == sorted(is_decode, reverse=True), "decoding rows do not come first"

    def _check_context(self, slot: _Slot, end: int) -> None:
        size = self.block_size
        for index in range(-(-end // size)):
            expected = slot.chain[index * size : min((index + 1) * size, end)]
            found = self.kv[slot.block_ids[index]][: len(expected)]
            assert found == expected, f"slot {slot.init.slot} attends to wrong KV in block {slot.block_ids[index]}"

    def _write(self, slot: _Slot, count: int) -> None:
        assert count <= slot.num_missing, "more tokens are computed than are known"
        for position in range(slot.num_computed, slot.num_computed + count):
            block_id, offset = slot.block_ids[position // self.block_size], position % self.block_size
            users = sum(block_id in other.block_ids for other in self.slots.values())
            assert users == 1, f"block {block_id} is written while {users} slots hold it"
            self.kv[block_id][offset] = slot.chain[position]
        slot.num_computed += count
        self.num_computed_tokens += count

    def _sample(self, slot: _Slot) -> int:
        num_output = len(slot.chain) - slot.init.num_prompt_tokens
        banned = slot.init.stop_ids if num_output < slot.init.params.min_tokens else ()
        token_id = sample(slot.chain[-1], banned=banned)
        extend_chain(slot.chain, [token_id], slot.init.seed)
        return token_id


class Driver:
    """A scheduler on a fake device, with up to `depth` steps launched before the result of the first is read.

    Asserts after every step what holds for every run; `outputs` collects the tokens that `apply` handed back.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 1 << 20,
        policy: str = "fcfs",
        depth: int = 1,
        max_num_waiting: int | None = None,
        max_late_chunk_tokens: int | None = None,
        context_cost: float = 0.0,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_manager = BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            policy=policy,
            max_num_waiting=max_num_waiting,
            max_late_chunk_tokens=max_late_chunk_tokens,
            context_cost=context_cost,
        )
        self.device = FakeDevice(num_blocks, block_size, max_num_seqs, max_num_batched_tokens)
        self.depth = depth
        self.max_num_seqs = max_num_seqs
        self.launched: deque[tuple[StepPlan, list[int]]] = deque()
        self.requests: list[Request] = []
        self.outputs: dict[int, list[int]] = {}  # id(request) → tokens handed back
        self.num_steps = 0
        self.num_sharing = 0  # requests that a plan gave a prefix of another's

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = 4,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        salt: str | None = None,
        priority: int = 0,
        prompt_logprobs: int | None = None,
        constrained: bool = False,
        bad_word_ids: Sequence[Sequence[int]] = (),
        **params: Any,
    ) -> Request:
        sampling_params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            prompt_logprobs=prompt_logprobs,
            **params,
        )
        request = Request(
            request_id,
            prompt,
            sampling_params,
            seed=seed_of(salt),
            priority=priority,
            cache_salt=salt,
            eos_token_ids=eos_token_ids,
            bad_word_ids=bad_word_ids,
        )
        if constrained:
            request.constraint = UNREAD
        self.scheduler.add(request)
        self.requests.append(request)
        self.outputs[id(request)] = []
        return request

    def launch(self) -> StepPlan | None:
        """Schedules one step and executes it; its result stays unread."""
        scheduler = self.scheduler
        decoding = [r for r in scheduler.running if r.num_tokens - r.num_computed_tokens == 1]
        decoding = [r for r in decoding if r.num_tokens < r.limit_tokens]
        ahead = [r for r in self.requests if r.constraint is not None and len(r.token_ids) < r.num_tokens]
        decoding = [r for r in decoding if r not in ahead]
        plan = scheduler.schedule()
        scheduler.check()
        if plan is None:
            return None
        assert not any(r in ahead for r in scheduler.sampling_requests), "a constrained request was decoded ahead"
        assert all(r.slot in plan.slots or not r.block_ids for r in decoding), "a decoding request was stalled"
        if scheduler.policy == "fcfs" and scheduler.running and scheduler.waiting:
            assert scheduler.running[-1].arrival < scheduler.waiting[-1].arrival, "a request was overtaken"
        self.num_sharing += sum(entry.prefix is not None for entry in plan.added)
        self.launched.append((plan, self.device.execute(decode_plan(encode_plan(plan)))))
        self.num_steps += 1
        return plan

    def settle(self) -> None:
        """Applies the oldest launched step."""
        plan, token_ids = self.launched.popleft()
        num_before = self.scheduler.num_applied_tokens
        owners = self.scheduler.apply(plan.step, token_ids)
        assert len(owners) == len(token_ids)
        assert self.scheduler.num_applied_tokens - num_before == sum(plan.num_tokens)
        for owner, token_id in zip(owners, token_ids):
            if owner is not None:
                self.outputs[id(owner)].append(token_id)
        self.scheduler.check()

    def step(self) -> StepPlan | None:
        """One turn of an engine loop: launch as far ahead as `depth` allows, then read one result."""
        plan = None
        while len(self.launched) < self.depth:
            launched = self.launch()
            if launched is None:
                break
            plan = launched
        if self.launched:
            self.settle()
        else:
            assert not self.scheduler.has_work, "work is pending and nothing can move"
        self.check_keys()
        return plan

    def abort(self, request_id: str) -> None:
        self.scheduler.finish(request_id, "abort")
        self.scheduler.check()

    def run(self) -> None:
        """Steps until every request has ended, within the bound that progress guarantees, and checks the idle state."""
        max_steps = self.max_steps_left()
        steps = 0
        while self.scheduler.has_work or self.launched:
            self.step()
            steps += 1
            assert steps <= max_steps, f"no end after {steps} steps"
        self.check_idle()

    def max_steps_left(self) -> int:
        """Every step moves the best running request, which nobody can preempt, by a token; it loses that place only to
        a better one from the queue, which under fcfs does not exist."""
        live = list(self.scheduler.requests.values())
        displacements = len(live) if self.scheduler.policy == "priority" else 0
        return self.depth * (1 + sum(r.limit_tokens for r in live) * (1 + displacements)) + len(self.launched)

    def check_idle(self) -> None:
        scheduler, manager = self.scheduler, self.block_manager
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        assert manager.num_free_blocks == manager.num_blocks, "blocks were lost"
        assert sorted(scheduler._free_slots) == list(range(self.max_num_seqs)), "slots were lost"
        scheduler.check()
        self.check_index()

    def check_keys(self) -> None:
        """The keys that live requests have, some from prompts before them, are those of their tokens."""
        for request in self.scheduler.requests.values():
            keys = block_keys(request.token_ids, self.block_manager.block_size, request.cache_salt)
            assert request.block_keys == keys[: len(request.block_keys)], f"{request.request_id} has another's keys"

    def check_index(self) -> None:
        """Every entry of the prefix index leads to the KV of exactly the text that its key stands for."""
        size = self.block_manager.block_size
        kv_of_key: dict[bytes, list[int]] = {}
        for request in self.requests:
            chain: list[int] = []
            extend_chain(chain, request.token_ids, request.seed)
            for index, key in enumerate(block_keys(request.token_ids, size, request.cache_salt)):
                kv_of_key[key] = chain[index * size : (index + 1) * size]
        for key, block_id in self.block_manager._block_of.items():
            assert self.device.kv[block_id] == kv_of_key[key], f"the index is wrong about block {block_id}"

    def check_outputs(self) -> None:
        """Every request returned what it returns alone; an aborted one, a beginning of that."""
        for request in self.requests:
            expected, reason = solo_run(request, limit_tokens=request.limit_tokens)
            assert request.finish_reason in (reason, "abort")
            output = self.outputs[id(request)]
            assert output == list(request.token_ids[request.num_prompt_tokens :])
            if request.finish_reason == "abort":
                assert output == expected[: len(output)]
            else:
                assert output == expected
                stopped_by_user = reason == "stop" and output[-1] in request.params.stop_token_ids
                assert request.stop_reason == (output[-1] if stopped_by_user else None)

    def check_preemptions(self) -> None:
        """Under fcfs only a request that is at least as old, entering a new block for a sampled token, preempts."""
        size = self.block_manager.block_size
        events = 0
        for request in self.requests:
            events += -(-(request.limit_tokens - request.num_prompt_tokens) // size) + 1
            assert request.num_preemptions <= events
