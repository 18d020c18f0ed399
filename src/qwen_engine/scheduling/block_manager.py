"""The paged KV pool: who references which block, and which blocks hold a prefix that can be reused.

A block is in exactly one of three states:

    blank       no reference, nothing to reuse            in `_blank`
    cached      no reference, its key is in the index     in `_cached`, least recently used first
    referenced  in one or more block tables               ref count > 0; its key may be in the index too

A block enters the index only after its KV has been computed (`publish`), and leaves it when it is handed out again.
Releasing a table puts its tail before its head, so a chain is evicted from the end. The scheduler is the only caller.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from hashlib import sha256
from struct import pack

import numpy as np

from qwen_engine.errors import QwenEngineError

BlockKey = bytes
"""SHA-256 of the key of the block before (of the salt's SHA-256 for the first), then the block's own ids as int32.

The index compares whole keys, so the tokens of a block are compared on every hit.
"""


def extend_block_keys(keys: list[BlockKey], token_ids: Sequence[int], block_size: int, salt: str | None) -> None:
    """Appends the keys of the full blocks of `token_ids` that `keys` does not hold yet."""
    first, last = len(keys), len(token_ids) // block_size
    if first < last:
        tokens = token_ids[first * block_size : last * block_size]
        _extend_keys(keys, pack(f"{len(tokens)}i", *tokens), 4 * block_size, salt)


def _extend_keys(keys: list[BlockKey], tokens: bytes, stride: int, salt: str | None) -> None:
    """The same for the next blocks' ids as int32, `stride` bytes each."""
    # "surrogatepass": JSON can carry a lone surrogate. A digest is shorter than a key: no salt can pass for a block.
    parent = keys[-1] if keys else sha256((salt or "").encode(errors="surrogatepass")).digest()
    for start in range(0, len(tokens), stride):
        parent = sha256(parent).digest() + tokens[start : start + stride]
        keys.append(parent)


class PromptKeys:
    """Block keys of prompts. What a prompt shares with one of those that came last is not hashed again: comparing is
    faster by far, and prompts that come together often begin alike."""

    _NUM_REMEMBERED = 4
    _LEAST_TOKENS = 1024  # fewer are hashed as fast

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._latest: deque[tuple[str | None, np.ndarray, list[BlockKey]]] = deque(maxlen=self._NUM_REMEMBERED)

    def of(self, packed_prompt: bytes, salt: str | None) -> list[BlockKey]:
        """What `extend_block_keys` makes of an empty list. packed_prompt: ids as int32."""
        size, keys = self._block_size, []
        prompt_ids = np.frombuffer(packed_prompt, dtype=np.int32)
        is_long = len(prompt_ids) >= self._LEAST_TOKENS
        for other_salt, other_ids, other_keys in self._latest if is_long else ():
            if other_salt == salt:
                num_shared = _num_shared(prompt_ids, other_ids) // size
                if num_shared > len(keys):
                    keys = other_keys[:num_shared]
        _extend_keys(keys, prompt_ids[len(keys) * size : len(prompt_ids) // size * size].tobytes(), 4 * size, salt)
        if is_long:
            self._latest.append((salt, prompt_ids, list(keys)))
        return keys


def _num_shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two prompts have in common at their start."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
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

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks that hold the longest indexed prefix of `keys`. They are not referenced yet: call `acquire`."""
        blocks = list(map(self._block_of.get, keys))
        return blocks[: blocks.index(None)] if None in blocks else blocks

    def num_unreferenced(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks `acquire` would take out of the free ones."""
        return list(map(self._ref_counts.__getitem__, block_ids)).count(0)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Adds one reference to each of these indexed blocks."""
        ref_counts, cached = self._ref_counts, self._cached
        for block_id in block_ids:
            if ref_counts[block_id] == 0:
                del cached[block_id]
            ref_counts[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Hands out blocks with one reference each; evicts the least recently used cached ones."""
        if num_blocks > self.num_free_blocks:
            raise QwenEngineError(f"{num_blocks} KV blocks were asked for; {self.num_free_blocks} are free")
        blocks = []
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
        ref_counts = self._ref_counts
        for block_id in reversed(block_ids):
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                if block_id in self._key_of:
                    self._cached[block_id] = None
                else:
                    self._blank.append(block_id)

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
        for block_id, count in enumerate(self._ref_counts):
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
        assert all(len(key) == 32 + 4 * self.block_size for key in self._block_of), "a key of a partial block"
        for table, true_keys in zip(tables, keys):
            for index, block_id in enumerate(table):
                key = self._key_of.get(block_id)
                assert key is None or key in true_keys[index : index + 1], f"the index is wrong about block {block_id}"
