"""The engine's heart: one scheduler, one model, and the loop that moves requests forward.

Runs as many steps ahead as the executor allows: while the device computes step N, step N+1 is planned and launched.
What a step brings to a request that ended meanwhile is dropped, and an engine without requests has no step in flight.
Knows token ids only; text is the business of `frontend`. Not thread-safe: one caller drives it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.engine import constraints
from qwen_engine.engine.executor import Executor, LaunchedStep
from qwen_engine.engine.rank import RankSetup
from qwen_engine.engine.torchrun import TorchrunRank
from qwen_engine.engine.worker import join
from qwen_engine.errors import EngineDeadError, RequestError
from qwen_engine.outputs import PositionLogprobs
from qwen_engine.request import Request, RequestStatus
from qwen_engine.scheduling.block_manager import BlockManager
from qwen_engine.scheduling.scheduler import Scheduler

ATTENTION_SPEED = 0.6
"""Of late chunks, beside that of matrix products; from before their keys were split (`benchmarks/interruption.py`)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step brought one request: a `SequenceOutput` that looks its state up in the request itself."""

    request: Request
    token_id: int | None
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: tuple[int, list[PositionLogprobs]] | None = None

    @property
    def sequence_id(self) -> str:
        return self.request.request_id

    @property
    def finish_reason(self) -> str | None:
        return self.request.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.request.stop_reason

    @property
    def num_cached_tokens(self) -> int:
        return self.request.num_cached_tokens

    @property
    def num_preemptions(self) -> int:
        return self.request.num_preemptions

    @property
    def scheduled_time(self) -> float:
        return self.request.scheduled_time


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """owners: by slot at the launch, the requests that ask for prompt logprobs."""

    step: int
    launched: LaunchedStep
    owners: dict[int, Request]


class EngineCore:
    """A model that generates. Construction loads the weights and sizes the KV cache."""

    def __init__(self, config: EngineConfig, model_folder: Path, model_config: ModelConfig) -> None:
        start = time.perf_counter()
        self.config = config
        self.model_config = model_config
        ranks = TorchrunRank.current()
        self.setup = RankSetup.resolve(
            config, model_folder, model_config, local_rank=0 if ranks is None else ranks.local_rank
        )
        if ranks is not None and ranks.rank > 0:
            # Started by torchrun as a rank that does not drive: this process belongs to the engine until it ends.
            join(self.setup, ranks)
            sys.exit(0)
        self._in_flight: deque[_StepInFlight] = deque()  # oldest first
        self._executor: Executor | None = Executor(self.setup)
        num_blocks = self._executor.num_kv_blocks
        if num_blocks * config.block_size < self.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, less than max_model_len %d: longer requests are refused",
                num_blocks * config.block_size,
                self.max_model_len,
            )
        self.scheduler = self._new_scheduler(num_blocks)
        logger.info(
            "ready in %.1f s (%s): %s on %s, %s, KV cache of %d blocks (%d tokens)",
            time.perf_counter() - start,
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._executor.phases_s.items()),
            config.model,
            self.setup.device,
            str(self.setup.dtype).removeprefix("torch."),
            num_blocks,
            num_blocks * config.block_size,
        )

    @property
    def is_closed(self) -> bool:
        return self._executor is None

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt + output."""
        return self.setup.max_model_len

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check_ranks(self) -> None:
        """Raises EngineDeadError once the engine is closed or one of its ranks has died, without running a step."""
        self._open_executor().check()

    def check(self, request: Request) -> None:
        """Raises RequestError if the request can never be served, EngineDeadError after `close`."""
        self._open_executor()
        self.scheduler.check_admissible(request)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it cannot be served, EngineDeadError after `close`."""
        self._open_executor()
        if request.params.structured_outputs is not None and request.constraint is None:
            raise RequestError("structured_outputs was not compiled for this request", param="structured_outputs")
        self.scheduler.add(request)

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request early (an abort, or a stop string found in its text). Unknown ids are ignored."""
        self.scheduler.finish(request_id, reason, stop_reason)
        self._drop_useless_steps()

    def step(self) -> list[TokenOutput]:
        """Launches what can be launched, waits for the oldest step in flight and returns what it brought.

        Empty when there is nothing to do.
        """
        executor = self._open_executor()
        try:
            while len(self._in_flight) < executor.max_steps_in_flight and self._launch_next(executor):
                pass
            if not self._in_flight:
                return []
            oldest = self._in_flight.popleft()
            result = executor.wait(oldest.launched)
            sampled = self.scheduler.apply(oldest.step, result.token_ids)
            self._drop_useless_steps()
        except BaseException:
            self.reset()
            raise
        outputs = [
            TokenOutput(oldest.owners[slot], None, prompt_logprobs=part)
            for slot, part in result.prompt_logprobs.items()
        ]
        for row, request in enumerate(sampled):
            if request is not None:
                if constraints.take_token(request, result.token_ids[row]) is not None:
                    self.scheduler.fail(request)
                    self._drop_useless_steps()
                logprobs = result.logprobs[row] if result.logprobs else None
                outputs.append(TokenOutput(request, result.token_ids[row], logprobs))
        return outputs

    def reset(self) -> None:
        """Aborts all requests and starts over with an empty scheduler.

        For what ends in the middle (an interrupt, a device error): its outcome is unknown, so nothing of it is kept.
        """
        for request in self.scheduler.requests.values():
            request.status = RequestStatus.FINISHED
            request.finish_reason = "abort"
        self._forget_steps()
        self.scheduler = self._new_scheduler(self.scheduler.block_manager.num_blocks)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self.scheduler.block_manager.reset_prefix_cache()

    def close(self) -> None:
        """Ends all requests and frees the device's memory. Safe to call twice."""
        if self._executor is None:
            return
        self.reset()
        self._executor.close()
        self._executor = None

    def _open_executor(self) -> Executor:
        if self._executor is None:
            raise EngineDeadError("the engine is closed; create a new one")
        return self._executor

    def _launch_next(self, executor: Executor) -> bool:
        """Plans and launches a step; False when no request can move before a step in flight is applied."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        owners: dict[int, Request] = {}
        if self.scheduler.num_with_prompt_logprobs:
            owners = {r.slot: r for r in self.scheduler.running if r.params.prompt_logprobs is not None}
        masks = constraints.masks_of(self.scheduler.sampling_requests)
        self._in_flight.append(_StepInFlight(plan.step, executor.launch(plan, masks), owners))
        return True

    def _drop_useless_steps(self) -> None:
        """Without live requests, what is in flight concerns nobody: its rows had ended when it was launched ahead."""
        if self._in_flight and not self.scheduler.has_work:
            self._forget_steps()
            self.scheduler.drop_launched()

    def _forget_steps(self) -> None:
        self._in_flight.clear()
        if self._executor is not None:
            self._executor.forget_steps()

    def _new_scheduler(self, num_blocks: int) -> Scheduler:
        config = self.config
        return Scheduler(
            BlockManager(num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            policy=config.scheduling_policy,
            max_num_waiting=config.max_num_waiting,
            max_late_chunk_tokens=config.max_late_chunk_tokens,
            context_cost=1 / (ATTENTION_SPEED * self.model_config.balanced_context_tokens),
        )
