"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467): x / sqrt(mean(x²) + eps) · weight, in fp32."""

from __future__ import annotations

import torch
from torch import nn

from qwen_engine import kernels
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.layers.linear import parameter


class RMSNorm(nn.Module):
    """Norm over the last dimension."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class SummedRMSNorm(RMSNorm):
    """The norm behind a row-parallel layer: sum over ranks, residual add and norm, in one launch where there is peer
    memory. Such launches take the inboxes in turn (see peer_memory), so neighbours in the model differ in `site`; with
    None the sum goes through NCCL.
    """

    def __init__(
        self, size: int, eps: float, *, tp: TPGroup, site: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(size, eps, dtype=dtype, device=device)
        self._tp = tp
        self._site = site

    def forward(self, parts: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds the `parts` [parts, tokens, size] of all ranks to `residual` [tokens, size] in place and returns the
        norm of that."""
        peers = self._tp.peers
        if self._tp.size == 1:
            return kernels.add_rms_norm(parts, residual, self.weight, self.eps)
        if peers is None or self._site is None or not peers.fits(residual):
            part = parts[0] if len(parts) == 1 else parts.sum(dim=0).to(residual.dtype)
            return kernels.add_rms_norm(self._tp.all_reduce(part)[None], residual, self.weight, self.eps)
        self._tp.progress.enter_collective()
        return kernels.push_add_rms_norm(parts, residual, self.weight, self.eps, peers, self._site)
