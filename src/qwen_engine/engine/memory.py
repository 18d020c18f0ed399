"""How many KV blocks an engine gets, and the errors when they are too few."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
CPU_KV_BYTES = 4 * GIB
"""Most KV memory a CPU engine takes by itself; pages are committed as they are used."""


def gpu_kv_bytes(*, free_bytes: int, total_bytes: int, step_bytes: int, utilization: float) -> int:
    """KV bytes of a GPU, measured once, after weights and tables exist: free - total * (1 - utilization) - step.

    What is free now, less the share of the card the user keeps for others, less what steps take on top: the activations
    of the largest one and the CUDA graphs (`ModelRunner.profile`).
    """
    return max(0, int(free_bytes - total_bytes * (1 - utilization) - step_bytes))


def cpu_kv_bytes(*, available_bytes: int, useful_bytes: int) -> int:
    """A quarter of the available memory, at most CPU_KV_BYTES and what all running requests can use.

    More would serve the prefix cache, as it does on a GPU; a CPU's memory has other users.
    """
    return min(CPU_KV_BYTES, available_bytes // 4, useful_bytes)


def available_host_bytes() -> int:
    """Memory this process can still take: MemAvailable where Linux tells, else all physical memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_weights_fit(weight_bytes: int, available_bytes: int, device: torch.device) -> None:
    """Raises ConfigError before anything is allocated if the weights alone are too large."""
    if weight_bytes > available_bytes:
        raise ConfigError(
            f"not enough memory on {device}: the weights need {_gib(weight_bytes)}, {_gib(available_bytes)} are free; "
            "use a smaller model or a device with more memory"
        )


def check_kv_cache_fits(kv_cache_bytes: int, available_bytes: int, device: torch.device) -> None:
    """Raises ConfigError before anything is allocated if a KV cache of the size asked for is too large."""
    if kv_cache_bytes > available_bytes:
        raise ConfigError(
            f"not enough memory on {device}: kv_cache_bytes is {kv_cache_bytes} ({_gib(kv_cache_bytes)}), "
            f"{_gib(available_bytes)} are free; lower it, or leave it out"
        )


def num_kv_blocks(*, kv_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Blocks that `kv_bytes` hold. Raises ConfigError if not even one fits."""
    block_bytes = bytes_per_token * block_size
    num_blocks = kv_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"not enough memory for the KV cache: one block of {block_size} tokens needs {block_bytes} bytes, "
            f"{kv_bytes} are left; raise gpu_memory_utilization or kv_cache_bytes, or use a smaller model"
        )
    return num_blocks


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
