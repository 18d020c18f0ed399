"""What a rank knows of every running request, by slot: tables on the device and mirrors on the host.

A plan brings only what changed (`apply`). Sampled tokens are appended on the device (`kernels.advance`) and counted on
the host (`computed`), which never waits for them; so the tables of all ranks, and mirror and device, always agree on
the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from qwen_engine.layers.sampler import SamplingTables, SlotSampling
from qwen_engine.scheduling.step_plan import SlotInit, StepPlan


class SlotTables:
    """On the device: token_table [max_num_seqs, max_model_len], block_tables [max_num_seqs, max_blocks] and num_tokens
    [max_num_seqs] (tokens known, sampled ones included), all int32, and the sampling parameters.

    On the host, int64 [max_num_seqs]: known_tokens (num_tokens of the device; 0 in an empty slot), computed_tokens
    (those with KV), prompt_tokens, and prompt_logprobs (how many are asked for, -1: none).
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        self.device = device
        max_blocks = -(-max_model_len // block_size)
        self.token_table = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.sampling = SamplingTables(max_num_seqs, vocab_size, device)
        self.known_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Takes what the plan says has changed."""
        self.known_tokens[plan.freed_slots] = 0
        if plan.added:
            self._add(plan.added)
        if plan.new_blocks:
            slots, blocks = (np.array(column, dtype=np.int64) for column in zip(*plan.new_blocks))
            columns = self._num_blocks[slots]
            indices = slots * self.block_tables.shape[1] + columns
            self._scatter(self.block_tables, indices, blocks)
            self._num_blocks[slots] += 1

    def computed(self, slots: np.ndarray, ends: np.ndarray, sampled_slots: np.ndarray) -> None:
        """Notes on the host that `slots` have KV up to `ends`, and that the device appends one token to some."""
        self.computed_tokens[slots] = ends
        self.known_tokens[sampled_slots] += 1

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device, started but not waited for, through pinned memory that lives until it is done."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _add(self, added: Sequence[SlotInit]) -> None:
        for entry in added:
            slot = entry.slot
            self.known_tokens[slot] = len(entry.token_ids)
            self.computed_tokens[slot] = entry.num_computed_tokens
            self._num_blocks[slot] = len(entry.block_ids)
            self.prompt_tokens[slot] = entry.num_prompt_tokens
            wanted = entry.params.prompt_logprobs
            self.prompt_logprobs[slot] = -1 if wanted is None else wanted
        slots = np.array([entry.slot for entry in added], dtype=np.int64)
        self._scatter(self.num_tokens, slots, self.known_tokens[slots])
        for table, values in (
            (self.token_table, [np.asarray(entry.token_ids, dtype=np.int64) for entry in added]),
            (self.block_tables, [np.asarray(entry.block_ids, dtype=np.int64) for entry in added]),
        ):
            width = table.shape[1]
            indices = [entry.slot * width + np.arange(len(row)) for entry, row in zip(added, values)]
            self._scatter(table, np.concatenate(indices), np.concatenate(values))
        self.sampling.set(
            [
                SlotSampling(
                    slot=entry.slot,
                    params=entry.params,
                    seed=entry.seed,
                    token_ids=entry.token_ids,
                    num_prompt_tokens=entry.num_prompt_tokens,
                    stop_ids=entry.stop_ids,
                    bad_word_ids=entry.bad_word_ids,
                )
                for entry in added
            ]
        )

    def _scatter(self, table: torch.Tensor, flat_indices: np.ndarray, values: np.ndarray) -> None:
        """table.view(-1)[flat_indices] = values, from the host, in two copies."""
        indices, new = self.to_device(np.stack((flat_indices, values))).unbind(0)
        table.view(-1)[indices] = new.to(table.dtype)
