"""A step in which every row decodes one token, over buffers that never move: eager, or replayed from CUDA graphs.

    slots → positions, lengths → model → logits shard → token → token_table, num_tokens

Everything but the slots is read from the tables on the device, so the host sends nothing while the batch stays the
same, and a graph captured once serves every batch of its size. With `sizes` a batch is padded with slot -1 to the next
of them: padding rows read no cache, write nowhere and give token 0.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import torch

from qwen_engine import kernels
from qwen_engine.engine.cuda_graphs import CudaGraphs, Part
from qwen_engine.engine.slot_tables import SlotTables
from qwen_engine.engine.token_sampler import Choice, TokenSampler
from qwen_engine.layers.attention import AttentionMetadata
from qwen_engine.layers.sampler import TokenMasks
from qwen_engine.models.qwen3 import Qwen3Model


class DecodeStep:
    """Buffers for up to max_num_seqs rows. `kv_cache` is set before the first step."""

    def __init__(
        self,
        model: Qwen3Model,
        tables: SlotTables,
        sampler: TokenSampler,
        *,
        sizes: Sequence[int],
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        device = tables.device
        self.sizes = tuple(sizes)
        self.kv_cache: torch.Tensor | None = None
        self.graphs: CudaGraphs | None = None
        self._model = model
        self._tables = tables
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._slots = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._logits = torch.zeros(max_num_seqs, model.lm_head.weight.shape[0], dtype=dtype, device=device)
        self._token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._batch: list[int] | None = None  # what `_slots` holds

    @property
    def calls(self) -> dict[str, Callable[[int], None]]:
        """What a step is made of, by name, in order."""
        choices = {choice: functools.partial(self._choose, choice) for choice in get_args(Choice)}
        return {"forward": self._forward, **choices}

    @property
    def parts(self) -> list[Part]:
        """What can be captured."""
        return [(self.calls, self.sizes)]

    def run(self, slots: list[int], masks: TokenMasks | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Decodes one token for each slot: (its id, int64 [rows], and this rank's logits [rows, n]).

        Both are views of buffers that the next step overwrites.
        """
        rows, host_slots = len(slots), np.array(slots, dtype=np.int64)
        size = self._size(rows)
        self._set_slots(slots, size)
        launch = self._launch if self.graphs is None else self.graphs.replay
        launch("forward", size)
        logits, token_ids = self._logits[:rows], self._token_ids[:rows]
        choice = self._sampler.on_device(host_slots)
        if choice is not None:
            launch(choice, size)
        else:
            self._sampler.choose(logits, self._slots[:rows], host_slots, token_ids, masks)
        return token_ids, logits

    def clear(self) -> None:
        """Makes every row padding."""
        self._batch = None
        self._slots.fill_(-1)

    def _size(self, rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, rows)] if self.sizes else rows

    def _set_slots(self, slots: list[int], size: int) -> None:
        if slots == self._batch:
            return
        self._batch = None  # an interrupt may come before the copy
        padded = np.full(size, -1, dtype=np.int32)
        padded[: len(slots)] = slots
        self._slots[:size].copy_(self._tables.to_device(padded), non_blocking=True)
        self._batch = list(slots)

    def _launch(self, name: str, size: int) -> None:
        self.calls[name](size)

    def _forward(self, size: int) -> None:
        tables, slots = self._tables, self._slots[:size]
        positions, seq_lens = self._positions[:size], self._seq_lens[:size]
        kernels.decode_inputs(slots, tables.num_tokens, positions, seq_lens)
        metadata = AttentionMetadata(
            token_slots=slots,
            positions=positions,
            block_tables=tables.block_tables,
            decode_slots=slots,
            decode_seq_lens=seq_lens,
            num_decodes=None,
            max_decode_len=self._max_model_len,
            chunk_slots=slots[:0],
            query_start=slots[:0],
            chunk_seq_lens=slots[:0],
            max_query_len=0,
            max_chunk_len=0,
        )
        assert self.kv_cache is not None
        hidden = self._model(tables.token_table, [metadata], self.kv_cache)
        self._model.lm_head.logits_shard(hidden, out=self._logits[:size])

    def _choose(self, choice: Choice, size: int) -> None:
        self._sampler.choose_on_device(choice, self._logits[:size], self._slots[:size], self._token_ids[:size])
