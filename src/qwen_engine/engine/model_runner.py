"""One rank's share of a step: slot tables, forward pass, sampling.

The runner mirrors on its device what the scheduler knows of every running request, and is told only what changed
(`StepPlan`). Sampled tokens are written into the token table on the device and feed the next step from there; their
values reach the host later, through `StepResult`. Steps run in the order they are given.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.errors import QwenEngineError
from qwen_engine.layers.attention import AttentionMetadata
from qwen_engine.layers.sampler import SamplingTables, SlotSampling, TopLogprobs, top_logprobs
from qwen_engine.models.qwen3 import Qwen3Model
from qwen_engine.request import Logprob, PositionLogprobs, SamplingParams
from qwen_engine.scheduling.step_plan import SlotInit, StepPlan

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits exist at once."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Values of one step on the host, per sampling row in plan order.

    prompt_logprobs: slot → (index of the first prompt token covered, one entry per token).
    """

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None] | None
    prompt_logprobs: dict[int, tuple[int, list[PositionLogprobs]]]


class StepResult:
    """Handle of a launched step. `wait` blocks until its values are on the host."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        sampled_logprobs: tuple[np.ndarray, _HostLogprobs] | None,
        prompt_logprobs: dict[int, tuple[int, list[_HostLogprobs]]],
    ) -> None:
        self._token_ids = _to_host(token_ids)
        self._sampled_logprobs = sampled_logprobs
        self._prompt_logprobs = prompt_logprobs
        self._event = None
        if token_ids.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self, check: Callable[[], None] | None = None) -> StepOutput:
        """The values, once they are on the host. `check` is called while waiting; what it raises ends the wait."""
        if self._event is not None:
            while check is not None and not self._event.query():
                check()
            self._event.synchronize()
        token_ids = self._token_ids.tolist()
        logprobs: list[PositionLogprobs | None] | None = None
        if self._sampled_logprobs is not None:
            rows, values = self._sampled_logprobs
            logprobs = [None] * len(token_ids)
            for row, entry in zip(rows.tolist(), values.positions()):
                logprobs[row] = entry
        prompt = {
            slot: (start, [entry for part in parts for entry in part.positions()])
            for slot, (start, parts) in self._prompt_logprobs.items()
        }
        return StepOutput(token_ids, logprobs, prompt)


class _HostLogprobs:
    """Log-probabilities on their way to the host. num_top: how many of the top tokens each row asked for."""

    def __init__(self, token_ids: torch.Tensor, values: TopLogprobs, num_top: Sequence[int]) -> None:
        self._num_top = num_top
        self._tensors = [
            _to_host(tensor)
            for tensor in (token_ids, values.logprobs, values.ranks, values.top_ids, values.top_logprobs)
        ]

    def positions(self) -> list[PositionLogprobs]:
        """One dictionary per row: the top tokens by rank, then the chosen token if it is not among them."""
        token_ids, logprobs, ranks, top_ids, top_values = (tensor.tolist() for tensor in self._tensors)
        entries = []
        for row, num_top in enumerate(self._num_top):
            top = zip(top_ids[row][:num_top], top_values[row])
            entry = {token: Logprob(value, rank) for rank, (token, value) in enumerate(top, start=1)}
            entry[token_ids[row]] = Logprob(logprobs[row], ranks[row])
            entries.append(entry)
        return entries


class ModelRunner:
    """Owns the model, the KV cache and the slot tables of one rank."""

    def __init__(
        self,
        model: Qwen3Model,
        config: ModelConfig,
        *,
        tp: TPGroup,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        check_agreement: bool = False,
    ) -> None:
        self.model = model
        self.check_agreement = check_agreement
        self.config = config
        self.tp = tp
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        self.token_table = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.sampling = SamplingTables(max_num_seqs, config.vocab_size, device)
        self.kv_cache: torch.Tensor | None = None
        # Host mirrors, by slot: known tokens (sampled ones included; 0 in an empty slot), tokens with KV, blocks,
        # prompt length.
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)  # -1: not asked for

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocates [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]; its content is never read before
        it is written."""
        attention = self.model.layers[0].self_attn
        shape = (
            self.config.num_layers,
            2,
            num_blocks,
            attention.num_kv_heads,
            self.block_size,
            self.config.head_dim,
        )
        self.kv_cache = torch.empty(shape, dtype=self.dtype, device=self.device)

    def profile(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Peak bytes that the largest step takes beyond what is allocated now (CUDA only). Uses a pool of one block."""
        self.allocate_kv_cache(num_blocks=1)
        num_seqs = min(max_num_seqs, max_num_batched_tokens)
        length = min(max_num_batched_tokens // num_seqs, self.max_model_len - 1)
        params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)
        added = [
            SlotInit(
                slot=slot,
                token_ids=[0] * length,
                num_prompt_tokens=length,
                num_computed_tokens=0,
                block_ids=[0] * -(-length // self.block_size),
                params=params,
                seed=0,
                stop_ids=(),
                bad_word_ids=(),
            )
            for slot in range(num_seqs)
        ]
        plan = StepPlan(step=0, slots=list(range(num_seqs)), num_tokens=[length] * num_seqs, added=added)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.execute(plan).wait()
        peak = torch.cuda.max_memory_allocated(self.device)
        self.kv_cache = None
        return peak - before

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Launches a step. Nothing here waits for the device."""
        with self._on_device():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        self._apply_deltas(plan)
        slots = np.array(plan.slots, dtype=np.int64)
        counts = np.array(plan.num_tokens, dtype=np.int64)
        if not self._num_tokens[slots].all():
            raise QwenEngineError(f"step {plan.step} computes a slot of {plan.slots} that holds no request")
        starts = self._num_computed[slots]
        ends = starts + counts
        sampling_rows = np.flatnonzero(ends == self._num_tokens[slots])
        metadata = self._metadata(slots, counts, starts, ends)
        assert self.kv_cache is not None
        hidden = self.model(self.token_table, metadata, self.kv_cache)
        last = np.cumsum(counts) - 1
        prompt_logprobs = self._prompt_logprobs(hidden, slots, starts, ends, first=last - counts + 1)
        sampled_slots = slots[sampling_rows]
        token_ids, logprobs = self._sample(hidden, last[sampling_rows], sampled_slots, ends[sampling_rows])
        if self.check_agreement:
            self._check_agreement(plan, starts, token_ids)
        self._num_computed[slots] = ends
        self._num_tokens[sampled_slots] += 1
        return StepResult(token_ids, logprobs, prompt_logprobs)

    def _check_agreement(self, plan: StepPlan, starts: np.ndarray, token_ids: torch.Tensor) -> None:
        """Raises QwenEngineError if the ranks differ in the rows they computed or the tokens they hold."""
        seen = (plan.step, plan.slots, plan.num_tokens, starts.tolist(), token_ids.tolist())
        digest = torch.tensor([zlib.crc32(repr(seen).encode())], device=self.device)
        digests = self.tp.all_gather_last_dim(digest).tolist()
        if len(set(digests)) > 1:
            raise QwenEngineError(f"ranks disagree about step {plan.step}: digests of rows and tokens are {digests}")

    def _sample(
        self, hidden: torch.Tensor, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor, tuple[np.ndarray, _HostLogprobs] | None]:
        """Samples the next token of `slots` from the hidden states at `rows`; they stand at `positions`."""
        if not len(rows):
            return torch.empty(0, dtype=torch.int64, device=self.device), None
        device_rows, device_slots, device_positions = self._to_device(np.stack((rows, slots, positions))).unbind(0)
        logits = self.model.logits(hidden[device_rows])
        if self.tp.rank == 0:
            token_ids = self.sampling.sample(
                logits,
                slots=slots,
                device_slots=device_slots,
                positions=device_positions,
                token_table=self.token_table,
            )
        else:
            token_ids = torch.empty_like(device_rows)
        self.tp.broadcast(token_ids)
        self.token_table[device_slots, device_positions] = token_ids.to(torch.int32)
        asked = self.sampling.logprob_rows(slots)
        if not len(asked) or self.tp.rank:
            return token_ids, None
        device_asked = self._to_device(asked)
        num_top = self.sampling.num_logprobs(slots[asked])
        chosen = token_ids[device_asked]
        values = top_logprobs(logits[device_asked], chosen, max(num_top))
        return token_ids, (asked, _HostLogprobs(chosen, values, num_top))

    def _prompt_logprobs(
        self, hidden: torch.Tensor, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, *, first: np.ndarray
    ) -> dict[int, tuple[int, list[_HostLogprobs]]]:
        """Log-probabilities of the prompt tokens that follow each computed one, for the rows that ask for them.

        Position p predicts the token at p + 1; `first` is the row of `hidden` where each plan row starts.
        """
        results: dict[int, tuple[int, list[_HostLogprobs]]] = {}
        for row in np.flatnonzero(self._num_prompt_logprobs[slots] >= 0):
            slot, start = int(slots[row]), int(starts[row])
            stop = min(int(ends[row]), int(self._num_prompt[slot]) - 1)
            num_top = int(self._num_prompt_logprobs[slot])
            parts = []
            for low in range(start, stop, PROMPT_LOGPROB_ROWS):
                high = min(low + PROMPT_LOGPROB_ROWS, stop)
                offset = int(first[row]) - start
                logits = self.model.logits(hidden[offset + low : offset + high])
                if self.tp.rank:
                    continue  # only there to give its part of the logits
                token_ids = self.token_table[slot, low + 1 : high + 1].to(torch.int64)
                values = top_logprobs(logits, token_ids, num_top)
                parts.append(_HostLogprobs(token_ids, values, [num_top] * (high - low)))
            if parts:
                results[slot] = (start + 1, parts)
        return results

    def _apply_deltas(self, plan: StepPlan) -> None:
        self._num_tokens[plan.freed_slots] = 0
        if plan.added:
            self._add(plan.added)
        if plan.new_blocks:
            slots, blocks = (np.array(column, dtype=np.int64) for column in zip(*plan.new_blocks))
            columns = self._num_blocks[slots]
            indices = slots * self.block_tables.shape[1] + columns
            self._scatter(self.block_tables, indices, blocks)
            self._num_blocks[slots] += 1

    def _add(self, added: Sequence[SlotInit]) -> None:
        for entry in added:
            slot = entry.slot
            self._num_tokens[slot] = len(entry.token_ids)
            self._num_computed[slot] = entry.num_computed_tokens
            self._num_blocks[slot] = len(entry.block_ids)
            self._num_prompt[slot] = entry.num_prompt_tokens
            wanted = entry.params.prompt_logprobs
            self._num_prompt_logprobs[slot] = -1 if wanted is None else wanted
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

    def _metadata(
        self, slots: np.ndarray, counts: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> AttentionMetadata:
        several = np.flatnonzero(counts > 1)
        num_decodes = int(several[0]) if len(several) else len(slots)
        num_tokens, num_chunks = int(counts.sum()), len(slots) - num_decodes
        token_slots = np.repeat(slots, counts)
        offsets = np.cumsum(counts) - counts
        positions = np.arange(num_tokens) - np.repeat(offsets - starts, counts)
        query_start = np.append(offsets[num_decodes:], num_tokens) - num_decodes
        parts = (token_slots, positions, ends, slots[num_decodes:], query_start)
        packed = self._to_device(np.concatenate(parts).astype(np.int32))
        device_slots, device_positions, device_ends, chunk_slots, device_starts = packed.split([len(p) for p in parts])
        return AttentionMetadata(
            token_slots=device_slots,
            positions=device_positions,
            block_tables=self.block_tables,
            num_decodes=num_decodes,
            decode_seq_lens=device_ends[:num_decodes],
            max_decode_len=int(ends[:num_decodes].max(initial=0)),
            chunk_slots=chunk_slots,
            query_start=device_starts,
            chunk_seq_lens=device_ends[num_decodes:],
            max_query_len=int(counts[num_decodes:].max(initial=0)) if num_chunks else 0,
            max_chunk_len=int(ends[num_decodes:].max(initial=0)),
        )

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the current CUDA device, which need not be this rank's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _scatter(self, table: torch.Tensor, flat_indices: np.ndarray, values: np.ndarray) -> None:
        """table.view(-1)[flat_indices] = values, from the host, in two copies."""
        indices, new = self._to_device(np.stack((flat_indices, values))).unbind(0)
        table.view(-1)[indices] = new.to(table.dtype)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, started but not waited for; pinned when it comes from a GPU."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
