"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) as a table, with YaRN (arXiv:2309.00071)."""

from __future__ import annotations

import math

import torch

from qwen_engine.config import ModelConfig, YarnScaling


def rotary_table(config: ModelConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """fp32 [num_positions, head_dim]: cos of every frequency in the first half, sin in the second."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scale = 1.0
    if config.yarn is not None:
        frequencies = _yarn_frequencies(frequencies, config.yarn, config.rope_theta)
        scale = config.yarn.attention_factor
        if scale is None:
            scale = 0.1 * math.log(config.yarn.factor) + 1.0
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)


def _yarn_frequencies(frequencies: torch.Tensor, yarn: YarnScaling, theta: float) -> torch.Tensor:
    """Section 3.2 of the paper: keep high frequencies, divide low ones by the factor, a linear ramp between.

    The ramp runs between the dimensions that turn beta_fast and beta_slow times within the original context.
    """
    dim = 2 * len(frequencies)

    def dimension_of(num_rotations: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)
