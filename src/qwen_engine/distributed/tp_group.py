"""The tensor-parallel group: which rank this is, and the collectives the layers need.

Passed to layers and loader explicitly; there is no global group, so two engines can live in one process. A group of one
rank does nothing and needs no torch.distributed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class TPGroup:
    """Rank `rank` of `size`. `process_group` is the torch.distributed group behind it, None for a single rank."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] on each rank → [..., size * n], in rank order, on every rank."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=-1)
