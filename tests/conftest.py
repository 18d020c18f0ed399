"""Tiny random Qwen3 checkpoints, and Transformers on the same weights as the reference."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread only waits for the first

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before anything imports Triton

import transformers

TINY = {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "eos_token_id": 7,
    "bos_token_id": None,
    "torch_dtype": "float32",
}


def save_tiny_model(folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Writes a random Qwen3 checkpoint in fp32 and returns its folder."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**{**TINY, **overrides})
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out or swapped
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


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
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
            loaded[folder] = model.eval()
        return loaded[folder]

    return load


@torch.no_grad()
def greedy_tokens(
    model: transformers.Qwen3ForCausalLM, prompt: Sequence[int], continuation: Sequence[int]
) -> list[int]:
    """Transformers' greedy choice after the prompt and after each token of `continuation` but the last.

    Equal to `continuation` if and only if `continuation` is what Transformers itself would generate.
    """
    ids = torch.tensor([[*prompt, *continuation[:-1]]], device=model.device)
    return model(ids).logits[0, len(prompt) - 1 :].argmax(dim=-1).tolist()


def random_prompt(length: int, *, seed: int = 0, vocab_size: int = TINY["vocab_size"]) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 100_003 + length)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()
