"""The choice of the next tokens from the ranks' shards of the logits, and its entry into the slot tables.

Plain rows (temperature and seed only) need no logits of other ranks: each rank finds the winner of its own part of the
vocabulary, and the best of these, by the key that `kernels.slot_argmax` gives it, is the winner of the whole. Any other
batch goes through `SamplingTables.sample` on rank 0, which tells the others. Both ways give a plain row the same token.
"""

from __future__ import annotations

import numpy as np
import torch

from qwen_engine import kernels
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine.slot_tables import SlotTables
from qwen_engine.layers.embedding import VocabParallelEmbedding
from qwen_engine.layers.sampler import TokenMasks


class TokenSampler:
    """Owns nothing; all ranks call the same methods with the same rows, in the same order."""

    def __init__(self, lm_head: VocabParallelEmbedding, tables: SlotTables, tp: TPGroup) -> None:
        self._lm_head = lm_head
        self._tables = tables
        self._tp = tp

    def is_plain(self, slots: np.ndarray) -> bool:
        """Whether `choose_plain` can serve these slots."""
        return self._tables.sampling.is_plain(slots)

    def choose_plain(self, logits: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Appends the next token of each slot and writes it to token_ids; runs on the device alone, so it can be
        captured.

        logits: this rank's columns [rows, n]; slots: int32 [rows], -1 is padding; token_ids: int64 [rows].
        """
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
