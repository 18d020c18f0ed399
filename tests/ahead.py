"""Engines on the CPU that behave like a GPU's (one step ahead, padded to the sizes of graphs), and what one holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen_engine import LLM
from qwen_engine.engine import executor, rank
from qwen_engine.engine.cuda_graphs import GraphSizes

SIZES = (3, 7, 16)
"""Few, so that most batches are padded; the largest is the engine's max_num_seqs."""
MIXED_SIZES = (16, 48)
"""Of steps with chunks of prompts; larger ones run at their own size."""
IN_WORKERS = ("qwen_engine.engine.rank", f"module.graph_sizes = lambda *_: module.GraphSizes({SIZES}, {MIXED_SIZES})")
"""The same in worker processes, for `fault_tools.plant`."""


def run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engines of this process run ahead and pad, from now on."""
    monkeypatch.setitem(executor.STEPS_IN_FLIGHT, "cpu", 2)
    monkeypatch.setattr(rank, "graph_sizes", lambda *_: GraphSizes(SIZES, MIXED_SIZES))


def poisoned(folder: Path | str, **options: Any) -> LLM:
    """An engine that runs ahead, with NaN wherever its KV cache has not been written."""
    llm = LLM(folder, device="cpu", max_num_seqs=SIZES[-1], **options)
    assert llm.core._executor.max_steps_in_flight == 2
    assert llm.core._executor.runner.decode.sizes == SIZES
    llm.core._executor.runner.kv_cache.fill_(float("nan"))
    return llm


def assert_idle(llm: LLM) -> None:
    """It has no request, and all its blocks are free."""
    scheduler = llm.core.scheduler
    scheduler.check()
    assert not scheduler.requests
    assert not llm._live
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks


def assert_nothing_in_flight(llm: LLM) -> None:
    assert not llm.core._in_flight
    assert not llm.core.scheduler._launched
