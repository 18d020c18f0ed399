"""Result files: one schema, strict JSON, whole or not there at all, and readers that say what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_results import ENGINE

from qwen_engine import LLM
from qwen_engine.bench import facts
from qwen_engine.bench.facts import SmiGpu, command_line, query_gpus
from qwen_engine.bench.results import (
    SCHEMA,
    Check,
    ResultError,
    check_writable,
    device_label,
    new_result,
    read_result,
    write_atomically,
    write_result,
)

_TEXT = st.text('a"\\\n\u2028模', max_size=5)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=12,
)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} in strict JSON")


def test_a_result_comes_back_as_it_was_written(tmp_path: Path, make_result: Callable[..., dict[str, Any]]):
    result = make_result({"decode_tok_s": 12.5, "preemptions": 0}, checks=[Check("pool whole", True, "8 of 8")])
    path = write_result(result, tmp_path)
    assert set(result) == set(SCHEMA)
    assert read_result(path) == result
    assert result["status"] == "completed"
    assert path.name == f"{result['created'][:10]}-cpu-model-latency.json"


@given(st.dictionaries(_TEXT, st.floats() | st.none(), max_size=6), _VALUES)
def test_ben_07_whatever_the_figures_are_the_file_is_strict_json(metrics, value):
    result = new_result("latency", metrics=metrics, parameters={"value": value}, requests=[{"value": value}])
    text = json.dumps(result, allow_nan=False)
    back = json.loads(text, parse_constant=_refuse)
    for name, figure in metrics.items():
        expected = figure if figure is not None and math.isfinite(figure) else None
        assert back["metrics"][name] == expected


def test_numpy_scalars_become_numbers_and_other_objects_are_refused():
    result = new_result("latency", metrics={"a_s": np.float32(0.5), "b_s": np.float64("nan"), "c": np.int64(3)})
    assert result["metrics"] == {"a_s": 0.5, "b_s": None, "c": 3}
    with pytest.raises(TypeError, match="object"):
        new_result("latency", metrics={}, parameters={"what": object()})


def test_a_failed_check_and_an_interrupt_show_in_the_status():
    failed = [Check("pool whole", False, "7 of 8")]
    assert new_result("x", metrics={}, checks=failed)["status"] == "failed"
    assert new_result("x", metrics={}, checks=failed, interrupted=True)["status"] == "interrupted"


@pytest.fixture
def on_two_gpus(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the engine believe that it runs on GPUs "bb" and "dd"."""
    monkeypatch.setattr(llm, "config", dataclasses.replace(llm.config, tensor_parallel_size=2))
    monkeypatch.setattr(llm.core, "setup", dataclasses.replace(llm.core.setup, device=torch.device("cuda", 0)))
    gpus = [SimpleNamespace(uuid=uuid, name="NVIDIA H200", total_memory=150 << 30) for uuid in ("bb", "dd")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 7)


@pytest.mark.usefixtures("on_two_gpus")
def test_each_gpu_of_the_engine_is_named_with_the_memory_that_nvidia_smi_tells(
    llm: LLM, tmp_path: Path, make_nvidia_smi: Callable[..., None]
):
    rows = [
        "0, GPU-cc, 580.1, 143771, 3, NVIDIA H200",
        "1, GPU-bb, 580.1, 143771, 132000, NVIDIA H200",
        "2, GPU-aa, [N/A]",
    ]
    make_nvidia_smi("\n".join(rows) + "\n")
    result = new_result("latency", metrics={}, llm=llm)
    assert result["device"] == {"name": "NVIDIA H200", "count": 2, "driver": "580.1"}
    first, second = result["memory"]["gpus"]
    assert (first["used_bytes"], first["torch_peak_bytes"]) == (132_000 << 20, 7)
    assert (second["used_bytes"], second["driver"], second["total_bytes"]) == (None, None, 150 << 30)
    assert "-h200x2-" in write_result(result, tmp_path).name


@pytest.mark.parametrize(
    ("answer", "exit_code"),
    [
        ("", 0),
        ("No devices were found\n", 6),
        ("0, GPU-bb, 580.1, 143771, 132000, NVIDIA H200\n", 9),
        ("Failed to initialize NVML: Driver/library version mismatch\n", 0),
        ("0, GPU-bb\n", 0),
        (b"\xff\xfe, \xc3\x28, x, y, z, w\n", 0),
    ],
)
@pytest.mark.usefixtures("on_two_gpus")
def test_a_result_is_written_whatever_nvidia_smi_says(
    answer: str | bytes, exit_code: int, llm: LLM, tmp_path: Path, make_nvidia_smi: Callable[..., None]
):
    make_nvidia_smi(answer, exit_code=exit_code)
    result = new_result("latency", metrics={}, llm=llm)
    assert [gpu["used_bytes"] for gpu in result["memory"]["gpus"]] == [None, None]
    assert result["device"] == {"name": "NVIDIA H200", "count": 2, "driver": None}
    assert read_result(write_result(result, tmp_path)) == result


@pytest.mark.usefixtures("on_two_gpus")
def test_a_result_is_written_without_nvidia_smi_and_without_uuids(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_gpus() == []
    nameless = SimpleNamespace(name="NVIDIA H200", total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: nameless)
    result = new_result("latency", metrics={}, llm=llm)
    assert read_result(write_result(result, tmp_path)) == result


def test_an_nvidia_smi_that_hangs_is_given_up(make_nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    make_nvidia_smi("0, GPU-bb, 580.1, 1, 1, NVIDIA H200\n")
    assert len(query_gpus()) == 1
    monkeypatch.setattr(facts, "SMI_TIMEOUT_S", 0.0)
    assert query_gpus() == []


def test_odd_rows_of_nvidia_smi_are_read_as_far_as_they_go(make_nvidia_smi: Callable[..., None]):
    make_nvidia_smi(
        "0, GPU-a, 580.1, 1000, 10, Vendor, Inc. Card, 80 GB\r\n"
        "1, MIG-b/1/0, [N/A], [Insufficient Permissions], [N/A], [Unknown Error]\n"
        "one, GPU-c, 580.1, 1000, 10, not a row\n\n"
    )
    assert query_gpus() == [
        SmiGpu(0, "a", "Vendor, Inc. Card, 80 GB", "580.1", 1000 << 20, 10 << 20),
        SmiGpu(1, "MIG-b/1/0", None, None, None, None),
    ]


@pytest.mark.parametrize(
    ("name", "count", "label"),
    [
        ("NVIDIA H200", 1, "h200"),
        ("NVIDIA H200", 2, "h200x2"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 1, "a100-sxm4-80gb-mig-1g.10gb"),
        ("AMD Instinct/MI300X", None, "instinct-mi300x"),
        ("../../etc/passwd", 1, "etc-passwd"),
        ("显卡", 1, "unknown"),
        (None, None, "unknown"),
        ("CPU", 64, "cpu"),
    ],
)
def test_a_device_of_any_name_gives_a_file_name(
    name: str | None, count: int | None, label: str, tmp_path: Path, make_result: Callable[..., dict[str, Any]]
):
    result = make_result({}, device={"name": name, "count": count, "driver": None})
    assert device_label(result) == label
    assert write_result(result, tmp_path).parent == tmp_path


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/x/qwen_engine/__main__.py", "bench", "latency"], "python -m qwen_engine bench latency"),
        (["benchmarks/stress.py", "--model", "my model"], "python benchmarks/stress.py --model 'my model'"),
        (["/x/bin/qwen-engine", "bench"], "qwen-engine bench"),
    ],
)
def test_the_command_is_what_a_user_would_type(argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert command_line() == command


def test_results_are_compared_without_torch(tmp_path: Path, make_result: Callable[..., dict[str, Any]]):
    path = str(write_result(make_result({}), tmp_path))
    code = f"""import sys
from qwen_engine import cli
code = cli.main(["results", "compare", {path!r}, {path!r}])
sys.exit(code or "torch" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=120).returncode == 0


def test_an_earlier_result_of_the_day_is_kept(tmp_path: Path, make_result: Callable[..., dict[str, Any]]):
    paths = [write_result(make_result({"total_s": float(number)}), tmp_path) for number in range(3)]
    assert [read_result(path)["metrics"]["total_s"] for path in paths] == [0.0, 1.0, 2.0]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "result.json"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    for step in ("fsync", "replace"):
        monkeypatch.setattr(os, step, fail)
        with pytest.raises(OSError, match="disk full"):
            write_atomically(path, b"new")
        monkeypatch.undo()
        assert path.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_folder_that_cannot_be_written_is_known_before_the_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="cannot write"):
        check_writable(tmp_path / "file" / "results")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 99}, "schema_version 99"),
        ({"metrics": None}, "metrics"),
        ({"metrics": {"total_s": "fast"}}, "total_s"),
        ({"metrics": {"total_s": True}}, "total_s"),
        ({"status": "splendid"}, "splendid"),
        ({"metrics": {"total_s": 10**400}}, "total_s"),
        ({"checks": [{"name": "pool whole"}]}, "checks.0"),
        ({"checks": [{"name": "pool whole", "passed": 1, "detail": ""}]}, "checks.0"),
        ({"checks": [{"name": "pool whole", "passed": True, "detail": None}]}, "checks.0"),
        ({"requests": [3]}, "requests.0"),
        ({"notes": [3]}, "notes.0"),
        ({"libraries": {"torch": 2}}, "libraries.torch"),
        ({"distributions": {"ttft_s": [1, None]}}, "distributions.ttft_s"),
        ({"distributions": {"ttft_s": 1}}, "distributions.ttft_s"),
        ({"device": {"name": "CPU", "count": 2}}, "device has no 'driver'"),
        ({"device": {"name": 3, "count": 2, "driver": None}}, "device.name"),
        ({"memory": {"host_peak_bytes": 1}}, "memory has no 'gpus'"),
        ({"memory": {"host_peak_bytes": 1, "gpus": [{"used_bytes": 1}]}}, "memory.gpus"),
        ({"engine_config": {"model": "demo"}}, "engine_config has no 'dtype'"),
        ({"engine_config": {**ENGINE, "tensor_parallel_size": "2"}}, "engine_config.tensor_parallel_size"),
        ({"model_config": {}}, "model_config has no 'num_layers'"),
    ],
)
def test_a_file_that_breaks_the_schema_is_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path, make_result: Callable[..., dict[str, Any]]
):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps({**make_result({}), **change}))
    with pytest.raises(ResultError, match=words) as caught:
        read_result(path)
    assert "broken.json" in str(caught.value)


@pytest.mark.parametrize("key", list(SCHEMA))
def test_a_missing_key_is_refused(key: str, tmp_path: Path, make_result: Callable[..., dict[str, Any]]):
    result = make_result({})
    del result[key]
    (tmp_path / "short.json").write_text(json.dumps(result))
    with pytest.raises(ResultError, match=key):
        read_result(tmp_path / "short.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": NaN}', "[" * 100_000])
def test_what_is_no_result_at_all_is_one_error(text: str, tmp_path: Path):
    (tmp_path / "none.json").write_text(text)
    with pytest.raises(ResultError, match=r"none\.json"):
        read_result(tmp_path / "none.json")


def test_every_committed_result_follows_the_schema():
    paths = list((Path(__file__).parents[2] / "results").glob("*.json"))
    assert paths
    for path in paths:
        assert read_result(path)["status"] in ("completed", "failed", "interrupted")


def test_a_copy_is_told_its_commit(tmp_path, monkeypatch):
    find = facts.git_commit.__wrapped__
    monkeypatch.setattr(facts.qwen_engine, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.delenv("QWEN_ENGINE_GIT_COMMIT", raising=False)
    assert find() is None
    monkeypatch.setenv("QWEN_ENGINE_GIT_COMMIT", "0123abc")
    assert find() == "0123abc"
