"""The forward pass of a step with chunks of prompts in it: eager, or replayed from CUDA graphs.

    slots, token counts → token slots and positions, decoding rows, chunks → model → hidden states

A step of few tokens would spend more time in launches than on the GPU. So with `sizes` it is padded to the next of them
and runs over a buffer that never moves, in which one graph of that size finds any mixture of rows. Beyond the largest
size, or with more chunks than the buffer has room for, a step runs eagerly at its own size.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qwen_engine.engine.cuda_graphs import CudaGraphs, Part
from qwen_engine.engine.slot_tables import SlotTables
from qwen_engine.layers.attention import AttentionMetadata
from qwen_engine.models.qwen3 import Qwen3Model

MAX_CHUNKS = 64
"""Of a padded step; as many rows as the smallest prefill kernel looks through."""
MIN_OVERLAPPED_TOKENS = int(os.environ.get("QWEN_ENGINE_OVERLAPPED_TOKENS", "0"))
"""Steps of so many tokens are computed in two halves by several ranks, each while they sum the other; 0: none are."""
MAX_CHUNKS_ONLY = 256
"""Tokens up to which steps without decoding rows have graphs of their own."""
_ALIGNMENT = 4  # each part of the inputs starts at a multiple of 16 bytes, or kernels would be compiled again


@dataclass(frozen=True, slots=True)
class _Shape:
    num_tokens: int
    num_decodes: int
    num_chunks: int

    @property
    def parts(self) -> dict[str, int]:
        """Lengths of the inputs of a step, in order."""
        return {
            "token_slots": self.num_tokens,
            "positions": self.num_tokens,
            "decode_slots": self.num_decodes,
            "decode_seq_lens": self.num_decodes,
            "num_decodes": 1,
            "chunk_slots": self.num_chunks,
            "chunk_seq_lens": self.num_chunks,
            "query_start": self.num_chunks + 1,
        }

    @property
    def num_inputs(self) -> int:
        return sum(map(_aligned, self.parts.values()))

    def views(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        views, start = {}, 0
        for name, length in self.parts.items():
            views[name] = inputs[start : start + length]
            start += _aligned(length)
        return views

    def metadata(
        self, inputs: torch.Tensor, tables: SlotTables, max_query_len: int, max_chunk_len: int
    ) -> AttentionMetadata:
        return AttentionMetadata(
            block_tables=tables.block_tables,
            max_decode_len=tables.max_model_len,
            max_query_len=max_query_len,
            max_chunk_len=max_chunk_len,
            **self.views(inputs),
        )

    def packed(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """The inputs [num_inputs], int32. A part that is given fewer values than it is long is filled up with padding:
        slot -1, and empty chunks behind the last."""
        packed, start = np.full(self.num_inputs, -1, dtype=np.int32), 0
        for name, length in self.parts.items():
            given = values[name]
            packed[start : start + len(given)] = given
            if name == "query_start":
                packed[start + len(given) : start + length] = given[-1]
            start += _aligned(length)
        return packed


class _Rows:
    """The rows of a step, as `MixedStep.run` takes them."""

    def __init__(self, slots: np.ndarray, counts: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        self._slots, self._counts, self._starts, self._ends = slots, counts, starts, ends
        several = np.flatnonzero(counts > 1)
        num_decodes = int(several[0]) if len(several) else len(slots)
        self.shape = _Shape(int(counts.sum()), num_decodes, len(slots) - num_decodes)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """What `_Shape.packed` takes."""
        slots, counts, num_decodes = self._slots, self._counts, self.shape.num_decodes
        num_tokens, offsets = self.shape.num_tokens, np.cumsum(counts) - counts
        return {
            "token_slots": np.repeat(slots, counts),
            "positions": np.arange(num_tokens) - np.repeat(offsets - self._starts, counts),
            "decode_slots": slots[:num_decodes],
            "decode_seq_lens": self._ends[:num_decodes],
            "num_decodes": np.array([num_decodes]),
            "chunk_slots": slots[num_decodes:],
            "chunk_seq_lens": self._ends[num_decodes:],
            "query_start": np.append(offsets[num_decodes:], num_tokens),
        }

    def metadata(self, tables: SlotTables) -> AttentionMetadata:
        inputs, first = tables.to_device(self.shape.packed(self.inputs)), self.shape.num_decodes
        longest = int(self._counts[first:].max(initial=0)), int(self._ends[first:].max(initial=0))
        return self.shape.metadata(inputs, tables, *longest)

    def halves(self) -> list[_Rows]:
        """The first half of the tokens and the second; a row may be in both."""
        before = np.cumsum(self._counts) - self._counts
        first = np.clip(self.shape.num_tokens // 2 - before, 0, self._counts)
        middles = self._starts + first
        parts = ((first, self._starts, middles), (self._counts - first, middles, self._ends))
        return [
            _Rows(self._slots[used], counts[used], starts[used], ends[used])
            for counts, starts, ends in parts
            for used in [counts > 0]
        ]


class MixedStep:
    """sizes: numbers of tokens that steps are padded to. `kv_cache` is set before the first step.

    Padded steps are of two kinds: "mixed", and "chunks" for small ones in which no row decodes, where looking for such
    rows would take a good part of the time.
    """

    def __init__(
        self,
        model: Qwen3Model,
        tables: SlotTables,
        *,
        sizes: Sequence[int],
        max_num_seqs: int,
        tp_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.sizes = tuple(sizes)
        self.kv_cache: torch.Tensor | None = None
        self.graphs: CudaGraphs | None = None
        self._model = model
        self._tables = tables
        self._max_num_seqs = max_num_seqs
        self._tp_size = tp_size
        largest = max(self.sizes, default=0)
        num_inputs = self._padded("mixed", largest).num_inputs
        self._inputs = torch.full((num_inputs,), -1, dtype=torch.int32, device=tables.device)
        self._hidden = torch.zeros(largest, model.config.hidden_size, dtype=dtype, device=tables.device)

    @property
    def parts(self) -> list[Part]:
        """What can be captured."""
        small = [size for size in self.sizes if size <= MAX_CHUNKS_ONLY]
        return [
            ({kind: functools.partial(self._forward_padded, kind)}, sizes)
            for kind, sizes in (("mixed", self.sizes), ("chunks", small))
        ]

    def run(self, slots: np.ndarray, counts: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> torch.Tensor:
        """Computes counts[r] tokens of slots[r], from position starts[r] to ends[r]; rows of one token come first.

        Gives the hidden states of all tokens in order, perhaps in a buffer that the next step overwrites.
        """
        rows = _Rows(slots, counts, starts, ends)
        size = self._size(rows.shape)
        if size is None:
            parts = rows.halves() if self._is_overlapped(rows.shape) else [rows]
            return self._forward([part.metadata(self._tables) for part in parts])
        kind = "chunks" if not rows.shape.num_decodes and size <= MAX_CHUNKS_ONLY else "mixed"
        padded = self._padded(kind, size).packed(rows.inputs)
        self._inputs[: len(padded)].copy_(self._tables.to_device(padded), non_blocking=True)
        if self.graphs is None:
            self._forward_padded(kind, size)
        else:
            self.graphs.replay(kind, size)
        return self._hidden[: rows.shape.num_tokens]

    def clear(self) -> None:
        """Makes every token padding."""
        self._inputs.fill_(-1)

    def _size(self, exact: _Shape) -> int | None:
        if not self.sizes or exact.num_tokens > self.sizes[-1] or exact.num_chunks > MAX_CHUNKS:
            return None
        return self.sizes[bisect_left(self.sizes, exact.num_tokens)]

    def _padded(self, kind: str, size: int) -> _Shape:
        return _Shape(size, min(size, self._max_num_seqs) if kind == "mixed" else 0, MAX_CHUNKS)

    def _is_overlapped(self, exact: _Shape) -> bool:
        return self._tp_size > 1 and 0 < MIN_OVERLAPPED_TOKENS <= exact.num_tokens

    def _forward_padded(self, kind: str, size: int) -> None:
        metadata = self._padded(kind, size).metadata(self._inputs, self._tables, size, self._tables.max_model_len)
        self._hidden[:size].copy_(self._forward([metadata]))

    def _forward(self, batches: list[AttentionMetadata]) -> torch.Tensor:
        assert self.kv_cache is not None
        return self._model(self._tables.token_table, batches, self.kv_cache)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
