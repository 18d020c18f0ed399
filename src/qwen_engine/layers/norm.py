"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467): x / sqrt(mean(x²) + eps) · weight, in fp32."""

from __future__ import annotations

import torch
from torch import nn

from qwen_engine import kernels
from qwen_engine.layers.linear import parameter


class RMSNorm(nn.Module):
    """Norm over the last dimension, alone or fused with the residual add that precedes it."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds `x` to `residual` in place and returns the norm of the sum."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)
