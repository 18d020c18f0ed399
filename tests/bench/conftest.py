"""One tiny engine for all benchmark tests, and small suites that it runs in a moment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_engine import LLM
from qwen_engine.bench.load import PromptSource
from qwen_engine.bench.results import new_result
from qwen_engine.bench.suites import SUITES, Suite

TINY_SCALE = 0.004


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, device="cpu", skip_tokenizer_init=True, kv_cache_bytes=2 << 20, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture
def source(llm: LLM) -> PromptSource:
    return PromptSource(llm.core.model_config.vocab_size)


@pytest.fixture
def suite() -> Suite:
    """Two requests, a few tokens each."""
    return SUITES["high-concurrency"].scaled(TINY_SCALE, block_size=16)


@pytest.fixture
def make_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an nvidia-smi that prints `content` in front of any other."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def make(content: str | bytes, *, exit_code: int = 0) -> None:
        answer = folder / "answer"
        answer.write_bytes(content.encode() if isinstance(content, str) else content)
        smi = folder / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\ncat {shlex.quote(str(answer))}\nexit {exit_code}\n")
        smi.chmod(0o755)

    return make


@pytest.fixture
def make_result() -> Callable[..., dict[str, Any]]:
    """Factory of complete results without an engine."""

    def make(metrics: dict[str, float | None], **changes: Any) -> dict[str, Any]:
        names = ("name", "checks", "interrupted", "notes", "parameters", "distributions", "requests")
        options = {name: changes.pop(name) for name in names if name in changes}
        return {**new_result(options.pop("name", "latency"), metrics=metrics, **options), **changes}

    return make
