"""What every rank does before the first step: choose a device, load its shard, find out how much KV it can hold."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from qwen_engine import kernels
from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.distributed.peer_memory import NUM_SITES, PeerMemory, open_peer_memory
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine import memory
from qwen_engine.engine.cuda_graphs import GraphSizes, decode_sizes, mixed_sizes
from qwen_engine.engine.model_runner import ModelRunner
from qwen_engine.engine.torchrun import TorchrunRank
from qwen_engine.errors import ConfigError
from qwen_engine.models.qwen3 import Qwen3Model
from qwen_engine.models.weights import fill_dummy_weights, load_weights, sharding_table

logger = logging.getLogger(__name__)

PEER_TEST_TIMEOUT_S = 20.0
"""Of the first sums through peer memory; the ranks may still be compiling the kernel."""
LAUNCH_BOUND_FLOP = 6e11
"""What a GPU computes while the host launches a layer eagerly: 0.8 ms on an H200 and its host."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The engine's options with everything "auto" decided, as one rank sees them. Equal on all ranks but `device`."""

    config: EngineConfig
    model_folder: Path
    model_config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int

    @classmethod
    def resolve(
        cls, config: EngineConfig, model_folder: Path, model_config: ModelConfig, *, local_rank: int = 0
    ) -> RankSetup:
        """Raises ConfigError if the options do not fit the machine or the model."""
        size = config.tensor_parallel_size
        ranks = TorchrunRank.current()
        if ranks is not None and ranks.size != size:
            raise ConfigError(
                f"torchrun started {ranks.size} ranks, but tensor_parallel_size is {size}; make them equal"
            )
        device = resolve_device(config.device, local_rank=local_rank, num_ranks=size)
        sharding_table(model_config, TPGroup(0, size))  # raises if the model cannot be split so
        return cls(
            config=config,
            model_folder=model_folder,
            model_config=model_config,
            device=device,
            dtype=resolve_dtype(config.dtype, model_config, device),
            max_model_len=_max_model_len(config, model_config),
        )

    def begin_compiling(self) -> threading.Thread | None:
        """Loads the compiler of a GPU's kernels and compiles the one that takes longest, beside what a rank does first.
        None on a CPU."""
        if self.device.type != "cuda":
            return None
        thread = threading.Thread(target=self._compile_prefill)
        thread.start()
        return thread

    def _compile_prefill(self) -> None:
        model, config = self.model_config, self.config
        heads, kv_heads = (
            max(1, number // config.tensor_parallel_size) for number in (model.num_heads, model.num_kv_heads)
        )

        def prefill() -> None:
            here = {"dtype": self.dtype, "device": self.device}
            qkv = torch.empty(config.max_num_batched_tokens, heads + 2 * kv_heads, model.head_dim, **here)
            cache = torch.empty(2, 1, kv_heads, config.block_size, model.head_dim, **here)
            max_blocks = -(-self.max_model_len // config.block_size)
            tables, slots, starts = (
                torch.zeros(shape, dtype=torch.int32, device=self.device) for shape in ((1, max_blocks), 1, 2)
            )
            lengths = (len(qkv), self.max_model_len)
            kernels.prefill_attention(
                qkv[:, :heads],
                *cache,
                tables,
                slots,
                starts,
                slots,
                1.0,
                *lengths,
                deterministic=config.deterministic,
            )

        # What is wrong with the compiler is said by the next who needs it.
        with contextlib.suppress(Exception), torch.cuda.device(self.device):
            kernels.compile_launched(prefill, self.device)

    def with_peer_memory(self, tp: TPGroup, store: dist.Store) -> TPGroup:
        """The group with memory that its GPUs share, where all of them can. All ranks call it at once."""
        if self.device.type != "cuda" or tp.size == 1 or not self.config.enable_custom_all_reduce:
            return tp
        with torch.cuda.device(self.device):
            peers = open_peer_memory(store, rank=tp.rank, size=tp.size, device=self.device, self_test=try_peer_memory)
        return dataclasses.replace(tp, peers=peers)

    def load_runner(self, tp: TPGroup, check: Callable[[], None] | None = None) -> ModelRunner:
        """This rank's model with its weights, and empty slot tables; the KV cache comes later.

        check: called now and then; what it raises ends the loading.
        """
        config, model_config = self.config, self.model_config
        if self.device.type == "cpu" and config.tensor_parallel_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // config.tensor_parallel_size))
        table = sharding_table(model_config, tp)
        num_elements = sum(shard.length * math.prod(shard.shape) // shard.shape[shard.dim] for shard in table)
        available = _available_bytes(self.device)
        memory.check_weights_fit(num_elements * self.dtype.itemsize, available, self.device)
        model = Qwen3Model(
            model_config,
            tp=tp,
            max_model_len=self.max_model_len,
            deterministic=config.deterministic,
            dtype=self.dtype,
            device=self.device,
        )
        if config.load_format == "dummy":
            fill_dummy_weights(model, config.seed + tp.rank)
        else:
            load_weights(model, model_config, self.model_folder, tp, check=check)
        return ModelRunner(
            model,
            model_config,
            tp=tp,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            dtype=self.dtype,
            device=self.device,
            graph_sizes=graph_sizes(config, model_config, self.max_model_len, self.device),
            check_agreement=config.debug_checks and tp.size > 1,
        )

    def compile_kernels(self, runner: ModelRunner, begun: threading.Thread | None) -> None:
        """Compiles what `begin_compiling` has left. All ranks call it at once."""
        if begun is not None:
            begun.join()
            runner.compile_kernels(self.config.max_num_batched_tokens)

    def num_kv_blocks(self, runner: ModelRunner) -> int:
        """KV blocks this rank has room for. Raises ConfigError if there is none."""
        config = self.config
        bytes_per_token = self.model_config.kv_bytes_per_token(self.dtype.itemsize, config.tensor_parallel_size)
        kv_bytes = config.kv_cache_bytes
        if kv_bytes is not None:
            torch.cuda.empty_cache()  # what the allocator keeps for later is free, too
            memory.check_kv_cache_fits(kv_bytes, _available_bytes(self.device), self.device)
        elif self.device.type == "cuda":
            step_bytes = runner.profile(config.max_num_batched_tokens)
            torch.cuda.empty_cache()
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
            kv_bytes = memory.gpu_kv_bytes(
                free_bytes=free_bytes,
                total_bytes=total_bytes,
                step_bytes=step_bytes,
                utilization=config.gpu_memory_utilization,
            )
        else:
            useful_tokens = config.max_num_seqs * (self.max_model_len + config.block_size)
            kv_bytes = memory.cpu_kv_bytes(
                available_bytes=memory.available_host_bytes(), useful_bytes=useful_tokens * bytes_per_token
            )
        return memory.num_kv_blocks(kv_bytes=kv_bytes, bytes_per_token=bytes_per_token, block_size=config.block_size)


def try_peer_memory(peers: PeerMemory) -> None:
    """Sums what every rank can foretell. RuntimeError if it comes out wrong or does not come out."""
    device = peers.device
    parts = [
        torch.randn(8, 512, device=device, generator=torch.Generator(device).manual_seed(rank)).bfloat16()
        for rank in range(peers.size)
    ]
    expected = torch.zeros(8, 512, device=device)
    for part in parts:
        expected += part
    results = []
    for site in range(NUM_SITES):
        weight = torch.ones_like(parts[0][0])
        residual = torch.zeros_like(parts[0])
        kernels.push_add_rms_norm(parts[peers.rank][None], residual, weight, 1e-6, peers, site)
        results.append(residual)
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + PEER_TEST_TIMEOUT_S
    while not done.query():
        if time.monotonic() > deadline:
            peers.abort()
            done.synchronize()
            raise RuntimeError(f"no sum through peer memory within {PEER_TEST_TIMEOUT_S:g} s")
        time.sleep(0.001)
    if not all(torch.equal(residual, expected.bfloat16()) for residual in results):
        raise RuntimeError("a sum through peer memory is wrong")


def graph_sizes(config: EngineConfig, model: ModelConfig, max_model_len: int, device: torch.device) -> GraphSizes:
    """What steps are padded to and captured at.

    Mixed steps up to where a layer's products take a GPU as long as its launches take the host, or to the largest step
    there can be. They are padded without graphs too: a product of other sizes can differ in its last bit, and graphs
    change no token.
    """
    if device.type != "cuda":
        return GraphSizes()
    max_tokens = int(LAUNCH_BOUND_FLOP * config.tensor_parallel_size / (2 * model.layer_parameters))
    largest_step = min(config.max_num_batched_tokens, config.max_num_seqs * (max_model_len - 1))
    mixed = mixed_sizes(max_tokens, largest_step)
    return GraphSizes(() if config.enforce_eager else decode_sizes(config.max_num_seqs), mixed)


def resolve_device(name: str, *, local_rank: int = 0, num_ranks: int = 1) -> torch.device:
    """One of "auto", "cpu", "cuda" and "cuda:N" → a device that exists. Raises ConfigError.

    With several ranks on one host, rank r takes the r-th GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdigit())):
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but no CUDA GPU is available; use device='cpu'")
    if num_ranks > 1 and index:
        raise ConfigError(f"device is {name!r} with {num_ranks} ranks; use 'cuda', rank r takes GPU r")
    number = int(index) if index else local_rank
    if number >= torch.cuda.device_count():
        raise ConfigError(f"GPU {number} is needed, but this machine has {torch.cuda.device_count()} GPUs, from cuda:0")
    return torch.device("cuda", number)


def resolve_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype "auto" is the checkpoint's on a GPU; on a CPU it is float32, which is both faster and exact there."""
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
