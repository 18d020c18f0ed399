"""Linear layers that know how to be sharded: by output columns, or by input rows, whose outputs are parts of a sum."""

from __future__ import annotations

import torch
from torch import nn

from qwen_engine import kernels
from qwen_engine.distributed.tp_group import TPGroup


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter; the loader fills every one of them."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class ColumnParallelLinear(nn.Module):
    """[tokens, in] → [tokens, out]: this rank's rows of the weight, `out_features` of them, several matrices packed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        deterministic: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._deterministic = deterministic
        self.weight = parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = kernels.linear(x, self.weight, deterministic=self._deterministic)
        return out if self.bias is None else out + self.bias


class GatedLinear(ColumnParallelLinear):
    """[tokens, in] → [tokens, out / 2]: silu of the first half of the outputs times the second half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.gated_linear(x, self.weight, deterministic=self._deterministic)


class RowParallelLinear(nn.Module):
    """[tokens, in / ranks] → [parts, tokens, out]: this rank's columns of the weight.

    The norm that follows, `SummedRMSNorm`, adds the parts of all ranks. The bias goes into that of rank 0.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: TPGroup,
        bias: bool = False,
        deterministic: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._deterministic = deterministic
        self.weight = parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None
        self._adds_bias = bias and tp.rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._adds_bias:
            return (kernels.linear(x, self.weight, deterministic=self._deterministic) + self.bias)[None]
        return kernels.linear_parts(x, self.weight, deterministic=self._deterministic)
