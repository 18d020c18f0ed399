"""The one schema of every measurement: built by `new_result`, written by `write_result`, read by `read_result`.

A result is a JSON object of the keys in `SCHEMA`. It is strict JSON (a figure that is not a finite number is null) and
appears under its name only when it is whole. Needs no torch, so that results can be read anywhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qwen_engine
from qwen_engine.bench.facts import GPU_KEYS, command_line, engine_facts, git_commit, library_versions
from qwen_engine.checks import is_number
from qwen_engine.errors import QwenEngineError, shown

if TYPE_CHECKING:
    from qwen_engine.llm import LLM

SCHEMA_VERSION = 1
STATUSES = ("completed", "failed", "interrupted")

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
DISTRIBUTION_POINTS = 101


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
            "libraries": library_versions(),
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
        return is_number(value) and math.isfinite(value)
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


def check_writable(folder: Path) -> None:
    """Raises ResultError if no result can be written into `folder`, which is made: better known before a long run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ResultError(f"cannot write results into {folder}: {error}") from None


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


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unknown"
