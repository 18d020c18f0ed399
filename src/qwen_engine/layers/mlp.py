"""The gated feed-forward block: down(silu(gate(x)) · up(x))."""

from __future__ import annotations

import torch
from torch import nn

from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.layers.linear import GatedLinear, RowParallelLinear


class GatedMLP(nn.Module):
    """Gate and up are one packed matrix, gate first."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        tp: TPGroup,
        deterministic: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        local = intermediate_size // tp.size
        self.gate_up_proj = GatedLinear(hidden_size, 2 * local, deterministic=deterministic, dtype=dtype, device=device)
        self.down_proj = RowParallelLinear(
            local, hidden_size, tp=tp, deterministic=deterministic, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))
