"""One rank's share of a step: forward pass and sampling over the slot tables.

A step in which every row decodes one token goes to `DecodeStep`; of any other, `MixedStep` computes the hidden
states and the tokens are chosen here, eagerly, over the same tables.
Sampled tokens are written into the token table on the device and feed the next step from there; their values reach the
host later, through `StepResult`. Steps run in the order they are given.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qwen_engine import kernels
from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine.cuda_graphs import CudaGraphs, GraphSizes, Part
from qwen_engine.engine.decode_step import DecodeStep
from qwen_engine.engine.mixed_step import MAX_CHUNKS, MixedStep
from qwen_engine.engine.slot_tables import SlotTables
from qwen_engine.engine.token_sampler import TokenSampler
from qwen_engine.errors import QwenEngineError
from qwen_engine.layers.sampler import TokenMasks, TopLogprobs, top_logprobs
from qwen_engine.models.qwen3 import Qwen3Model
from qwen_engine.outputs import PositionLogprobs
from qwen_engine.request import SamplingParams
from qwen_engine.scheduling.block_manager import block_table
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

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

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
        """One map per row: the top tokens by rank, then the chosen token if it is not among them."""
        entries = []
        columns = zip(self._num_top, *(tensor.tolist() for tensor in self._tensors))
        for num_top, token_id, logprob, rank, ids, values in columns:
            ids, values = ids[:num_top], values[:num_top]
            ranks = [*range(1, len(ids) + 1)]
            if token_id in ids:
                ranks[ids.index(token_id)] = rank  # of equals all have the same, that of the first
            else:
                ids.append(token_id)
                values.append(logprob)
                ranks.append(rank)
            entries.append(PositionLogprobs(tuple(ids), tuple(values), tuple(ranks)))
        return entries


class ModelRunner:
    """Owns the model, the KV cache and the slot tables of one rank.

    graph_sizes: what steps are padded to and, on a GPU, captured at; without sizes they run eagerly, at their own.
    """

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
        graph_sizes: GraphSizes,
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
        self.tables = SlotTables(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=config.vocab_size,
            device=device,
        )
        self.sampler = TokenSampler(model.lm_head, self.tables, tp)
        self.decode = DecodeStep(
            model,
            self.tables,
            self.sampler,
            sizes=graph_sizes.decode,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            dtype=dtype,
        )
        self.mixed = MixedStep(
            model,
            self.tables,
            sizes=graph_sizes.mixed,
            max_num_seqs=max_num_seqs,
            tp_size=tp.size,
            dtype=dtype,
        )
        self.kv_cache: torch.Tensor | None = None

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
        self._set_kv_cache(torch.empty(shape, dtype=self.dtype, device=self.device))

    @torch.inference_mode()
    def compile_kernels(self, max_num_batched_tokens: int) -> None:
        """Compiles what steps launch, which the first of them would else do kernel by kernel (CUDA only)."""
        with self._on_device(), self._one_block(), self.model.shortened():
            kernels.compile_launched(lambda: self._launch_all(max_num_batched_tokens), self.device)

    def profile(self, max_num_batched_tokens: int) -> int:
        """Bytes that steps take beyond what is allocated now (CUDA only).

        The peak of the largest eager step, plus the graphs, which keep memory of their own (`CudaGraphs.measure`).
        """
        with self._one_block():
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            with self.model.shortened():
                self.execute(self._trial_step(len(self.tables.known_tokens), max_num_batched_tokens))
            torch.cuda.synchronize(self.device)
            activation_bytes = torch.cuda.max_memory_allocated(self.device) - before
            return activation_bytes + self._graph_bytes()

    @contextmanager
    def _one_block(self) -> Iterator[None]:
        """A KV cache of one block, for steps whose results nobody wants; the slots are empty again afterwards."""
        self.allocate_kv_cache(num_blocks=1)
        yield
        self.tables.known_tokens[:] = 0
        self._set_kv_cache(None)

    def _launch_all(self, max_num_batched_tokens: int) -> None:
        max_num_seqs = len(self.tables.known_tokens)
        few, many = min(4, max_num_seqs), min(MAX_CHUNKS + 1, max_num_seqs)
        # What runs eagerly: many tokens in many prompts or few, fewer tokens, many short prompts, behind a context too.
        for step in (
            self._trial_step(max_num_seqs, max_num_batched_tokens),
            self._trial_step(few, max_num_batched_tokens, top_p=1.0),
            self._trial_step(few, min(2000, max_num_batched_tokens)),
            self._trial_step(many, min(10 * many, max_num_batched_tokens)),
            self._trial_step(many, min(10 * many, max_num_batched_tokens), context=1024),
        ):
            self._execute(step, None)
        parts = self._parts_to_capture()
        if not self.decode.sizes:  # then decode steps are eager, and not padded
            parts.append((self.decode.calls, range(1, max_num_seqs + 1)))
        for calls, sizes in parts:
            # Kernels are chosen anew at powers of two. What another size should want besides, its warm-up compiles.
            for size in (size for size in sizes if size.bit_count() == 1 or size == sizes[-1]):
                for call in calls.values():
                    call(size)

    def _trial_step(self, num_seqs: int, num_tokens: int, *, context: int = 0, top_p: float = 0.9) -> StepPlan:
        """So many tokens of so many prompts behind a context, and all that sampling may have to do eagerly; no filter
        with top_p 1."""
        num_seqs = min(num_seqs, num_tokens)
        length = min(num_tokens // num_seqs, self.max_model_len - 1)
        context = min(context, self.max_model_len - 1 - length)
        params = SamplingParams(temperature=1.0, top_p=top_p, repetition_penalty=1.1, min_tokens=1, logprobs=1)
        added = [
            SlotInit(
                slot=slot,
                first_token=context,
                token_ids=array("i", [0]) * length,
                num_prompt_tokens=context + length,
                num_computed_tokens=context,
                prefix=None,
                block_ids=block_table([0] * -(-(context + length) // self.block_size)),
                params=params,
                seed=0,
                stop_ids=(0,),
                bad_word_ids=(),
            )
            for slot in range(num_seqs)
        ]
        slots = list(range(num_seqs))
        return StepPlan(step=0, slots=slots, num_tokens=[length] * num_seqs, added=added)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures steps of every size, where the engine is to have graphs; the KV cache exists."""
        if not self._captures:
            return
        with self._on_device():
            graphs = CudaGraphs(self.device, self.model.shortened)
            graphs.capture(*self._parts_to_capture())
            self.decode.graphs = self.mixed.graphs = graphs

    def release_graphs(self) -> None:
        """Frees the graphs: a communicator that they use cannot end before them. No step can follow."""
        self.decode.graphs = self.mixed.graphs = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult | None:
        """Launches a step. Nothing here waits for the device. None on all ranks but the first.

        masks: of the sampling rows that are constrained; only the first rank has them.
        """
        with self._on_device():
            return self._execute(plan, masks)

    def _execute(self, plan: StepPlan, masks: TokenMasks | None) -> StepResult | None:
        tables = self.tables
        tables.apply(plan)
        slots = np.array(plan.slots, dtype=np.int64)
        counts = np.array(plan.num_tokens, dtype=np.int64)
        known = tables.known_tokens[slots]
        if not known.all():
            raise QwenEngineError(f"step {plan.step} computes a slot of {plan.slots} that holds no request")
        assert self.kv_cache is not None
        starts = tables.computed_tokens[slots]
        ends = starts + counts
        samples = ends == known
        sampled_slots = slots[samples]
        prompt_logprobs: dict[int, tuple[int, list[_HostLogprobs]]] = {}
        if samples.all() and (counts == 1).all():
            tables.apply_sampling(plan)
            token_ids, logits = self.decode.run(plan.slots, masks)
        else:
            hidden = self.mixed.run(slots, counts, starts, ends)
            tables.apply_sampling(plan)  # here, because the GPU is already busy
            last = np.cumsum(counts) - 1
            prompt_logprobs = self._prompt_logprobs(hidden, slots, starts, ends, first=last - counts + 1)
            token_ids, logits = self._choose(hidden, last[samples], sampled_slots, masks)
        logprobs = self._sampled_logprobs(token_ids, logits, sampled_slots)
        if self.check_agreement:
            self._check_agreement(plan, starts, token_ids)
        tables.computed(slots, ends, sampled_slots)
        return None if self.tp.rank else StepResult(token_ids, logprobs, prompt_logprobs)

    def _check_agreement(self, plan: StepPlan, starts: np.ndarray, token_ids: torch.Tensor) -> None:
        """Raises QwenEngineError if the ranks differ in the rows they computed or the tokens they hold."""
        seen = (plan.step, plan.slots, plan.num_tokens, starts.tolist(), token_ids.tolist())
        digest = torch.tensor([zlib.crc32(repr(seen).encode())], device=self.device)
        digests = self.tp.all_gather_last_dim(digest).tolist()
        if len(set(digests)) > 1:
            raise QwenEngineError(f"ranks disagree about step {plan.step}: digests of rows and tokens are {digests}")

    def _choose(
        self, hidden: torch.Tensor, rows: np.ndarray, slots: np.ndarray, masks: TokenMasks | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Chooses the next token of `slots` from the hidden states at `rows`: (ids, this rank's logits)."""
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        if not len(rows):
            return token_ids, None
        device_rows, device_slots = self.tables.to_device(np.stack((rows, slots))).unbind(0)
        logits = self.model.lm_head.logits_shard(hidden[device_rows])
        choice = self.sampler.on_device(slots)
        if choice is not None:
            self.sampler.choose_on_device(choice, logits, device_slots.int(), token_ids)
        else:
            self.sampler.choose(logits, device_slots.int(), slots, token_ids, masks)
        return token_ids, logits

    def _sampled_logprobs(
        self, token_ids: torch.Tensor, logits: torch.Tensor | None, slots: np.ndarray
    ) -> tuple[np.ndarray, _HostLogprobs] | None:
        """Log-probabilities of the chosen tokens, for the rows that ask for them; logits: this rank's columns."""
        asked = self.tables.sampling.logprob_rows(slots)
        if not len(asked) or logits is None:
            return None
        if len(asked) < len(slots):
            device_asked = self.tables.to_device(asked)
            logits, token_ids = logits[device_asked], token_ids[device_asked]
        whole = self.model.lm_head.gather(logits)
        if self.tp.rank:
            return None  # only there to give its part of the logits
        num_top = self.tables.sampling.num_logprobs(slots[asked])
        return asked, _HostLogprobs(token_ids, top_logprobs(whole, token_ids, max(num_top)), num_top)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, *, first: np.ndarray
    ) -> dict[int, tuple[int, list[_HostLogprobs]]]:
        """Log-probabilities of the prompt tokens that follow each computed one, for the rows that ask for them.

        Position p predicts the token at p + 1; `first` is the row of the hidden states where each plan row starts.
        """
        results: dict[int, tuple[int, list[_HostLogprobs]]] = {}
        for row in np.flatnonzero(self.tables.prompt_logprobs[slots] >= 0):
            slot, start = int(slots[row]), int(starts[row])
            stop = min(int(ends[row]), int(self.tables.prompt_tokens[slot]) - 1)
            num_top = int(self.tables.prompt_logprobs[slot])
            parts = []
            for low in range(start, stop, PROMPT_LOGPROB_ROWS):
                high = min(low + PROMPT_LOGPROB_ROWS, stop)
                offset = int(first[row]) - start
                rows = slice(offset + low, offset + high)
                logits = self.model.lm_head.gather(self.model.lm_head.logits_shard(hidden[rows]))
                if self.tp.rank:
                    continue  # only there to give its part of the logits
                token_ids = self.tables.token_table[slot, low + 1 : high + 1].to(torch.int64)
                values = top_logprobs(logits, token_ids, num_top)
                parts.append(_HostLogprobs(token_ids, values, [num_top] * (high - low)))
            if parts:
                results[slot] = (start + 1, parts)
        return results

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the current CUDA device, which need not be this rank's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _set_kv_cache(self, kv_cache: torch.Tensor | None) -> None:
        self.kv_cache = self.decode.kv_cache = self.mixed.kv_cache = kv_cache

    @property
    def _captures(self) -> bool:
        return bool(self.decode.sizes) and self.device.type == "cuda"

    def _parts_to_capture(self) -> list[Part]:
        """The steps that take most memory come first."""
        self.mixed.clear()
        self.decode.clear()
        return [*self.mixed.parts, *self.decode.parts]

    @torch.inference_mode()
    def _graph_bytes(self) -> int:
        if not self._captures:
            return 0
        with self._on_device():
            return CudaGraphs(self.device, self.model.shortened).measure(*self._parts_to_capture())


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, started but not waited for; in pinned memory, which is reused, when it comes from a GPU."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
