"""qwen-engine: a serving engine for the Qwen3 models."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Threads of torch that wait for work in a loop take the cores from other processes and ranks: two engines on two cores
# would run at a tenth of the speed. Heard only before torch is loaded; what the user sets stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from qwen_engine.config import EngineConfig
from qwen_engine.outputs import RequestOutput
from qwen_engine.request import SamplingParams
from qwen_engine.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from qwen_engine.llm import LLM

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "StructuredOutputs"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # LLM brings torch; those who only want parameters or --help do not wait for it.
    if name == "LLM":
        from qwen_engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
