"""The choice of the next tokens from the ranks' shards of the logits, and its entry into the slot tables.

There are three ways, and where a row can go several of them it gets the same token:

- plain: temperature and seed only. No logits of other ranks are needed: each rank finds the winner of its own part of
  the vocabulary, and the best of these, by the key that `kernels.slot_argmax` gives it, is the winner of the whole.
- filtered: top-k, top-p and min-p as well. Every rank gathers the logits and finds the same winner.
- any: `SamplingTables.sample` on rank 0, which alone has what the host knows (token masks), and tells the others.

The first two run on the device alone and can be captured.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from qwen_engine import kernels
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine.slot_tables import SlotTables
from qwen_engine.layers.embedding import VocabParallelEmbedding
from qwen_engine.layers.sampler import TokenMasks

Choice = Literal["plain", "filtered"]


class TokenSampler:
    """Owns nothing; all ranks call the same methods with the same rows, in the same order."""

    def __init__(self, lm_head: VocabParallelEmbedding, tables: SlotTables, tp: TPGroup) -> None:
        self._lm_head = lm_head
        self._tables = tables
        self._tp = tp

    def on_device(self, slots: np.ndarray) -> Choice | None:
        """The first way that can serve all these slots on the device alone, None if there is none."""
        sampling = self._tables.sampling
        return "plain" if sampling.is_plain(slots) else "filtered" if sampling.is_filtered(slots) else None

    def choose_on_device(
        self, choice: Choice, logits: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """Appends the next token of each slot and writes it to token_ids.

        logits: this rank's columns [rows, n]; slots: int32 [rows], -1 is padding; token_ids: int64 [rows], 0 for
        padding.
        """
        if choice == "plain":
            self._choose_plain(logits, slots, token_ids)
        else:
            self._choose_filtered(logits, slots, token_ids)

    def _choose_plain(self, logits: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        tables = self._tables
        keys = kernels.slot_argmax(
            logits[:, : self._lm_head.num_tokens],  # padding columns are no tokens
            slots,
            tables.num_tokens,
            tables.sampling.temperature,
            tables.sampling.seeds,
            self._lm_head.vocab_start,
        )
        self._tp.all_reduce_max(keys)
        kernels.advance_to_best(keys, slots, tables.token_table, tables.num_tokens, token_ids)

    def _choose_filtered(self, logits: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        tables = self._tables
        chosen = tables.sampling.draw(
            self._lm_head.gather(logits),
            device_slots=slots.long(),
            positions=tables.num_tokens[slots.clamp(min=0)].long(),
            filtered=True,
        )
        token_ids.copy_(chosen.masked_fill_(slots < 0, 0))
        kernels.advance(token_ids, slots, tables.token_table, tables.num_tokens)

    def choose(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        host_slots: np.ndarray,
        token_ids: torch.Tensor,
        masks: TokenMasks | None,
    ) -> None:
        """The same for rows of any kind, none of them padding; host_slots: the slots as the host knows them."""
        tables = self._tables
        whole = self._lm_head.gather(logits)
        if self._tp.rank == 0:
            device_slots = slots.long()
            token_ids.copy_(
                tables.sampling.sample(
                    whole,
                    slots=host_slots,
                    device_slots=device_slots,
                    positions=tables.num_tokens[device_slots].long(),
                    token_table=tables.token_table,
                    masks=masks,
                )
            )
        self._tp.broadcast(token_ids)
        kernels.advance(token_ids, slots, tables.token_table, tables.num_tokens)
