"""Decides which tokens are computed next.

A step is a budget of tokens: first one token for every decoding request, then chunks of prompts that are under way,
then requests from the queue. There is no prefill or decode state: a request has `num_tokens` known tokens of which
`num_computed_tokens` have KV, and a step closes part of that gap.

Invariants:
- `waiting` and `running` are two ends of one order (priority, then arrival): the best waiting request is admitted next,
  the worst running request is preempted first.
- A running request holds blocks for every token it knows, so only a decode that enters a new block can run out.
- The first running request is never preempted: alone, every admitted request fits in the pool.
- A request that arrives while others write does not make them wait long: it is late, and gets small chunks.
- A constrained request is not decoded ahead: the value of its last token decides what may come next.
- `schedule` may run ahead of `apply` by any number of steps. Steps execute in order, so a block or slot given up here
  can be handed out at once: whatever still reads it was launched earlier.

The engine core is the only caller.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qwen_engine.errors import RequestError, shown
from qwen_engine.request import Request, RequestStatus
from qwen_engine.scheduling.block_manager import (
    BlockKey,
    BlockManager,
    BlockTable,
    Prefix,
    RecentPrompts,
    block_table,
    extend_block_keys,
)
from qwen_engine.scheduling.step_plan import SlotInit, StepPlan


@dataclass(slots=True)
class _LaunchedStep:
    """What `apply` needs of a scheduled step: its rows as (request, token index where the row ends).

    Rows that sample are in `requests` and `ends`, in plan order; chunks that do not reach the last token in `partial`.
    num_tokens: of all rows.
    """

    step: int
    num_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    partial: list[tuple[Request, int]] = field(default_factory=list)


class Scheduler:
    """Scheduler and owner of every live request.

    max_num_seqs: slots, so most requests that run at once. max_num_batched_tokens: budget of a step, ≥ max_num_seqs.
    max_late_chunk_tokens: prompt tokens in a step of a request that is late; None: no limit. context_cost: what one
    token of context adds to the time of a computed token, as a share of it; chunks with a long context are smaller.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        policy: str = "fcfs",
        max_num_waiting: int | None = None,
        max_late_chunk_tokens: int | None = None,
        context_cost: float = 0.0,
    ) -> None:
        self.block_manager = block_manager
        self._recent_prompts = RecentPrompts(block_manager.block_size)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.policy = policy
        self.max_num_waiting = max_num_waiting
        self.max_late_chunk_tokens = max_late_chunk_tokens
        self.context_cost = context_cost
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # worst first: the next one to admit is popped from the end
        self.running: list[Request] = []  # best first: the next one to preempt is popped from the end
        self.num_preemptions = 0
        self.num_applied_tokens = 0  # computed by all steps that were applied
        self.num_with_prompt_logprobs = 0  # live requests that ask for them
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._prefix: Prefix | None = None  # of a request before: those that come together often begin alike
        self._launched: deque[_LaunchedStep] = deque()
        self._num_arrivals = 0
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Admits a request to the queue. Raises RequestError if it can never run or the queue is full."""
        self.check_admissible(request)
        request.limit_tokens = self._limit_tokens(request)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.num_with_prompt_logprobs += request.params.prompt_logprobs is not None
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=self._reverse_order)

    @property
    def sampling_requests(self) -> list[Request]:
        """The requests that the step scheduled last samples a token for, in plan order."""
        return self._launched[-1].requests

    def check_admissible(self, request: Request) -> None:
        """Raises RequestError if the request is malformed, can never run, or finds the queue full."""
        num_prompt, max_len = request.num_prompt_tokens, self.max_model_len
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        if self.max_num_waiting is not None and len(self.waiting) >= self.max_num_waiting:
            raise RequestError(f"{len(self.waiting)} requests are waiting; max_num_waiting is {self.max_num_waiting}")
        if num_prompt == 0:
            raise RequestError("the prompt is empty; at least one token is needed", param="prompt")
        if num_prompt >= max_len:
            raise RequestError(
                f"prompt has {num_prompt} tokens; max_model_len is {max_len} and must hold an output token too",
                param="prompt",
            )
        packed = request.packed_prompt
        if packed is None or np.frombuffer(packed, dtype=np.uint32).max() >= self.vocab_size:  # negative ones are large
            strange = [token_id for token_id in request.token_ids if type(token_id) is not int]
            if strange:
                raise RequestError(f"prompt holds {shown(strange[0])}; every entry must be a token id", param="prompt")
            bad = min(request.token_ids) if min(request.token_ids) < 0 else max(request.token_ids)
            raise RequestError(
                f"prompt holds token id {shown(bad)}; ids are 0 to {self.vocab_size - 1}", param="prompt"
            )
        pool_tokens = self.block_manager.num_blocks * self.block_manager.block_size
        max_tokens = request.params.max_tokens
        # The last token of a request is never computed, so it takes no KV.
        num_kv_tokens = num_prompt if max_tokens is None else min(num_prompt + max_tokens, max_len) - 1
        if num_kv_tokens > pool_tokens:
            raise RequestError(
                f"request needs KV for up to {num_kv_tokens} tokens; the whole pool holds {pool_tokens}: "
                "lower max_tokens, shorten the prompt or give the engine more KV memory",
                param="max_tokens" if num_prompt <= pool_tokens else "prompt",
            )

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> Request | None:
        """Ends a request at any moment of its life and frees what it holds. Unknown or ended ids are ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            del self.running[bisect_left(self.running, self._order(request), key=self._order)]
            self._give_up(request)
        else:
            del self.waiting[bisect_left(self.waiting, self._reverse_order(request), key=self._reverse_order)]
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._forget(request)
        return request

    def fail(self, request: Request) -> None:
        """Ends a request that cannot go on, or takes back that it ended well."""
        self.finish(request.request_id, "abort")
        request.finish_reason, request.stop_reason = "abort", None

    def schedule(self) -> StepPlan | None:
        """Plans the next step; None when no request can move before a launched step is applied."""
        launched = _LaunchedStep(self._num_steps)
        plan = StepPlan(step=self._num_steps, slots=[], num_tokens=[])
        budget = self._schedule_decodes(self.max_num_batched_tokens, plan, launched)
        if self.waiting or len(self.running) > len(plan.slots):
            late_from = self._late_from(launched.requests)
            budget = self._schedule_chunks(budget, late_from, plan, launched)
            budget = self._admit(budget, late_from, plan, launched)
        if not plan.slots:
            return None
        launched.num_tokens = self.max_num_batched_tokens - budget
        plan.freed_slots.extend(self._freed_slots)
        self._freed_slots.clear()
        self._launched.append(launched)
        self._num_steps += 1
        return plan

    def apply(self, step: int, token_ids: Sequence[int]) -> list[Request | None]:
        """Takes the tokens `step` sampled, one per sampling row in plan order; returns the request of each.

        None stands for a request that had ended before. One that ends here has `finish_reason` set. Steps are applied
        in the order they were scheduled.
        """
        launched = self._launched.popleft()
        if launched.step != step or len(token_ids) != len(launched.requests):
            raise AssertionError(f"step {step} with {len(token_ids)} tokens is not launched step {launched.step}")
        self.num_applied_tokens += launched.num_tokens
        for request, end in launched.partial:
            self._publish(request, end, step)
        block_size, finished = self.block_manager.block_size, RequestStatus.FINISHED
        owners: list[Request | None] = []
        for request, end, token_id in zip(launched.requests, launched.ends, token_ids):
            if request.status is finished:
                owners.append(None)
                continue
            owners.append(request)
            known = request.token_ids
            known.append(token_id)
            if end // block_size > request.num_published_blocks:
                self._publish(request, end, step)
            if token_id in request.stop_ids:
                stop_reason = token_id if token_id in request.params.stop_token_ids else None
                self.finish(request.request_id, "stop", stop_reason)
            elif len(known) >= request.limit_tokens:
                self.finish(request.request_id, "length")
        return owners

    def drop_launched(self) -> None:
        """Forgets the launched steps, whose requests have all ended: nobody reads their results."""
        if self.requests:
            raise AssertionError(f"{len(self.requests)} requests are live; their launched steps must be applied")
        self._launched.clear()

    def check(self) -> None:
        """Verifies every invariant; raises AssertionError. For tests and debugging."""
        block_size = self.block_manager.block_size
        tables, keys = [], []
        prefixes: dict[int, list[Request]] = {}
        for request in self.running:
            of_request: list[BlockKey] = []
            published = request.token_ids[: request.num_published_blocks * block_size]
            extend_block_keys(of_request, published.tobytes(), block_size, request.cache_salt)
            num_shared = 0
            if request.prefix is not None:
                num_shared = len(request.prefix.block_ids)
                assert num_shared <= request.num_published_blocks, "a prefix with blocks that are not computed"
                assert request.prefix.keys == of_request[:num_shared], "a prefix of another text"
                assert request.prefix.block_ids == request.block_ids[:num_shared], "a table without its prefix"
                prefixes.setdefault(id(request.prefix), []).append(request)
            tables.append(request.block_ids[num_shared:])
            keys.append(of_request[num_shared:])
        for sharing in prefixes.values():
            prefix = sharing[0].prefix
            assert prefix.num_tables == len(sharing), f"{prefix.num_tables} tables; {len(sharing)} have the prefix"
            tables.append(prefix.block_ids)
            keys.append(prefix.keys)
        self.block_manager.check(tables, keys)
        assert self.running == sorted(self.running, key=self._order), "running is out of order"
        assert self.waiting == sorted(self.waiting, key=self._reverse_order), "waiting is out of order"
        assert {id(r) for r in self.requests.values()} == {id(r) for r in self.running + self.waiting}
        asking = [r for r in self.requests.values() if r.params.prompt_logprobs is not None]
        assert self.num_with_prompt_logprobs == len(asking)
        slots = [request.slot for request in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.max_num_seqs)), "a slot is lost, used twice, or used and free"
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            assert 0 <= request.num_cached_tokens < request.num_tokens
            assert request.num_computed_tokens <= request.num_tokens <= request.limit_tokens
            assert len(request.token_ids) <= request.num_tokens
            assert request.num_computed_tokens <= len(request.block_ids) * block_size
            assert request.num_published_blocks * block_size <= request.num_computed_tokens
        for request in self.waiting:
            assert request.status is RequestStatus.WAITING
            assert not request.block_ids
            assert request.slot == -1
            assert request.num_computed_tokens == request.num_published_blocks == 0

    def _limit_tokens(self, request: Request) -> int:
        pool_tokens = self.block_manager.num_blocks * self.block_manager.block_size
        if request.params.max_tokens is None:
            return min(self.max_model_len, pool_tokens + 1)
        return min(request.num_prompt_tokens + request.params.max_tokens, self.max_model_len)

    def _schedule_decodes(self, budget: int, plan: StepPlan, launched: _LaunchedStep) -> int:
        """One token for every running request that lacks exactly one; preempts from the end when blocks run out."""
        block_manager, running = self.block_manager, self.running
        block_size = block_manager.block_size
        slots, requests, ends = plan.slots, launched.requests, launched.ends
        for request in running:  # loses elements at its end only, when a victim is taken
            end = request.num_tokens
            if end - request.num_computed_tokens != 1 or end >= request.limit_tokens:
                continue
            if request.constraint is not None and len(request.token_ids) < end:
                continue
            if end > len(request.block_ids) * block_size:
                while not block_manager.num_free_blocks and running[-1] is not request:
                    self._preempt(running.pop())
                if not block_manager.num_free_blocks:
                    self._preempt(running.pop())
                    break
                (block_id,) = block_manager.allocate(1)
                request.block_ids.append(block_id)
                plan.new_blocks.append((request.slot, block_id))
            request.num_computed_tokens = end
            request.num_tokens = end + 1
            slots.append(request.slot)
            requests.append(request)
            ends.append(end)
        plan.num_tokens.extend([1] * len(slots))
        return budget - len(slots)

    def _late_from(self, writers: Sequence[Request]) -> int | None:
        """The first arrival that came when one of these requests, which decode in this step, had begun to write."""
        if self.max_late_chunk_tokens is None:
            return None
        return min((request.writing_since for request in writers), default=None)

    def _chunk_tokens(self, request: Request, budget: int, late_from: int | None) -> int:
        """How many of its missing tokens a request gets."""
        num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        if late_from is None or request.arrival < late_from:
            return num_tokens
        limit = self.max_late_chunk_tokens / (1 + self.context_cost * request.num_computed_tokens)
        return min(num_tokens, max(1, int(limit)))

    def _schedule_chunks(self, budget: int, late_from: int | None, plan: StepPlan, launched: _LaunchedStep) -> int:
        """The next chunk of every running request that lacks more than one token, in order."""
        for request in self.running:
            if request.num_tokens - request.num_computed_tokens > 1 and budget:
                num_tokens = self._chunk_tokens(request, budget, late_from)
                budget -= num_tokens
                self._add_chunk(request, num_tokens, plan, launched)
        return budget

    def _admit(self, budget: int, late_from: int | None, plan: StepPlan, launched: _LaunchedStep) -> int:
        """Moves requests from the queue to running while budget, slots and blocks last; nobody passes its head.

        Blocks for all known tokens are taken at once, plus one left free for each running request, so that an admitted
        request is not preempted again before it has moved. Returns the budget that is left.
        """
        block_manager = self.block_manager
        prefix = self._usable_prefix()
        while budget and self.waiting and self._free_slots:
            request = self.waiting[-1]
            if len(request.token_ids) < request.num_tokens:
                break  # preempted while its last token is still on the device
            shared = self._shared(request, prefix)
            num_shared = 0 if shared is None else len(shared.block_ids)
            cached = self._match(request, shared)
            num_cached = num_shared + len(cached)
            num_new = block_manager.blocks_for(request.num_tokens) - num_cached
            num_spare = block_manager.num_free_blocks - num_new - len(self.running)
            if num_spare < len(cached) and num_spare < block_manager.num_unreferenced(cached):
                break
            self.waiting.pop()
            request.slot = self._free_slots.pop()
            self._take_blocks(request, shared, cached, num_new)
            prefix = request.prefix or prefix
            request.num_published_blocks = num_cached
            request.num_computed_tokens = num_cached * block_manager.block_size
            if request.num_preemptions == 0:
                request.num_cached_tokens = request.num_computed_tokens
                request.scheduled_time = time.monotonic()
            request.admission_step = plan.step
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=self._order)
            plan.added.append(_slot_init(request, shared))
            if request.prefix is not None and request.prefix.slot is None:
                request.prefix.slot = request.slot
            num_tokens = self._chunk_tokens(request, budget, late_from)
            budget -= num_tokens
            self._add_chunk(request, num_tokens, plan, launched)
        self._prefix = prefix
        return budget

    def _usable_prefix(self) -> Prefix | None:
        """The prefix of the request admitted last that had one, if its blocks are still where it says."""
        prefix = self._prefix
        if prefix is None or not prefix.num_tables or not self.block_manager.is_indexed(prefix.keys[-1]):
            return None
        prefix.slot = None
        return prefix

    def _shared(self, request: Request, prefix: Prefix | None) -> Prefix | None:
        """What the request's table can take over of the prefix of a request before, if it is the better part."""
        if prefix is None or request.cache_salt != prefix.salt or request.params.prompt_logprobs is not None:
            return None
        num_usable = (request.num_tokens - 1) // self.block_manager.block_size
        num_shared = min(prefix.num_common_blocks(request.packed_prompt), num_usable)
        num_blocks = len(prefix.block_ids)
        if num_shared == num_blocks:
            return prefix
        return prefix.shortened(num_shared) if num_shared > num_blocks // 2 else None

    def _match(self, request: Request, shared: Prefix | None) -> BlockTable:
        """Cached blocks for the request behind the prefix it shares; never its last token, whose logits are needed.

        No more is hashed than it takes to find them: the rest waits until its blocks are published.
        """
        if request.params.prompt_logprobs is not None:
            return block_table()  # cached positions would have no logits
        num_shared = 0
        if shared is not None:
            if not self._is_longer(request, shared):
                return block_table()
            num_shared = len(shared.keys)
        if not request.block_keys:
            request.block_keys = self._recent_prompts.known_keys(request.packed_prompt, request.cache_salt)
        if len(request.block_keys) < num_shared:
            request.block_keys.extend(shared.keys[len(request.block_keys) :])
        keys, block_size = request.block_keys, self.block_manager.block_size
        num_usable = (request.num_tokens - 1) // block_size
        cached = self.block_manager.match(keys[num_shared:num_usable])
        num_more = 1
        while num_shared + len(cached) == len(keys) < num_usable:
            self._extend_keys(request, min(num_usable, len(keys) + num_more))
            cached.extend(self.block_manager.match(keys[num_shared + len(cached) :]))
            num_more *= 2
        return cached

    def _is_longer(self, request: Request, prefix: Prefix) -> bool:
        """Whether the block of the request behind the prefix is cached, too. Leaves alone the keys of its own."""
        block_size = self.block_manager.block_size
        first, last = len(prefix.token_ids), len(prefix.token_ids) + block_size
        if last >= request.num_tokens:
            return False
        keys = prefix.keys[-1:]
        extend_block_keys(keys, request.token_ids[first:last].tobytes(), block_size, request.cache_salt)
        return self.block_manager.is_indexed(keys[-1])

    def _take_blocks(self, request: Request, shared: Prefix | None, cached: BlockTable, num_new: int) -> None:
        """Gives the request its table: a prefix, the cached blocks behind it and new ones. Without one to share, the
        cached blocks become a prefix for those that come after it."""
        block_manager, prefix = self.block_manager, shared
        if shared is None and cached:
            num_blocks = len(cached)
            token_ids = request.token_ids[: num_blocks * block_manager.block_size]
            prefix = Prefix(request.cache_salt, token_ids, request.block_keys[:num_blocks], cached)
        elif cached:
            block_manager.acquire(cached)
        if prefix is not None:
            block_manager.acquire_prefix(prefix)
        table = cached + block_manager.allocate(num_new)
        request.block_ids = table if shared is None else shared.block_ids + table
        request.prefix = prefix

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        """Gives the request the keys of its first `num_blocks` blocks."""
        if not request.block_keys and request.prefix is not None:
            request.block_keys = request.prefix.keys[:]
        block_size = self.block_manager.block_size
        first, last = len(request.block_keys) * block_size, num_blocks * block_size
        packed = request.token_ids[first:last].tobytes()
        extend_block_keys(request.block_keys, packed, block_size, request.cache_salt)

    def _add_chunk(self, request: Request, num_tokens: int, plan: StepPlan, launched: _LaunchedStep) -> None:
        end = request.num_computed_tokens + num_tokens
        if end >= request.num_tokens - 1 and request.writing_since is None:
            request.writing_since = self._num_arrivals
        if end == request.num_tokens:
            request.num_tokens += 1
            launched.requests.append(request)
            launched.ends.append(end)
        else:
            launched.partial.append((request, end))
        request.num_computed_tokens = end
        plan.slots.append(request.slot)
        plan.num_tokens.append(num_tokens)

    def _publish(self, request: Request, end: int, step: int) -> None:
        """Makes the blocks below token `end` reusable: `step` has computed their KV.

        A request that was preempted or ended since `step` was launched no longer holds those blocks.
        """
        if request.status is not RequestStatus.RUNNING or step < request.admission_step:
            return
        block_size = self.block_manager.block_size
        self._extend_keys(request, len(request.token_ids) // block_size)
        for index in range(request.num_published_blocks, end // block_size):
            self.block_manager.publish(request.block_ids[index], request.block_keys[index])
        request.num_published_blocks = end // block_size

    def _preempt(self, request: Request) -> None:
        """Sends a request (already taken out of `running`) back to the queue; its KV is computed again later."""
        self._give_up(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_published_blocks = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=self._reverse_order)

    def _give_up(self, request: Request) -> None:
        prefix, request.prefix = request.prefix, None
        if prefix is None:
            self.block_manager.release(request.block_ids)
        else:
            self.block_manager.release(request.block_ids[len(prefix.block_ids) :])
            self.block_manager.release_prefix(prefix)
        request.block_ids = block_table()
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1

    def _forget(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        request.block_keys = []
        self.num_with_prompt_logprobs -= request.params.prompt_logprobs is not None
        del self.requests[request.request_id]

    def _order(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.policy == "priority" else 0, request.arrival)

    def _reverse_order(self, request: Request) -> tuple[int, int]:
        priority, arrival = self._order(request)
        return (-priority, -arrival)


def _slot_init(request: Request, shared: Prefix | None) -> SlotInit:
    looks_back = request.params.has_penalties or request.bad_word_ids
    first = 0 if looks_back else request.num_computed_tokens
    num_sent = 0 if shared is None or shared.slot is None else len(shared.block_ids)
    return SlotInit(
        slot=request.slot,
        first_token=first,
        token_ids=request.token_ids[first:],
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        prefix=(shared.slot, num_sent) if num_sent else None,
        block_ids=request.block_ids[num_sent:],
        params=request.params,
        seed=request.seed,
        stop_ids=sorted(request.stop_ids),
        bad_word_ids=request.bad_word_ids,
    )
