"""The environment of the suite, and fixtures for tiny checkpoints with Transformers as their reference."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread only waits for the first

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before anything imports Triton

from tiny_models import save_tiny_model

if TYPE_CHECKING:
    import transformers  # which takes seconds

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it

# The same examples every time, however long a busy machine takes over one. `--hypothesis-profile default` draws others.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Random tensors are the same whichever tests have run before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory of tiny checkpoints; equal arguments give the same folder."""
    made: dict[str, Path] = {}

    def make(**overrides: Any) -> Path:
        key = repr(sorted(overrides.items()))
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp("tiny"), **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model()


@pytest.fixture(scope="session")
def reference_model() -> Callable[[Path], transformers.Qwen3ForCausalLM]:
    """Transformers' own model of a folder, in fp32 on the CPU."""
    loaded: dict[Path, transformers.Qwen3ForCausalLM] = {}

    def load(folder: Path) -> transformers.Qwen3ForCausalLM:
        if folder not in loaded:
            from transformers import Qwen3ForCausalLM

            model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            loaded[folder] = model.eval()
        return loaded[folder]

    return load
