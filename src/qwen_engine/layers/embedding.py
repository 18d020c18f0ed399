"""Token embedding and output head, split over ranks by vocabulary rows."""

from __future__ import annotations

import torch
from torch import nn

from qwen_engine import kernels
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.layers.linear import parameter


class VocabParallelEmbedding(nn.Module):
    """Rows [rank * n, (rank + 1) * n) of the embedding, n = ceil(vocab_size / ranks); missing rows are padding."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: TPGroup,
        deterministic: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tp = tp
        self._deterministic = deterministic
        self.vocab_size = vocab_size
        rows = -(-vocab_size // tp.size)
        self.vocab_start = tp.rank * rows
        self.weight = parameter(rows, hidden_size, dtype=dtype, device=device)

    def forward(self, token_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embeds token_table[slot, position] for every token: int32 [tokens] twice → [tokens, hidden], this rank's part
        of the sum over ranks."""
        return kernels.embed_tokens(token_table, slots, positions, self.weight, self.vocab_start)

    @property
    def num_tokens(self) -> int:
        """Rows of this shard that are tokens, not padding."""
        return max(0, min(self.weight.shape[0], self.vocab_size - self.vocab_start))

    def logits_shard(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, hidden] → [rows, n], this rank's columns, padding included; into `out` where given."""
        return kernels.linear(hidden, self.weight, out, deterministic=self._deterministic)

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """The shards [rows, n] of all ranks → [rows, vocab_size], the same on every rank."""
        return self.tp.all_gather_last_dim(shard)[:, : self.vocab_size]
