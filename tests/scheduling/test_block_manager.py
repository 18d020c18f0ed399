"""The KV pool alone: states of a block, the prefix index, eviction order, cost, and that `check` can fail."""

from __future__ import annotations

import copy
import hashlib
import time
from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
from fake_device import block_keys
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qwen_engine.errors import QwenEngineError
from qwen_engine.scheduling import block_manager as block_manager_module
from qwen_engine.scheduling.block_manager import BlockManager, RecentPrompts, extend_block_keys

SIZE = 4


def keys_of(token_ids, salt=None):
    return block_keys(token_ids, SIZE, salt)


def publish_all(manager, block_ids, token_ids, salt=None):
    for block_id, key in zip(block_ids, keys_of(token_ids, salt)):
        manager.publish(block_id, key)


def cache(manager, token_ids, salt=None):
    """Leaves the full blocks of `token_ids` cached and unreferenced; returns them."""
    blocks = manager.allocate(len(token_ids) // SIZE)
    publish_all(manager, blocks, token_ids, salt)
    manager.release(blocks)
    return blocks


def state(manager):
    """Everything the manager holds, by value."""
    return copy.deepcopy({**vars(manager), "_ref_counts": manager._ref_counts.tolist()})


def test_blocks_for_rounds_up():
    manager = BlockManager(4, SIZE)
    assert [manager.blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_allocated_blocks_are_distinct_and_come_back():
    manager = BlockManager(5, SIZE)
    first, second = manager.allocate(2), manager.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert manager.num_free_blocks == 0
    manager.check([first, second])
    manager.release(first)
    assert manager.num_free_blocks == 2
    assert sorted(manager.allocate(2)) == sorted(first)


def test_asking_for_more_than_is_free_says_both_numbers_and_changes_nothing():
    manager = BlockManager(3, SIZE)
    held = manager.allocate(1)
    with pytest.raises(QwenEngineError, match=r"3 KV blocks .* 2 are free"):
        manager.allocate(3)
    manager.check([held])
    assert manager.num_free_blocks == 2


def test_a_shared_block_is_free_only_after_its_last_release():
    manager = BlockManager(2, SIZE)
    (block,) = cache(manager, [1, 2, 3, 4])
    manager.acquire([block])
    manager.acquire([block])
    manager.release([block])
    manager.check([[block]])
    assert manager.num_free_blocks == 1
    manager.release([block])
    assert manager.num_free_blocks == 2


def test_blank_blocks_go_out_before_cached_ones():
    manager = BlockManager(4, SIZE)
    cached = cache(manager, range(8))
    assert not set(manager.allocate(2)) & set(cached)
    assert manager.match(keys_of(range(8))) == cached


def test_the_tail_of_a_chain_is_evicted_first():
    manager = BlockManager(3, SIZE)
    chain = cache(manager, range(12))
    keys = keys_of(range(12))
    for remaining in (2, 1, 0):
        (evicted,) = manager.allocate(1)
        assert evicted == chain[remaining]
        assert manager.match(keys) == chain[:remaining]


def test_the_least_recently_used_chain_is_evicted_first():
    manager = BlockManager(3, SIZE)
    (old,), (middle,), (new,) = (cache(manager, [token] * SIZE) for token in (1, 2, 3))
    manager.acquire([old])
    manager.release([old])  # a use makes it the most recent
    assert list(manager.allocate(3)) == [middle, new, old]


def test_a_referenced_block_is_never_evicted():
    manager = BlockManager(3, SIZE)
    first, second = cache(manager, range(8))
    manager.acquire([first])
    assert set(manager.allocate(2)) == {second, 3 - first - second}
    assert list(manager.match(keys_of(range(8)))) == [first]


def test_an_evicted_block_is_not_hit_while_its_new_owner_writes_it():
    manager = BlockManager(1, SIZE)
    cache(manager, [1, 2, 3, 4])
    (block,) = manager.allocate(1)
    assert not manager.match(keys_of([1, 2, 3, 4]))
    manager.publish(block, keys_of([5, 6, 7, 8])[0])
    assert not manager.match(keys_of([1, 2, 3, 4]))
    assert list(manager.match(keys_of([5, 6, 7, 8]))) == [block]
    manager.check([[block]])


def test_a_match_ends_at_the_first_missing_block():
    manager = BlockManager(3, SIZE)
    blocks = manager.allocate(3)
    keys = keys_of(range(12))
    manager.publish(blocks[0], keys[0])
    manager.publish(blocks[2], keys[2])
    assert list(manager.match(keys)) == [blocks[0]]
    manager.publish(blocks[1], keys[1])
    assert manager.match(keys) == blocks


@pytest.mark.parametrize(
    ("token_ids", "salt"),
    [
        ([1, 2, 3, 9], "a"),  # another token
        ([1, 2, 4, 3], "a"),  # another order
        ([1, 2, 3, 4], "b"),  # another salt
        ([1, 2, 3, 4], None),  # no salt
        ([1, 2, 3], "a"),  # not a whole block
    ],
)
def test_a_hit_needs_the_same_tokens_and_salt(token_ids, salt):
    manager = BlockManager(2, SIZE)
    cached = cache(manager, [1, 2, 3, 4], "a")
    assert manager.match(keys_of([1, 2, 3, 4], "a")) == cached
    assert not manager.match(keys_of(token_ids, salt))


def test_a_hit_needs_the_same_tokens_before_the_block():
    manager = BlockManager(4, SIZE)
    cache(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    cache(manager, [2, 2, 2, 2])
    assert len(manager.match(keys_of([2, 2, 2, 2, 5, 5, 5, 5]))) == 1
    assert not manager.match(keys_of([5, 5, 5, 5]))


def test_a_hash_collision_does_not_make_a_hit_of_other_tokens(monkeypatch):
    class Colliding:
        def __init__(self, data): ...

        def digest(self):
            return bytes(64)

    monkeypatch.setattr(block_manager_module, "blake2b", Colliding)
    manager = BlockManager(2, SIZE)
    cached = cache(manager, [1, 2, 3, 4])
    assert manager.match(keys_of([1, 2, 3, 4])) == cached
    assert not manager.match(keys_of([1, 2, 3, 5]))


def test_keys_grown_step_by_step_equal_keys_made_at_once():
    token_ids = list(range(4 * SIZE + 1))
    grown = []
    for length in range(len(token_ids) + 1):
        extend_block_keys(grown, packed(token_ids[len(grown) * SIZE : length]), SIZE, "salt")
        assert grown == keys_of(token_ids[:length], "salt")
    assert len(grown) == 4


def test_any_string_is_a_salt():
    """JSON may carry a lone surrogate, which UTF-8 does not encode."""
    salts = ["\ud800", "\udfff", "é", "a\x00", "a"]
    assert len({keys_of(range(SIZE), salt)[0] for salt in salts}) == len(salts)


def test_a_salt_that_spells_a_key_does_not_continue_its_chain(monkeypatch):
    class Readable:
        """BLAKE2b whose digests are text, as a patient attacker could find them."""

        def __init__(self, data):
            self.data = data

        def digest(self):
            return hashlib.blake2b(self.data).hexdigest()[:64].encode()

    monkeypatch.setattr(block_manager_module, "blake2b", Readable)
    first, second = keys_of([1] * SIZE + [2] * SIZE)
    assert keys_of([2] * SIZE, first.decode()) != [second]


def test_publishing_twice_keeps_the_first_block_and_the_second_goes_blank():
    manager = BlockManager(2, SIZE)
    first, second = manager.allocate(2)
    (key,) = keys_of([1, 2, 3, 4])
    for _ in range(2):
        manager.publish(first, key)
        manager.publish(second, key)
        manager.check([[first], [second]])
    assert list(manager.match([key])) == [first]
    manager.release([second])
    manager.release([first])
    manager.check([])
    assert list(manager.allocate(1)) == [second]
    assert list(manager.match([key])) == [first]


def test_a_reset_forgets_prefixes_but_not_references():
    manager = BlockManager(4, SIZE)
    cache(manager, range(8))
    held = manager.allocate(1)
    publish_all(manager, held, [9] * SIZE)
    manager.reset_prefix_cache()
    manager.check([held])
    assert not manager.match(keys_of(range(8)))
    assert not manager.match(keys_of([9] * SIZE))
    assert manager.num_free_blocks == 3
    manager.release(held)
    manager.check([])
    assert sorted(manager.allocate(4)) == [0, 1, 2, 3]


def test_a_pool_without_prefix_caching_never_hits():
    manager = BlockManager(2, SIZE, enable_prefix_caching=False)
    cache(manager, range(8))
    assert not manager.match(keys_of(range(8)))
    manager.check([])


def test_cost_does_not_grow_with_the_pool():
    """A scan of a million blocks, or of as many cached ones, would take hours here."""
    start = time.thread_time()
    manager = BlockManager(1_000_000, SIZE)
    assert time.thread_time() - start < 5
    keys = keys_of(range(4 * 100_000))
    blocks = manager.allocate(1_000_000)
    for block_id, key in zip(blocks, keys):
        manager.publish(block_id, key)
    manager.release(blocks)
    middle = blocks[50_000]
    start = time.thread_time()
    for _ in range(50_000):
        manager.acquire([middle])
        taken = manager.allocate(1)
        assert manager.num_free_blocks == 999_998
        manager.release(taken)
        manager.release([middle])
    assert time.thread_time() - start < 5


def _lose_a_blank(manager):
    manager._blank.pop()


def _lose_a_cached(manager):
    block_id, _ = manager._cached.popitem()
    del manager._block_of[manager._key_of.pop(block_id)]


def _blank_twice(manager):
    manager._blank[0] = manager._blank[1]


def _blank_and_cached(manager):
    manager._blank[0] = next(iter(manager._cached))


def _referenced_and_blank(manager):
    manager._blank[0] = manager._ref_counts.tolist().index(1)


def _referenced_and_cached(manager):
    manager._cached.popitem()
    manager._cached[manager._ref_counts.tolist().index(1)] = None


def _reference_too_many(manager):
    manager._ref_counts[manager._ref_counts.tolist().index(1)] += 1


def _reference_too_few(manager):
    manager._ref_counts[manager._ref_counts.tolist().index(2)] -= 1


def _reference_to_a_free_block(manager):
    manager._ref_counts[manager._blank[0]] = 1


def _negative_references(manager):
    manager._ref_counts[manager._blank[0]] = -1


def _blank_with_key(manager):
    block_id = next(iter(manager._cached))
    del manager._cached[block_id]
    manager._blank.append(block_id)


def _cached_without_key(manager):
    block_id = next(iter(manager._cached))
    del manager._block_of[manager._key_of.pop(block_id)]


def _stale_key(manager):
    manager._block_of[keys_of([7] * SIZE)[0]] = manager._blank[0]


def _second_key_of_a_block(manager):
    """Both keys of a block lead to it, but it remembers one: the other would outlive it."""
    keys = list(manager._block_of)
    manager._block_of = {keys_of([7] * SIZE)[0]: manager._block_of[keys[0]], **manager._block_of}


def _swapped_keys(manager):
    first, second = list(manager._key_of)[:2]
    manager._key_of[first], manager._key_of[second] = manager._key_of[second], manager._key_of[first]


def _key_of_a_partial_block(manager):
    block_id, key = next(iter(manager._key_of.items()))
    del manager._block_of[key]
    manager._key_of[block_id] = key[:-4]
    manager._block_of[key[:-4]] = block_id


FAULTS = [
    (_lose_a_blank, "blocks were lost"),
    (_lose_a_cached, "blocks were lost"),
    (_blank_twice, "blank twice"),
    (_blank_and_cached, "blank and cached"),
    (_referenced_and_blank, "a free block is referenced"),
    (_referenced_and_cached, "a free block is referenced"),
    (_reference_too_many, "2 references, 1 mentions"),
    (_reference_too_few, "1 references, 2 mentions"),
    (_reference_to_a_free_block, "1 references, 0 mentions"),
    (_negative_references, "-1 references, 0 mentions"),
    (_blank_with_key, "a blank block has a key"),
    (_cached_without_key, "a cached block has no key"),
    (_stale_key, "index and keys disagree"),
    (_second_key_of_a_block, "index and keys disagree"),
    (_swapped_keys, "index and keys disagree"),
    (_key_of_a_partial_block, "a key of a partial block"),
]


@pytest.mark.parametrize(("plant", "message"), FAULTS, ids=[plant.__name__[1:] for plant, _ in FAULTS])
def test_check_finds_a_planted_fault(plant, message):
    manager = BlockManager(10, SIZE)
    cache(manager, range(3 * SIZE))
    shared = manager.allocate(1)
    publish_all(manager, shared, [9] * SIZE)
    manager.acquire(shared)
    alone = manager.allocate(2)
    tables = [[*shared, alone[0]], [*shared, alone[1]]]
    manager.check(tables)
    plant(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check(tables)


def test_check_finds_a_block_twice_in_one_table():
    manager = BlockManager(2, SIZE)
    (block,) = manager.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 2 mentions"):
        manager.check([[block, block]])


POOL = 6


class PoolMachine(RuleBasedStateMachine):
    """Against a model that keeps, for every indexed block, the whole text before and in it, and the salt."""

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(POOL, SIZE)
        self.tables = []  # [block ids, token ids, salt, number of published blocks]
        self.index = {}  # (salt, token ids up to the end of the block) → block
        self.blank = set(range(POOL))
        self.cached = OrderedDict()  # block → its key in `index`, least recently used first

    def references(self, block_id):
        return sum(table[0].count(block_id) for table in self.tables)

    @rule(
        num_blocks=st.integers(1, 3),
        head=st.integers(0, 1),
        tail=st.integers(0, 1),
        salt=st.sampled_from([None, "s"]),
    )
    def start_table(self, num_blocks, head, tail, salt):
        """What admission does: match, acquire, allocate the rest."""
        token_ids = [head] * SIZE + [tail] * SIZE * (num_blocks - 1)
        expected = []
        for end in range(SIZE, len(token_ids) + 1, SIZE):
            block_id = self.index.get((salt, tuple(token_ids[:end])))
            if block_id is None:
                break
            expected.append(block_id)
        matched = self.manager.match(keys_of(token_ids, salt))
        assert list(matched) == expected
        assert self.manager.num_unreferenced(matched) == sum(not self.references(b) for b in matched)
        before = state(self.manager)
        num_new = num_blocks - len(matched)
        free_after = len(self.blank) + len(set(self.cached) - set(matched))
        if num_new > free_after:
            with pytest.raises(QwenEngineError):
                self.manager.allocate(num_new + self.manager.num_unreferenced(matched))
            assert state(self.manager) == before
            return
        self.manager.acquire(matched)
        for block_id in matched:
            self.cached.pop(block_id, None)
        new = self.manager.allocate(num_new)
        num_blank = min(num_new, len(self.blank))
        assert set(new[:num_blank]) <= self.blank
        self.blank -= set(new[:num_blank])
        for block_id in new[num_blank:]:
            oldest, key = self.cached.popitem(last=False)
            assert block_id == oldest
            del self.index[key]
        self.tables.append([matched + new, token_ids, salt, len(matched)])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish_next(self, data):
        table = data.draw(st.sampled_from(self.tables))
        block_ids, token_ids, salt, num_published = table
        if num_published == len(block_ids):
            return
        self.manager.publish(block_ids[num_published], keys_of(token_ids, salt)[num_published])
        key = (salt, tuple(token_ids[: (num_published + 1) * SIZE]))
        self.index.setdefault(key, block_ids[num_published])
        table[3] += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end_table(self, data):
        block_ids, *_ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.manager.release(block_ids)
        key_of = {block_id: key for key, block_id in self.index.items()}
        for block_id in reversed(block_ids):
            if not self.references(block_id):
                if block_id in key_of:
                    self.cached[block_id] = key_of[block_id]
                else:
                    self.blank.add(block_id)

    @rule()
    def reset(self):
        self.manager.reset_prefix_cache()
        self.blank |= set(self.cached)
        self.cached.clear()
        self.index.clear()

    @invariant()
    def pool_is_whole(self):
        self.manager.check([table[0] for table in self.tables])
        assert self.manager.num_free_blocks == len(self.blank) + len(self.cached)
        assert list(self.manager._cached) == list(self.cached)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40)


PROMPTS = st.lists(
    st.tuples(
        st.integers(0, 40), st.integers(0, 40), st.sampled_from([None, "a", "b"]), st.none() | st.integers(0, 120)
    ),
    max_size=12,
)


@given(PROMPTS)
def test_keys_known_of_prompts_that_begin_alike_are_those_of_each_alone(prompts):
    """Prompts of a length that is remembered: a common beginning, then tokens of their own."""
    recent = RecentPrompts(block_size=16)
    for common, own, salt, limit in prompts:
        token_ids = [*range(1024 + 9 * common), *[7 * common + own] * (5 * own)]
        alone = block_keys(token_ids, 16, salt)
        keys = recent.known_keys(packed(token_ids), salt)
        assert keys == alone[: len(keys)]
        extend_block_keys(keys, packed(token_ids[len(keys) * 16 : limit and limit * 16]), 16, salt)
        assert keys == alone[: len(keys)]
        assert limit is not None or len(keys) == len(alone)


def packed(token_ids: list[int]) -> bytes:
    return np.array(token_ids, dtype=np.int32).tobytes()


def test_what_prompts_share_is_known_as_far_as_one_of_them_was_hashed():
    recent = RecentPrompts(block_size=16)
    shared = list(range(2048))
    longer = [*shared, *[5] * 32]
    first = recent.known_keys(packed([*shared, 1]), None)
    assert first == []
    extend_block_keys(first, packed(shared[:1600]), 16, None)
    assert len(recent.known_keys(packed(longer), None)) == 100
    extend_block_keys(first, packed([*shared[1600:], 1]), 16, None)
    second = recent.known_keys(packed(longer), None)
    assert second == first
    extend_block_keys(second, packed(longer[2048:]), 16, None)
    assert len(first) == 128  # a list each
    assert len(recent.known_keys(packed([*longer, 1]), None)) == 130
    assert recent.known_keys(packed(shared), "another user's") == []
