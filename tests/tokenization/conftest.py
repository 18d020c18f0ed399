"""Tokenizers for the text tests: a tiny byte-level one trained here, a word-level one, and the real Qwen3 one."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from qwen_engine.tokenization.tokenizer import Tokenizer

SAMPLE = [
    "The quick brown fox says hello world, and the lazy dog answers: hello again!",
    "def stop(self, text: str) -> None:\n    return text[1:]  # 12345\n",
    "我能吞下玻璃而不伤身体。東京の空は青い。",
    "สวัสดีชาวโลก ฉันกินกระจกได้",
    "family 👨‍👩‍👧‍👦 flag 🇩🇪 thumbs 👍🏽 naïve café Ελλάδα привет",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tiny() -> tokenizers.Tokenizer:
    """Byte-level BPE with few merges, so that most characters outside ASCII take several tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SAMPLE, trainer)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>", "é né")])
    return backend


@pytest.fixture(scope="session")
def tiny_backend() -> tokenizers.Tokenizer:
    return train_tiny()


@pytest.fixture(scope="session")
def tiny(tiny_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(tiny_backend, {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    train_tiny().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": CHAT_TEMPLATE})
    )
    return tmp_path


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    """Word-level: no byte alphabet, decoding joins words with spaces."""
    vocab = {word: id_ for id_, word in enumerate(["[UNK]", "[EOS]", "hello", "big", "world", "stop", "here"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[EOS]"])
    return Tokenizer(backend, {"eos_token": "[EOS]"})


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """SentencePiece-like: spaces as U+2581 and unknown characters as one token per byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁w", "orld", "a"]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def qwen_folder() -> Path:
    for parent in Path(__file__).resolve().parents:
        folder = parent / "shared" / "tokenizer"
        if (folder / "tokenizer.json").is_file():
            return folder
    pytest.skip("the Qwen3 tokenizer is not here (shared/tokenizer beside a parent folder)")


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(qwen_folder)


@pytest.fixture(scope="session")
def qwen_backend(qwen_folder: Path) -> tokenizers.Tokenizer:
    """The library's own decoder, the reference for ours."""
    return tokenizers.Tokenizer.from_file(str(qwen_folder / "tokenizer.json"))
