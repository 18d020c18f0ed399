"""`benchmarks/profile_step.py`: every part of the model shows up, also for the nameless kernels of a graph."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from qwen_engine import kernels

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def profile_step(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import profile_step as module

    return module


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


EAGER = {
    "traceEvents": [
        event("user_annotation", "call:forward", 0, 100),
        event("user_annotation", "qkv", 10, 20),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, 1),
        event("kernel", "gemm", 50, 30, 1),
        event("user_annotation", "o", 40, 30),
        event("cuda_runtime", "cudaLaunchKernel", 42, 2, 2),
        event("kernel", "gemm", 80, 10, 2),
        event("user_annotation", "all-reduce", 50, 10),
        event("cuda_driver", "cuLaunchKernelEx", 55, 2, 3),
        event("kernel", "nccl", 90, 5, 3),
        event("cuda_runtime", "cudaMemcpyAsync", 200, 2, 4),
        event("gpu_memcpy", "copy", 210, 1, 4),
    ]
}


def test_kernels_belong_to_the_innermost_name_around_their_launch(profile_step):
    spans = profile_step.spans_of(EAGER)
    assert [(s.name, s.part, s.call) for s in spans] == [
        ("gemm", "qkv", 0),
        ("gemm", "o", 0),
        ("nccl", "all-reduce", 0),
        ("copy", "other", None),
    ]


def test_kernels_of_a_graph_get_the_parts_of_the_eager_ones_at_their_places(profile_step):
    replay = [event("cuda_runtime", "cudaGraphLaunch", 0, 5, 9), event("kernel", "gemm", 10, 20, 9)]
    replay += [event("kernel", "gemm", 32, 10, 9), event("kernel", "nccl", 42, 8, 9)]
    other = [event("cuda_runtime", "cudaGraphLaunch", 60, 5, 10), event("kernel", "nccl", 60, 4, 10)]
    other += [event("kernel", "new", 70, 10, 10)]
    spans = profile_step.spans_of({"traceEvents": replay + other})
    launches = profile_step.with_parts(spans, profile_step.spans_of(EAGER))
    assert [[s.part for s in launch] for launch in launches] == [["qkv", "o", "all-reduce"], ["all-reduce", "other"]]
    figures = profile_step.summary(launches, spans, num_steps=2)
    assert figures["qkv"] == 10
    assert figures["all-reduce"] == 6
    assert figures["gaps"] == (2 + 6) / 2
    assert figures["idle %"] == pytest.approx(100 * (2 + 10 + 6) / 70)
    assert figures["step"] == 35


def test_a_kernel_that_starts_early_counts_from_the_end_of_the_one_before(profile_step):
    replay = [event("cuda_runtime", "cudaGraphLaunch", 0, 5, 9), event("kernel", "gemm", 10, 20, 9)]
    replay += [event("kernel", "gemm", 12, 30, 9), event("kernel", "nccl", 45, 5, 9)]
    spans = profile_step.spans_of({"traceEvents": replay})
    launches = profile_step.with_parts(spans, profile_step.spans_of(EAGER))
    figures = profile_step.summary(launches, spans, num_steps=1)
    assert (figures["qkv"], figures["o"], figures["all-reduce"], figures["gaps"]) == (20, 12, 5, 3)


def test_the_demo_on_a_cpu_shows_every_part_and_leaves_no_trace(profile_step, monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    command = ["profile_step.py", "--device", "cpu", "--batch-sizes", "1,3", "--context", "20", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--prefill", "2x30", "--json", str(out)])
    before = kernels.rms_norm
    profile_step.main()
    assert kernels.rms_norm is before
    tables = json.loads(out.read_text())
    parts = {*profile_step.PARTS} - {"all-reduce", "other"}  # one rank
    for batch in ("1", "3"):
        figures = tables[f"batch {batch}, context 20"]["eager"]
        assert parts <= figures.keys()
        assert all(figures[part] > 0 for part in parts)
        assert 0 <= figures["idle %"] < 100
    figures = tables["prefill of 2 x 30"]["eager"]
    assert all(figures[part] > 0 for part in parts - {"lm_head", "sampling"})  # these come after the forward pass
    assert "batch 3, context 20" in capsys.readouterr().out
