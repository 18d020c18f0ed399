"""What `reference.py` computes, in shapes that do not depend on the batch: one row, one query token at a time.

Libraries choose how to sum by shape and alignment, so every row is copied to memory of its own first.
"""

import torch

from qwen_engine.kernels import reference
from qwen_engine.kernels.reference import add_rms_norm as add_rms_norm
from qwen_engine.kernels.reference import chunk_tiles as chunk_tiles
from qwen_engine.kernels.reference import split_decodes as split_decodes


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.cat([reference.linear(row.clone(), weight) for row in x.split(1)], out=out)


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([reference.gated_linear(row.clone(), weight) for row in x.split(1)])


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    splits: tuple[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    caches = (k_cache, v_cache, block_tables)
    for query, slot, seq_len, result in zip(q.split(1), slots.split(1), seq_lens.split(1), out.split(1)):
        reference.decode_attention(query.clone(), *caches, slot, seq_len, scale, splits, result)
    return out


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every query is a decoding row with as many keys as it may see."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    first, last = int(query_start[0]), int(query_start[-1])
    row = torch.repeat_interleave(torch.arange(len(slots)), query_start.diff())
    behind = query_start[row + 1] - 1 - torch.arange(first, last)
    lengths = torch.where(seq_lens[row] > 0, seq_lens[row] - behind, 0)
    queries, results = q[first:last], out[first:last]
    decode_attention(queries, k_cache, v_cache, block_tables, slots[row], lengths, scale, (max_seq_len,), results)
    return out
