"""Token embedding and output head, split over ranks by vocabulary rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from qwen_engine import kernels
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.layers.linear import parameter


class VocabParallelEmbedding(nn.Module):
    """Rows [rank * n, (rank + 1) * n) of the embedding, n = ceil(vocab_size / ranks); missing rows are padding."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tp: TPGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        rows = -(-vocab_size // tp.size)
        self.vocab_start = tp.rank * rows
        self.weight = parameter(rows, hidden_size, dtype=dtype, device=device)

    def forward(self, token_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embeds token_table[slot, position] for every token: int32 [tokens] twice → [tokens, hidden]."""
        rows = kernels.embed_tokens(token_table, slots, positions, self.weight, self.vocab_start)
        return self.tp.all_reduce(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab_size], the same on every rank."""
        return self.tp.all_gather_last_dim(F.linear(hidden, self.weight))[:, : self.vocab_size]
