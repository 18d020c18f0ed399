"""The engine's heart: one scheduler, one model, and the loop that moves requests forward.

Knows token ids only; text is the business of `output_processor`. Not thread-safe: one caller drives it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine import memory
from qwen_engine.engine.model_runner import ModelRunner
from qwen_engine.errors import ConfigError, EngineDeadError
from qwen_engine.models.qwen3 import Qwen3Model
from qwen_engine.models.weights import fill_dummy_weights, load_weights, sharding_table
from qwen_engine.request import PositionLogprobs, Request, RequestStatus
from qwen_engine.scheduling.block_manager import BlockManager
from qwen_engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step brought one request. The request's `finish_reason` tells whether it has ended.

    token_id: the token sampled, None for a step that only computed prompt tokens.
    prompt_logprobs: (index of the first prompt token covered, one entry per token).
    """

    request: Request
    token_id: int | None
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: tuple[int, list[PositionLogprobs]] | None = None


class EngineCore:
    """A model that generates. Construction loads the weights and sizes the KV cache."""

    def __init__(self, config: EngineConfig, model_folder: Path, model_config: ModelConfig) -> None:
        if config.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size is {config.tensor_parallel_size}; this version runs on one device: use 1"
            )
        start = time.perf_counter()
        self.config = config
        self.device = resolve_device(config.device)
        self.model_config = model_config
        self.dtype = resolve_dtype(config.dtype, self.model_config, self.device)
        self.max_model_len = _max_model_len(config, self.model_config)
        self._runner: ModelRunner | None = self._load_model(model_folder, TPGroup())
        num_blocks = self._size_kv_cache(self._runner)
        self._runner.allocate_kv_cache(num_blocks)
        self.scheduler = self._new_scheduler(num_blocks)
        logger.info(
            "ready in %.1f s: %s on %s, %s, KV cache of %d blocks (%d tokens)",
            time.perf_counter() - start,
            config.model,
            self.device,
            str(self.dtype).removeprefix("torch."),
            num_blocks,
            num_blocks * config.block_size,
        )

    @property
    def is_closed(self) -> bool:
        return self._runner is None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raises RequestError if the request can never be served, EngineDeadError after `close`."""
        if self._runner is None:
            raise EngineDeadError("the engine is closed; create a new one")
        self.scheduler.check_admissible(request)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it cannot be served, EngineDeadError after `close`."""
        if self._runner is None:
            raise EngineDeadError("the engine is closed; create a new one")
        self.scheduler.add(request)

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request early (an abort, or a stop string found in its text). Unknown ids are ignored."""
        self.scheduler.finish(request_id, reason, stop_reason)

    def step(self) -> list[TokenOutput]:
        """Runs one step and returns what it brought; empty when there is nothing to do."""
        if self._runner is None:
            raise EngineDeadError("the engine is closed; create a new one")
        try:
            plan = self.scheduler.schedule()
            if plan is None:
                return []
            owners = {request.slot: request for request in self.scheduler.running}
            result = self._runner.execute(plan).wait()
            sampled = self.scheduler.apply(plan.step, result.token_ids)
        except BaseException:
            self.reset()
            raise
        outputs = [
            TokenOutput(owners[slot], None, prompt_logprobs=part) for slot, part in result.prompt_logprobs.items()
        ]
        for row, request in enumerate(sampled):
            if request is not None:
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
        self.scheduler = self._new_scheduler(self.scheduler.block_manager.num_blocks)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self.scheduler.block_manager.reset_prefix_cache()

    def close(self) -> None:
        """Ends all requests and frees the device's memory. Safe to call twice."""
        if self._runner is None:
            return
        self.reset()
        self._runner = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

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
        )

    def _load_model(self, folder: Path, tp: TPGroup) -> ModelRunner:
        config, model_config = self.config, self.model_config
        num_elements = sum(
            shard.length * _product(shard.shape) // shard.shape[shard.dim] for shard in sharding_table(model_config, tp)
        )
        available = _available_bytes(self.device)
        memory.check_weights_fit(num_elements * memory.dtype_bytes(self.dtype), available, self.device)
        model = Qwen3Model(model_config, tp=tp, max_model_len=self.max_model_len, dtype=self.dtype, device=self.device)
        if config.load_format == "dummy":
            fill_dummy_weights(model, config.seed)
        else:
            load_weights(model, model_config, folder, tp)
        return ModelRunner(
            model,
            model_config,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            dtype=self.dtype,
            device=self.device,
        )

    def _size_kv_cache(self, runner: ModelRunner) -> int:
        config = self.config
        kv_bytes = config.kv_cache_bytes
        if kv_bytes is None and self.device.type == "cuda":
            activation_bytes = runner.profile(
                max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
            )
            torch.cuda.empty_cache()
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
            kv_bytes = memory.gpu_kv_bytes(
                free_bytes=free_bytes,
                total_bytes=total_bytes,
                activation_bytes=activation_bytes,
                utilization=config.gpu_memory_utilization,
            )
        elif kv_bytes is None:
            kv_bytes = memory.cpu_kv_bytes(memory.available_host_bytes())
        num_blocks = memory.num_kv_blocks(
            config,
            kv_bytes=kv_bytes,
            bytes_per_token=self.model_config.kv_bytes_per_token(memory.dtype_bytes(self.dtype)),
            max_model_len=self.max_model_len,
        )
        if num_blocks * config.block_size < self.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, less than max_model_len %d: longer requests are refused",
                num_blocks * config.block_size,
                self.max_model_len,
            )
        return num_blocks


def resolve_device(name: str) -> torch.device:
    """ "auto", "cpu", "cuda" or "cuda:N" → a device that exists. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdigit())):
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but no CUDA GPU is available; use device='cpu'")
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs, from cuda:0")
    return torch.device("cuda", number)


def resolve_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """ "auto" is the checkpoint's dtype on a GPU; on a CPU it is float32, which is both faster and exact there."""
    if name == "auto":
        name = model.dtype if device.type == "cuda" else "float32"
    return getattr(torch, name)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_context_tokens
    if config.max_model_len > model.max_context_tokens:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; this checkpoint's positions go up to {model.max_context_tokens} "
            "(longer contexts need YaRN rope_scaling in config.json)"
        )
    return config.max_model_len


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory.available_host_bytes()


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
