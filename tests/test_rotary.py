"""The rotary table against Transformers' own, in fp32, at every position of a long context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import TINY
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from qwen_engine.config import ModelConfig
from qwen_engine.errors import ConfigError
from qwen_engine.layers.rotary import rotary_table

NUM_POSITIONS = 131_072
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
BASE = {**TINY, "head_dim": 128, "rope_theta": 1_000_000.0, "max_position_embeddings": 40_960, "model_type": "qwen3"}
ROPES: dict[str, dict[str, Any]] = {
    "none": {"max_position_embeddings": NUM_POSITIONS},
    "theta 5e6": {"max_position_embeddings": NUM_POSITIONS, "rope_theta": 5_000_000.0},
    "yarn": {"rope_scaling": YARN},
    "factor 2.5": {"rope_scaling": {**YARN, "factor": 2.5}},
    "factor 1": {"rope_scaling": {**YARN, "factor": 1.0}},
    "attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.25}},
    "betas": {"rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
    "not truncated": {"rope_scaling": {**YARN, "truncate": False}},
    "ramp of no length": {"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}},
    "head_dim 64": {"rope_scaling": YARN, "head_dim": 64},
}


@pytest.mark.parametrize("name", ROPES)
def test_the_table_is_transformers_own_up_to_the_last_position(name: str):
    fields = {**BASE, **ROPES[name]}
    table = rotary_table(ModelConfig.from_dict(fields), NUM_POSITIONS, torch.device("cpu"))
    reference = Qwen3RotaryEmbedding(transformers.Qwen3Config(**fields))
    half = table.shape[1] // 2
    cos, sin = reference(torch.zeros(1), torch.arange(NUM_POSITIONS)[None])
    # Where frequencies round differently in their last bit, a far position makes a larger angle of it.
    for ours, theirs in ((table[:, :half], cos[0, :, :half]), (table[:, half:], sin[0, :, :half])):
        error = (ours - theirs).abs()
        assert error.max() < 1e-3
        assert error[-1].max() < 1e-3
    if name == "yarn":
        assert table[0, 0] == pytest.approx(0.1 * 1.3862944 + 1)


@pytest.mark.parametrize(
    "change", [{"factor": 4.1}, {"attention_factor": 1.0}, {"beta_slow": 2.0}, {"beta_fast": 16.0}]
)
def test_every_parameter_counts(change: dict[str, float]):
    tables = [
        rotary_table(ModelConfig.from_dict({**BASE, "rope_scaling": rope}), 40_000, torch.device("cpu"))
        for rope in (YARN, {**YARN, **change})
    ]
    assert (tables[0] - tables[1]).abs().max() > 0.01


@pytest.mark.parametrize("change", [{"mscale": 1.0, "mscale_all_dim": 1.0}, {"partial_rotary_factor": 0.5}])
def test_what_would_be_another_embedding_is_refused(change: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(change))):
        ModelConfig.from_dict({**BASE, "rope_scaling": {**YARN, **change}})
