"""The one schema of every measurement: built by `new_result`, written by `write_result`, read by `read_result`.

A result is a JSON object of the keys in `SCHEMA`. It is strict JSON (a figure that is not a finite number is null) and
appears under its name only when it is whole. Needs no torch, so that results can be read anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qwen_engine
from qwen_engine.errors import QwenEngineError, shown

if TYPE_CHECKING:
    from qwen_engine.llm import LLM

SCHEMA_VERSION = 1
STATUSES = ("completed", "failed", "interrupted")
LIBRARIES = ("torch", "triton", "transformers", "numpy")

_OBJECT_OR_NULL = (dict, type(None))
SCHEMA: dict[str, type | tuple[type, ...]] = {
    "schema_version": int,
    "name": str,
    "status": str,  # one of STATUSES
    "created": str,  # UTC, ISO 8601
    "command": str,
    "git_commit": (str, type(None)),  # with "-dirty" after it if the working tree had changes
    "engine_version": str,
    "libraries": dict,  # name -> version or null
    "device": dict,  # name, count, driver; each null where it is not known
    "engine_config": _OBJECT_OR_NULL,  # with everything "auto" decided; null if it is not known
    "model_config": _OBJECT_OR_NULL,
    "parameters": dict,  # of the benchmark: counts, lengths, seed of the prompts
    "memory": dict,  # gpus: one object a GPU (GPU_KEYS); host_peak_bytes; kv_cache_*
    "times_s": dict,  # name -> seconds of wall time
    "metrics": dict,  # flat name -> number or null
    "distributions": dict,  # name -> DISTRIBUTION_POINTS quantiles from 0 to 1
    "checks": list,  # name, passed, detail
    "notes": list,  # what a reader must know before quoting the figures
    "requests": list,  # one object a request
}
FACTS = ("device", "engine_config", "model_config", "memory")
"""What a result says of the engine, whatever was measured."""
GPU_KEYS = ("index", "name", "driver", "total_bytes", "used_bytes", "torch_peak_bytes")
DISTRIBUTION_POINTS = 101
SMI_TIMEOUT_S = 30.0


class ResultError(QwenEngineError):
    """A result file that cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that had to hold; `detail` says what was found, with numbers."""

    name: str
    passed: bool
    detail: str


def new_result(
    name: str,
    *,
    metrics: Mapping[str, float | None],
    checks: Sequence[Check] = (),
    requests: Sequence[Mapping[str, Any]] = (),
    parameters: Mapping[str, Any] | None = None,
    times_s: Mapping[str, float | None] | None = None,
    distributions: Mapping[str, Sequence[float]] | None = None,
    notes: Sequence[str] = (),
    llm: LLM | None = None,
    facts: Mapping[str, Any] | None = None,
    interrupted: bool = False,
) -> dict[str, Any]:
    """A result of now and of this process. With `llm`, the engine, model, device and memory are its own.

    facts: the same where the engine has ended or runs elsewhere, as `engine_facts` took them or as far as known.
    status: "interrupted" if so, else "failed" if a check did not pass, else "completed".
    """
    passed = all(check.passed for check in checks)
    return _strict(
        {
            "schema_version": SCHEMA_VERSION,
            "name": name,
            "status": "interrupted" if interrupted else "completed" if passed else "failed",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command_line(),
            "git_commit": git_commit(),
            "engine_version": qwen_engine.__version__,
            "libraries": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
            "parameters": dict(parameters or {}),
            **(engine_facts(llm) if facts is None else facts),
            "times_s": dict(times_s or {}),
            "metrics": dict(metrics),
            "distributions": {key: list(values) for key, values in (distributions or {}).items()},
            "checks": [dataclasses.asdict(check) for check in checks],
            "notes": list(notes),
            "requests": [dict(row) for row in requests],
        }
    )


def engine_facts(llm: LLM | None) -> dict[str, Any]:
    """FACTS of an engine; None: of this process alone."""
    return {
        "device": _device(llm),
        "engine_config": _engine_config(llm),
        "model_config": None if llm is None else dataclasses.asdict(llm.core.model_config),
        "memory": _memory(llm),
    }


def write_result(result: Mapping[str, Any], folder: Path) -> Path:
    """Writes `<date>-<gpu>-<model>-<name>.json` and returns its path; an earlier file of that name is kept."""
    text = json.dumps(_strict(result), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    validate(result, "the result")
    stem = file_stem(result)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path, number = folder / f"{stem}.json", 1
        while path.exists():
            number += 1
            path = folder / f"{stem}-{number}.json"
        write_atomically(path, text.encode())
    except OSError as error:
        raise ResultError(f"cannot write a result into {folder}: {error}") from None
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """The file is there as a whole or, if this fails at any point, as it was before."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_result(path: Path) -> dict[str, Any]:
    """Reads and validates a result. Raises ResultError in one line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ResultError(f"{path} is no JSON, so no result; results are the files that benchmarks write") from None
    validate(content, str(path))
    return content


def validate(content: Any, where: str) -> None:
    """Raises ResultError, naming `where`, if `content` does not follow the schema."""
    if not isinstance(content, dict) or "schema_version" not in content:
        raise ResultError(f"{where} is no result of a benchmark: it has no schema_version")
    if content["schema_version"] != SCHEMA_VERSION:
        raise ResultError(
            f"{where} has schema_version {shown(content['schema_version'])}; this program reads {SCHEMA_VERSION}"
        )
    for key, kinds in SCHEMA.items():
        if key not in content:
            raise ResultError(f"{where} has no {key!r}")
        if not isinstance(content[key], kinds) or isinstance(content[key], bool):
            raise ResultError(f"{where}: {key} is {shown(content[key])}")
    if content["status"] not in STATUSES:
        raise ResultError(f"{where}: status is {shown(content['status'])}; it must be one of {', '.join(STATUSES)}")
    for key, fits, wanted in _CONTENTS:
        items = content[key].items() if isinstance(content[key], dict) else enumerate(content[key])
        for name, value in items:
            if not fits(value):
                raise ResultError(f"{where}: {key}.{name} is {shown(value)}; it must be {wanted}")
    for key, fields in _FIELDS.items():
        for name, (fits, wanted) in fields.items() if content[key] is not None else ():
            if name not in content[key]:
                raise ResultError(f"{where}: {key} has no {name!r}")
            if not fits(content[key][name]):
                raise ResultError(f"{where}: {key}.{name} is {shown(content[key][name])}; it must be {wanted}")


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _is_number_or_null(value: object) -> bool:
    return value is None or _is_finite(value)


def _is_text_or_null(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_check(value: object) -> bool:
    keys = {field.name for field in dataclasses.fields(Check)}
    return (
        isinstance(value, dict)
        and set(value) == keys
        and isinstance(value["passed"], bool)
        and all(isinstance(value[key], str) for key in keys - {"passed"})
    )


def _is_gpu(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == set(GPU_KEYS)
        and all(_is_text_or_null(value[key]) for key in ("name", "driver"))
        and all(_is_number_or_null(value[key]) for key in GPU_KEYS if key not in ("name", "driver"))
    )


def _is_list(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


# What the objects and lists of SCHEMA hold, and those of their fields that must be there.
_CONTENTS: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("metrics", _is_number_or_null, "a number or null"),
    ("times_s", _is_number_or_null, "a number or null"),
    ("distributions", _is_list(_is_finite), "a list of numbers"),
    ("libraries", _is_text_or_null, "a version or null"),
    ("checks", _is_check, "an object of name, passed and detail"),
    ("notes", lambda value: isinstance(value, str), "a text"),
    ("requests", lambda value: isinstance(value, dict), "an object"),
)
_TEXT = (_is_text_or_null, "a text or null")
_NUMBER = (_is_number_or_null, "a number or null")
_FIELDS: dict[str, dict[str, tuple[Callable[[object], bool], str]]] = {
    "device": {"name": _TEXT, "count": _NUMBER, "driver": _TEXT},
    "memory": {"gpus": (_is_list(_is_gpu), "a list of objects of " + ", ".join(GPU_KEYS)), "host_peak_bytes": _NUMBER},
    "engine_config": {
        **dict.fromkeys(("model", "dtype", "load_format"), _TEXT),
        **dict.fromkeys(("tensor_parallel_size", "max_model_len"), _NUMBER),
    },
    "model_config": dict.fromkeys(("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"), _NUMBER),
}


def file_stem(result: Mapping[str, Any]) -> str:
    """`<date>-<gpu>-<model>-<name>`, in lower case and fit for any file system."""
    parts = (result["created"][:10], device_label(result), model_label(result), result["name"])
    return "-".join(_slug(part) for part in parts)


def model_label(result: Mapping[str, Any]) -> str:
    """Short name of the model: the last part of its folder or repository."""
    name = (result["engine_config"] or {}).get("model") or result["parameters"].get("model_id") or "model"
    return Path(str(name)).name


def device_label(result: Mapping[str, Any]) -> str:
    """Short name of what it ran on: "h200", "h200x2", "cpu"."""
    device = result["device"]
    label = _slug(re.sub(r"^(nvidia|amd) ", "", device["name"] or "unknown", flags=re.IGNORECASE))
    return f"{label}x{device['count']}" if label != "cpu" and (device["count"] or 1) > 1 else label


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


def check_writable(folder: Path) -> None:
    """Raises ResultError if no result can be written into `folder`, which is made: better known before a long run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ResultError(f"cannot write results into {folder}: {error}") from None


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


def _strict(value: Any) -> Any:
    """The same as plain JSON types; floats that are not finite become None. Raises TypeError for anything else."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "item"):  # a numpy scalar
        return _strict(value.item())
    raise TypeError(f"a result cannot hold {shown(value)} ({type(value).__name__})")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unknown"
