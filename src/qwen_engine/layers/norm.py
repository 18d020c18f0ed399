"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467): x / sqrt(mean(x²) + eps) · weight, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class PendingSum:
    """What `SummedRMSNorm.start` began: parts [parts, tokens, size] that `finish` adds to the residual, after `wait`.

    is_summed: over the ranks; if not, `finish` does that too.
    """

    parts: torch.Tensor
    is_summed: bool
    wait: Callable[[], None] | None = None


class SummedRMSNorm(RMSNorm):
    """The norm behind a row-parallel layer: sum over ranks, residual add and norm, in one launch where there is peer
    memory. Such launches take the inboxes in turn (see peer_memory), so neighbours in the model differ in `site`; with
    None the sum goes through NCCL. Deterministic, both ways give the same bits.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        tp: TPGroup,
        site: int | None,
        deterministic: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(size, eps, dtype=dtype, device=device)
        self._deterministic = deterministic
        self._tp = tp
        self._site = site

    def forward(self, parts: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds the `parts` [parts, tokens, size] of all ranks to `residual` [tokens, size] in place and returns the
        norm of that."""
        return self.finish(self.start(parts), residual)

    def start(self, parts: torch.Tensor, *, beside: bool = False) -> PendingSum:
        """The first half of `forward`. With `beside`, NCCL sums on a stream of its own, beside what is launched until
        `finish`."""
        peers = self._tp.peers
        if self._tp.size == 1:
            return PendingSum(parts, is_summed=True)
        if peers is not None and self._site is not None and not beside and peers.fits(parts[0], self.weight.dtype):
            return PendingSum(parts, is_summed=False)
        part = parts[0] if len(parts) == 1 else parts.sum(dim=0).to(self.weight.dtype)
        if beside:
            wait = self._tp.start_all_reduce(part, in_rank_order=self._deterministic)
            return PendingSum(part[None], is_summed=True, wait=wait)
        return PendingSum(self._tp.all_reduce(part, in_rank_order=self._deterministic)[None], is_summed=True)

    def finish(self, pending: PendingSum, residual: torch.Tensor) -> torch.Tensor:
        """The second half."""
        if pending.wait is not None:
            pending.wait()
        inputs = (pending.parts, residual, self.weight, self.eps)
        if pending.is_summed:
            return kernels.add_rms_norm(*inputs, deterministic=self._deterministic)
        peers = self._tp.peers
        assert peers is not None
        assert self._site is not None
        self._tp.progress.enter_collective()
        return kernels.push_add_rms_norm(*inputs, peers, self._site, deterministic=self._deterministic)
