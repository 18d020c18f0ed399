"""One tiny engine for all benchmark tests, and small suites that it runs in a moment."""

from __future__ import annotations

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
def make_result() -> Callable[..., dict[str, Any]]:
    """Factory of complete results without an engine."""

    def make(metrics: dict[str, float | None], **changes: Any) -> dict[str, Any]:
        options = {name: changes.pop(name) for name in ("name", "checks", "interrupted") if name in changes}
        return {**new_result(options.pop("name", "latency"), metrics=metrics, **options), **changes}

    return make
