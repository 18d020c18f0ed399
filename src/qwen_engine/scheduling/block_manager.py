"""The paged KV pool: who references which block, and which blocks hold a prefix that can be reused.

A block is in exactly one of three states:

    blank       no reference, nothing to reuse            in `_blank`
    cached      no reference, its key is in the index     in `_cached`, least recently used first
    referenced  in one or more block tables               ref count > 0; its key may be in the index too

The beginning that several tables share (`Prefix`) counts as one table.

A block enters the index only after its KV has been computed (`publish`), and leaves it when it is handed out again.
Releasing a table puts its tail before its head, so a chain is evicted from the end. The scheduler is the only caller.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from qwen_engine.errors import QwenEngineError

BlockKey = bytes
"""BLAKE2b of the key of the block before (of the salt's BLAKE2b for the first), then the block's own ids as int32.

The index compares whole keys, so the tokens of a block are compared on every hit.
"""

BlockTable = array
"""Ids of the blocks that hold a sequence of tokens, in its order; int32, as they travel and as the device has them."""


def block_table(block_ids: Iterable[int] = ()) -> BlockTable:
    """A table of these blocks."""
    return array("i", block_ids)


def extend_block_keys(keys: list[BlockKey], packed_ids: bytes, block_size: int, salt: str | None) -> None:
    """Appends the keys of the full blocks in `packed_ids`, ids as int32 that come after those of the last key."""
    stride = 4 * block_size
    if len(packed_ids) < stride:
        return
    # "surrogatepass": JSON can carry a lone surrogate. A digest is shorter than a key: no salt passes for a block.
    parent = keys[-1] if keys else blake2b((salt or "").encode(errors="surrogatepass")).digest()
    for start in range(0, len(packed_ids) - stride + 1, stride):
        parent = blake2b(parent).digest() + packed_ids[start : start + stride]
        keys.append(parent)


class _RecentPrompt(NamedTuple):
    """A prompt's ids as int32, and the keys of its leading blocks."""

    salt: str | None
    packed: bytes
    keys: list[BlockKey]


class RecentPrompts:
    """The prompts that came last, with the keys of their blocks. Prompts that come together often begin alike, and to
    compare them is faster by far than to hash each."""

    _NUM_REMEMBERED = 4
    _LEAST_TOKENS = 1024  # fewer are hashed as fast

    def __init__(self, block_size: int) -> None:
        self._block_bytes = 4 * block_size
        self._latest: deque[_RecentPrompt] = deque(maxlen=self._NUM_REMEMBERED)

    def known_keys(self, packed: bytes, salt: str | None) -> list[BlockKey]:
        """Keys of the leading blocks that one of those prompts had too, as far as they have been hashed.

        packed: the prompt's ids as int32. The list is remembered for the prompts to come: its owner may extend it, no
        more.
        """
        keys: list[BlockKey] = []
        if len(packed) < 4 * self._LEAST_TOKENS:
            return keys
        block_bytes = self._block_bytes
        for other in reversed(self._latest):
            if other.salt != salt:
                continue
            next_block = slice(len(keys) * block_bytes, (len(keys) + 1) * block_bytes)
            if packed[next_block] == other.packed[next_block]:  # most of the time it is no more than is known
                num_shared = min(4 * _num_equal_ids(packed, other.packed) // block_bytes, len(other.keys))
                if num_shared > len(keys):
                    keys = other.keys[:num_shared]
        self._latest.append(_RecentPrompt(salt, packed, keys))
        return keys


def _num_equal_ids(one: bytes, other: bytes | array[int]) -> int:
    """How many ids, all int32, two prompts have in common at their start."""
    ids, others = np.frombuffer(one, np.int32), np.frombuffer(other, np.int32)
    length = min(len(ids), len(others))
    differs = ids[:length] != others[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


@dataclass(slots=True, eq=False)
class Prefix:
    """Cached blocks that tables begin with, referenced once for all of these.

    token_ids: in them, as int32. slot: of the first table with it that the plan in the making adds, if there is one.
    """

    salt: str | None
    token_ids: array[int]
    keys: list[BlockKey]
    block_ids: BlockTable
    slot: int | None = None
    num_tables: int = 0

    def num_common_blocks(self, packed_ids: bytes) -> int:
        """How many of its blocks a prompt begins with, too."""
        if packed_ids.startswith(self.token_ids):
            return len(self.block_ids)
        return _num_equal_ids(packed_ids, self.token_ids) // self._block_size

    def shortened(self, num_blocks: int) -> Prefix:
        """The first of these blocks."""
        token_ids = self.token_ids[: num_blocks * self._block_size]
        return Prefix(self.salt, token_ids, self.keys[:num_blocks], self.block_ids[:num_blocks], self.slot)

    @property
    def _block_size(self) -> int:
        return len(self.token_ids) // len(self.block_ids)


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest ids go out first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody references; `allocate` can hand out this many."""
        return len(self._blank) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def is_indexed(self, key: BlockKey) -> bool:
        """Whether a block with this key can be reused."""
        return key in self._block_of

    def match(self, keys: Sequence[BlockKey]) -> BlockTable:
        """Blocks that hold the longest indexed prefix of `keys`. They are not referenced yet: call `acquire`."""
        found = list(map(self._block_of.get, keys))
        return block_table(found[: found.index(None)] if None in found else found)

    def num_unreferenced(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks `acquire` would take out of the free ones."""
        return len(block_ids) - int(np.count_nonzero(self._ref_counts[np.asarray(block_ids, dtype=np.int64)]))

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to each of these indexed blocks, which are all different."""
        ids = np.asarray(block_ids, dtype=np.int64)
        ref_counts = self._ref_counts[ids]
        if np.count_nonzero(ref_counts) < len(ids):
            for block_id in ids[ref_counts == 0].tolist():
                del self._cached[block_id]
        self._ref_counts[ids] = ref_counts + 1

    def allocate(self, num_blocks: int) -> BlockTable:
        """Hands out blocks with one reference each; evicts the least recently used cached ones."""
        if num_blocks > self.num_free_blocks:
            raise QwenEngineError(f"{num_blocks} KV blocks were asked for; {self.num_free_blocks} are free")
        blocks = block_table()
        for _ in range(num_blocks):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                del self._block_of[self._key_of.pop(block_id)]
            self._ref_counts[block_id] = 1
            blocks.append(block_id)
        return blocks

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each block of a table, last block first."""
        ids = np.asarray(block_ids, dtype=np.int64)[::-1]
        ref_counts = self._ref_counts[ids] - 1
        self._ref_counts[ids] = ref_counts
        for block_id in ids[ref_counts == 0].tolist():
            if block_id in self._key_of:
                self._cached[block_id] = None
            else:
                self._blank.append(block_id)

    def acquire_prefix(self, prefix: Prefix) -> None:
        """Takes a prefix for one more table."""
        if not prefix.num_tables:
            self.acquire(prefix.block_ids)
        prefix.num_tables += 1

    def release_prefix(self, prefix: Prefix) -> None:
        """Drops one table's share in a prefix, and with the last one its references."""
        prefix.num_tables -= 1
        if not prefix.num_tables:
            self.release(prefix.block_ids)

    def publish(self, block_id: int, key: BlockKey) -> None:
        """Makes a computed, referenced block reusable. Of two blocks with one key, the first stays in the index."""
        if self.enable_prefix_caching and key not in self._block_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def reset_prefix_cache(self) -> None:
        """Forgets every indexed prefix; referenced blocks stay with their owners."""
        self._blank.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._key_of.clear()

    def check(self, tables: Sequence[Sequence[int]], keys: Sequence[Sequence[BlockKey]] = ()) -> None:
        """Verifies every invariant against the block tables in use; raises AssertionError. For tests and debugging.

        keys: of each table's computed blocks. An indexed block of the table has to be one of them, with that key.
        """
        mentions = Counter(block_id for table in tables for block_id in table)
        for block_id, count in enumerate(self._ref_counts.tolist()):
            assert count == mentions[block_id], f"block {block_id}: {count} references, {mentions[block_id]} mentions"
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not blank & cached, "a block is blank and cached"
        assert not (blank | cached) & set(mentions), "a free block is referenced"
        assert len(blank) + len(cached) + len(mentions) == self.num_blocks, "blocks were lost"
        assert not blank & set(self._key_of), "a blank block has a key"
        assert cached <= set(self._key_of), "a cached block has no key"
        indexed = {(block_id, key) for key, block_id in self._block_of.items()}
        assert indexed == set(self._key_of.items()), "index and keys disagree"
        key_bytes = 64 + 4 * self.block_size
        assert all(len(key) == key_bytes for key in self._block_of), "a key of a partial block"
        for table, true_keys in zip(tables, keys):
            for index, block_id in enumerate(table):
                key = self._key_of.get(block_id)
                assert key is None or key in true_keys[index : index + 1], f"the index is wrong about block {block_id}"
