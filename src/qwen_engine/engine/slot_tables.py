"""What a rank knows of every running request, by slot: tables on the device and mirrors on the host.

A plan brings only what changed (`apply`). Sampled tokens are appended on the device (`kernels.advance`) and counted on
the host (`computed`), which never waits for them; so the tables of all ranks, and mirror and device, always agree on
the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from qwen_engine.layers.sampler import SamplingTables
from qwen_engine.scheduling.step_plan import SlotInit, StepPlan


class SlotTables:
    """On the device: token_table [max_num_seqs, max_model_len], block_tables [max_num_seqs, max_blocks] and num_tokens
    [max_num_seqs] (tokens known, sampled ones included), all int32, parts of one buffer that a plan is written into at
    once; and the sampling parameters.

    On the host, int64 [max_num_seqs]: known_tokens (num_tokens of the device; 0 in an empty slot), computed_tokens
    (those with KV), prompt_tokens, and prompt_logprobs (how many are asked for, -1: none).
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        self.device = device
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        sizes = [max_num_seqs * width for width in (max_model_len, max_blocks, 1)]
        self._buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        token_table, block_tables, self.num_tokens = self._buffer.split(sizes)
        self.token_table = token_table.view(max_num_seqs, max_model_len)
        self.block_tables = block_tables.view(max_num_seqs, max_blocks)
        self.sampling = SamplingTables(max_num_seqs, vocab_size, device)
        self.known_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Takes what the plan says has changed, but for sampling parameters."""
        self.known_tokens[plan.freed_slots] = 0
        writes: list[tuple[torch.Tensor, np.ndarray, np.ndarray]] = []  # table, indices in it, values
        if plan.added:
            writes += self._add(plan.added)
        if plan.new_blocks:
            slots, blocks = (np.array(column, dtype=np.int64) for column in zip(*plan.new_blocks))
            indices = slots * self.block_tables.shape[1] + self._num_blocks[slots]
            writes.append((self.block_tables, indices, blocks))
            self._num_blocks[slots] += 1
        if writes:
            indices = np.concatenate([table.storage_offset() + places for table, places, _ in writes])
            device_indices, values = self.to_device(
                np.stack((indices, np.concatenate([values for _, _, values in writes])))
            ).unbind(0)
            self._buffer[device_indices] = values.int()
        self._copy_prefixes(plan.added)

    def apply_sampling(self, plan: StepPlan) -> None:
        """Takes the sampling parameters of the plan's new requests, before tokens are chosen for them."""
        if plan.added:
            self.sampling.set(plan.added)

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

    def _add(self, added: Sequence[SlotInit]) -> list[tuple[torch.Tensor, np.ndarray, np.ndarray]]:
        slots = np.array([entry.slot for entry in added])
        num_shared = np.array([entry.prefix[1] if entry.prefix else 0 for entry in added])
        wanted = [entry.params.prompt_logprobs for entry in added]
        self.known_tokens[slots] = [entry.num_tokens for entry in added]
        self.computed_tokens[slots] = [entry.num_computed_tokens for entry in added]
        self.prompt_tokens[slots] = [entry.num_prompt_tokens for entry in added]
        self.prompt_logprobs[slots] = [-1 if count is None else count for count in wanted]
        self._num_blocks[slots] = num_shared + [len(entry.block_ids) for entry in added]
        token_places = slots * self.token_table.shape[1] + [entry.first_token for entry in added]
        block_places = slots * self.block_tables.shape[1] + num_shared
        return [
            (self.token_table, *_spread(token_places, [entry.token_ids for entry in added])),
            (self.block_tables, *_spread(block_places, [entry.block_ids for entry in added])),
            (self.num_tokens, slots, self.known_tokens[slots]),
        ]

    def _copy_prefixes(self, added: Sequence[SlotInit]) -> None:
        """Gives block tables the beginning that they share with those before them."""
        sharing: dict[tuple[int, int], list[int]] = {}
        for entry in added:
            if entry.prefix:
                sharing.setdefault(entry.prefix, []).append(entry.slot)
        for (source, num_blocks), slots in sharing.items():
            rows = self.to_device(np.array(slots))
            self.block_tables[rows, :num_blocks] = self.block_tables[source, :num_blocks]


def _spread(places: np.ndarray, rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The indices of all entries of the rows, of which each begins at its place, and the entries."""
    lengths = np.array([len(row) for row in rows])
    ends = np.cumsum(lengths)
    indices = np.arange(ends[-1]) + np.repeat(places - (ends - lengths), lengths)
    return indices, np.concatenate([np.asarray(row, dtype=np.int32) for row in rows])
