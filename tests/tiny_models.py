"""Tiny random Qwen3 checkpoints, tokenizers and prompts for them, and Transformers' view of an output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

if TYPE_CHECKING:
    import transformers  # which takes seconds

TINY = {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "eos_token_id": 7,
    "bos_token_id": None,
    "torch_dtype": "float32",
}
BYTES_PER_BLOCK = 16 * 2 * 3 * 2 * 32 * 4
"""KV of 16 tokens: K and V, layers, KV heads, head_dim, fp32."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_model(folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Writes a random Qwen3 checkpoint in fp32 and returns its folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**TINY, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out or swapped
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def train_tokenizer(texts: Sequence[str], *, vocab_size: int = 330, marks: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Byte-level BPE with few merges: most characters outside ASCII take several tokens. marks: take one each."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return backend


def save_tokenizer(folder: Path, backend: tokenizers.Tokenizer) -> None:
    """With a chat template."""
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@torch.no_grad()
def greedy_tokens(
    model: transformers.Qwen3ForCausalLM, prompt: Sequence[int], continuation: Sequence[int]
) -> list[int]:
    """Transformers' greedy choice after the prompt and after each token of `continuation` but the last.

    Equal to `continuation` if and only if `continuation` is what Transformers itself would generate.
    """
    ids = torch.tensor([[*prompt, *continuation[:-1]]], device=model.device)
    return model(ids).logits[0, len(prompt) - 1 :].argmax(dim=-1).tolist()


def random_prompt(length: int, *, seed: int = 0, vocab_size: int = TINY["vocab_size"]) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 100_003 + length)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()
