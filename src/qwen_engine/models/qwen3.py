"""The dense Qwen3 model: pre-norm decoder layers of grouped-query attention with Q/K norms and a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qwen_engine.config import ModelConfig
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.layers.attention import Attention, AttentionMetadata
from qwen_engine.layers.embedding import VocabParallelEmbedding
from qwen_engine.layers.mlp import GatedMLP
from qwen_engine.layers.norm import SummedRMSNorm
from qwen_engine.layers.rotary import rotary_table


class DecoderLayer(nn.Module):
    """What a layer is made of; `Qwen3Model.forward` runs it. options: what all its parts take, `tp` and so on."""

    def __init__(self, config: ModelConfig, *, rotary: torch.Tensor, **options: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = SummedRMSNorm(size, eps, site=0, **options)
        self.self_attn = Attention(config, rotary=rotary, **options)
        self.post_attention_layernorm = SummedRMSNorm(size, eps, site=1, **options)
        self.mlp = GatedMLP(size, config.intermediate_size, **options)


class Qwen3Model(nn.Module):
    """Holds this rank's shard. Parameters are uninitialised until `weights.load_weights` or `fill_dummy_weights`.

    deterministic: a token's hidden state and logits have the same bits whatever else a step computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: TPGroup,
        max_model_len: int,
        deterministic: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self._deterministic = deterministic
        rotary = rotary_table(config, max_model_len, device)
        options = {"tp": tp, "deterministic": deterministic, "dtype": dtype, "device": device}
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **options)
        self.layers = nn.ModuleList(DecoderLayer(config, rotary=rotary, **options) for _ in range(config.num_layers))
        self.norm = SummedRMSNorm(config.hidden_size, config.rms_norm_eps, site=None, **options)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else VocabParallelEmbedding(config.vocab_size, config.hidden_size, **options)
        )

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside, `forward` stops behind the second layer, having launched all that the whole model does."""
        layers = self.layers
        self.layers = layers[:2]
        try:
            yield
        finally:
            self.layers = layers

    def forward(
        self, token_table: torch.Tensor, batches: Sequence[AttentionMetadata], kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """The hidden states [tokens, hidden] of a step, behind the final norm: what `lm_head` makes logits of.

        token_table: int32 [max_num_seqs, max_model_len], the tokens of every slot.
        batches: the step's tokens in order, in one part or in several that take turns layer by layer: while the ranks
        sum what one has computed, the next computes. A later one may attend to tokens of an earlier one.
        kv_cache: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim].
        """
        beside = len(batches) > 1
        num_heads = self.layers[0].self_attn.num_heads
        plans = [part.plan(kv_cache[0, 0], num_heads, deterministic=self._deterministic) for part in batches]
        residuals, sums = [], []
        for metadata in batches:
            parts = self.embed_tokens(token_table, metadata.token_slots, metadata.positions)[None]
            residuals.append(torch.zeros_like(parts[0]))
            sums.append(self.layers[0].input_layernorm.start(parts, beside=beside))
        next_norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        for layer, next_norm, (k_cache, v_cache) in zip(self.layers, next_norms, kv_cache.unbind(0)):
            for index, metadata in enumerate(batches):
                hidden = layer.input_layernorm.finish(sums[index], residuals[index])
                parts = layer.self_attn(hidden, metadata, plans[index], k_cache, v_cache)
                sums[index] = layer.post_attention_layernorm.start(parts, beside=beside)
            for index in range(len(batches)):
                hidden = layer.post_attention_layernorm.finish(sums[index], residuals[index])
                sums[index] = next_norm.start(layer.mlp(hidden), beside=beside)
        outputs = [self.norm.finish(*pair) for pair in zip(sums, residuals)]
        return torch.cat(outputs) if beside else outputs[0]
