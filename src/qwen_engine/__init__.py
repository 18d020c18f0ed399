"""qwen-engine: a serving engine for the Qwen3 models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen_engine.config import EngineConfig
from qwen_engine.request import RequestOutput, SamplingParams, StructuredOutputs

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
