"""Grouped-query attention over the paged KV cache, with per-head norms of Q and K before the rotary embedding.

A batch mixes decoding rows (one new token each, first in the batch) with chunks of prompts. Both read K and V from the
pages, where `qk_norm_rope_kv_write` has put the new tokens before attention runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from qwen_engine import kernels
from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from qwen_engine.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step lie. All tensors are int32 on the device.

        tokens   | d0 | d1 | ... | chunk 0 ......... | chunk 1 .... | padding |
                   decode rows     query_start[0]      query_start[1]

    token_slots, positions: [tokens], slot and position of each token; slot -1 is padding.
    block_tables: [max_num_seqs, max_blocks], by slot. decode_slots, decode_seq_lens: [decode rows], context with the
    new token; padding rows (slot -1) may lie where chunks do, so that their number can be fixed. num_decodes: [1], how
    many are no padding; None: all. chunk_slots, chunk_seq_lens: [chunks]; query_start: [chunks + 1].
    """

    token_slots: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    decode_slots: torch.Tensor
    decode_seq_lens: torch.Tensor
    num_decodes: torch.Tensor | None
    max_decode_len: int
    chunk_slots: torch.Tensor
    query_start: torch.Tensor
    chunk_seq_lens: torch.Tensor
    max_query_len: int
    max_chunk_len: int

    def plan(self, k_cache: torch.Tensor, num_heads: int, *, deterministic: bool) -> AttentionPlan:
        """k_cache: of any layer; num_heads: query heads of this rank."""
        splits: kernels.DecodeSplits = ()
        if len(self.decode_slots):
            splits = kernels.split_decodes(
                k_cache,
                self.block_tables,
                self.decode_slots,
                self.decode_seq_lens,
                self.max_decode_len,
                self.num_decodes,
                deterministic=deterministic,
            )
        tiles = None
        if self.max_query_len:
            tiles = kernels.chunk_tiles(
                k_cache,
                self.block_tables,
                self.chunk_slots,
                self.query_start,
                self.chunk_seq_lens,
                self.max_chunk_len,
                len(self.token_slots),
                num_heads,
                deterministic=deterministic,
            )
        return AttentionPlan(splits, tiles)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How kernels share out the rows of a step, which is the same in all layers; () and None for rows there are none
    of."""

    splits: kernels.DecodeSplits
    tiles: torch.Tensor | None


class Attention(nn.Module):
    """This rank's heads. K and V heads are copied to several ranks when there are more ranks than KV heads."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: TPGroup,
        rotary: torch.Tensor,
        deterministic: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._deterministic = deterministic
        self.num_heads = config.num_heads // tp.size
        self.num_kv_heads = max(1, config.num_kv_heads // tp.size)
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.rotary = rotary
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        bias = config.attention_bias
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, width, bias=bias, deterministic=deterministic, dtype=dtype, device=device
        )
        self.o_proj = RowParallelLinear(
            self.num_heads * self.head_dim,
            config.hidden_size,
            tp=tp,
            bias=bias,
            deterministic=deterministic,
            dtype=dtype,
            device=device,
        )
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(
        self,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        plan: AttentionPlan,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """hidden: [tokens, hidden]; plan: `metadata.plan`, the same for all layers; k_cache, v_cache: this layer's
        [num_blocks, num_kv_heads, block_size, head_dim]."""
        q = kernels.qk_norm_rope_kv_write(
            self.qkv_proj(hidden),
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
            self.rotary,
            metadata.token_slots,
            metadata.positions,
            metadata.block_tables,
            k_cache,
            v_cache,
            self.num_heads,
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rows = len(metadata.decode_slots)
        if rows:
            kernels.decode_attention(
                q[:rows],
                k_cache,
                v_cache,
                metadata.block_tables,
                metadata.decode_slots,
                metadata.decode_seq_lens,
                self.scale,
                plan.splits,
                out=out[:rows],
                deterministic=self._deterministic,
            )
        if metadata.max_query_len:  # after the decoding rows, whose padding may have overwritten outputs of chunks
            kernels.prefill_attention(
                q,
                k_cache,
                v_cache,
                metadata.block_tables,
                metadata.chunk_slots,
                metadata.query_start,
                metadata.chunk_seq_lens,
                self.scale,
                metadata.max_query_len,
                metadata.max_chunk_len,
                out=out,
                tiles=plan.tiles,
                deterministic=self._deterministic,
            )
        return self.o_proj(out.flatten(1))
