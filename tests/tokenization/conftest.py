"""Tokenizers for the text tests: a tiny byte-level one trained here, a word-level one, and the real Qwen3 one."""

from pathlib import Path

import pytest
import tokenizers
from tiny_models import CHAT_TEMPLATE, save_tokenizer, train_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from qwen_engine.tokenization.tokenizer import Tokenizer

SAMPLE = [
    "The quick brown fox says hello world, and the lazy dog answers: hello again!",
    "def stop(self, text: str) -> None:\n    return text[1:]  # 12345\n",
    "我能吞下玻璃而不伤身体。東京の空は青い。",
    "สวัสดีชาวโลก ฉันกินกระจกได้",
    "family 👨‍👩‍👧‍👦 flag 🇩🇪 thumbs 👍🏽 naïve café Ελλάδα привет",
]


def train_tiny() -> tokenizers.Tokenizer:
    return train_tokenizer(SAMPLE, vocab_size=340, marks=("<think>", "</think>", "é né"))


@pytest.fixture(scope="session")
def tiny_backend() -> tokenizers.Tokenizer:
    return train_tiny()


@pytest.fixture(scope="session")
def tiny(tiny_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(tiny_backend, {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path, train_tiny())
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
