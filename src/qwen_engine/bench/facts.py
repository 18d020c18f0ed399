"""What a result says of the run: the engine, the machine and its GPUs, the command, the commit and the libraries."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import resource
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qwen_engine

if TYPE_CHECKING:
    from qwen_engine.llm import LLM

LIBRARIES = ("torch", "triton", "transformers", "numpy")
FACTS = ("device", "engine_config", "model_config", "memory")
"""What a result says of the engine, whatever was measured."""
GPU_KEYS = ("index", "name", "driver", "total_bytes", "used_bytes", "torch_peak_bytes")
SMI_TIMEOUT_S = 30.0


def engine_facts(llm: LLM | None) -> dict[str, Any]:
    """FACTS of an engine; None: of this process alone."""
    return {
        "device": _device(llm),
        "engine_config": _engine_config(llm),
        "model_config": None if llm is None else dataclasses.asdict(llm.core.model_config),
        "memory": _memory(llm),
    }


def command_line() -> str:
    """The command of this process as a user would type it again."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        words = ["python", "-m", program.parent.name]
    elif program.suffix != ".py":  # an installed command
        words = [program.name]
    else:
        words = ["python", os.path.relpath(program) if program.is_absolute() else str(program)]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        words[:1] = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
    return shlex.join([*words, *sys.argv[1:]])


@functools.cache
def git_commit() -> str | None:
    """The commit this package was loaded from: what QWEN_ENGINE_GIT_COMMIT says, else what git says; None: unknown."""
    if told := os.environ.get("QWEN_ENGINE_GIT_COMMIT"):
        return told
    source = Path(qwen_engine.__file__)

    def git(*args: str) -> str:
        command = ["git", "-C", str(source.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", source.name)
        dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return None


def library_versions() -> dict[str, str | None]:
    """Python's own among them; None for what is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}


def _engine_config(llm: LLM | None) -> dict[str, Any] | None:
    if llm is None:
        return None
    setup = llm.core.setup
    decided = {
        "dtype": str(setup.dtype).removeprefix("torch."),
        "device": str(setup.device),
        "max_model_len": setup.max_model_len,
    }
    return {**dataclasses.asdict(llm.config), **decided}


def _device(llm: LLM | None) -> dict[str, Any]:
    if llm is not None and llm.core.setup.device.type == "cuda":
        gpus = _gpus(llm)
        first = gpus[0] if gpus else {}
        return {"name": first.get("name"), "count": llm.config.tensor_parallel_size, "driver": first.get("driver")}
    cpu_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"name": "CPU", "count": cpu_count, "driver": None}


def _memory(llm: LLM | None) -> dict[str, Any]:
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    memory: dict[str, Any] = {
        "gpus": [],
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }
    if llm is None:
        return memory
    core = llm.core
    manager = core.scheduler.block_manager
    kv_tokens = manager.num_blocks * manager.block_size
    dtype_bytes = core.setup.dtype.itemsize
    memory["kv_cache_tokens"] = kv_tokens
    memory["kv_cache_bytes_per_rank"] = kv_tokens * core.model_config.kv_bytes_per_token(
        dtype_bytes, llm.config.tensor_parallel_size
    )
    memory["gpus"] = _gpus(llm)
    return memory


def _gpus(llm: LLM) -> list[dict[str, Any]]:
    """One object for each GPU of this host that the engine uses.

    nvidia-smi tells of them all without a context on each, which would take memory itself.
    """
    if llm.core.setup.device.type != "cuda":
        return []
    import torch

    known = {gpu.uuid: gpu for gpu in query_gpus()}
    size, first = llm.config.tensor_parallel_size, llm.core.setup.device.index or 0
    gpus = []
    for index in range(first, min(first + size, torch.cuda.device_count())):
        properties = torch.cuda.get_device_properties(index)
        gpu = known.get(str(getattr(properties, "uuid", "")).removeprefix("GPU-"))
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "driver": None if gpu is None else gpu.driver,
                "total_bytes": properties.total_memory,
                "used_bytes": None if gpu is None else gpu.used_bytes,
                "torch_peak_bytes": torch.cuda.max_memory_allocated(index) if index == first else None,
            }
        )
    return gpus


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """A GPU of this host as nvidia-smi tells of it; None where it does not."""

    index: int
    uuid: str
    name: str | None
    driver: str | None
    total_bytes: int | None
    used_bytes: int | None


def query_gpus() -> list[SmiGpu]:
    """Every GPU of this host; none if there is no nvidia-smi, or it fails, or it speaks otherwise than expected."""
    query = "index,uuid,driver_version,memory.total,memory.used,name"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in done.stdout.decode(errors="replace").splitlines():
        # The name comes last, because it may hold commas.
        cells = [cell.strip() for cell in line.split(",", maxsplit=5)]
        if len(cells) == 6 and cells[0].isdecimal():
            index, uuid, driver, total_mib, used_mib, name = cells
            gpus.append(
                SmiGpu(
                    int(index),
                    uuid.removeprefix("GPU-"),
                    _known(name),
                    _known(driver),
                    _mib(total_mib),
                    _mib(used_mib),
                )
            )
    return gpus


def _known(cell: str) -> str | None:
    return None if not cell or cell.startswith("[") else cell  # "[N/A]", "[Not Supported]"


def _mib(cell: str) -> int | None:
    return int(cell) << 20 if cell.isdecimal() else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
