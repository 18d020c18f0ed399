"""A tiny random model with the demo's tokenizer, and one server that most tests of a module share."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # fault_tools

from browser import CHROMIUM
from scripted import ScriptedServer, scripted_server
from server_tools import Server, serve

DEMO = Path(__file__).parents[2] / "src" / "qwen_engine" / "demo"


collect_ignore = [] if CHROMIUM else ["test_page_in_a_browser.py"]
"""The chat page is tried in a browser where there is one; elsewhere `test_page.py` checks what can be read off it."""


@pytest.fixture(autouse=True)
def kept_logging() -> Iterator[None]:
    """A command line's log goes to the stderr of its test, which is gone afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, so any text comes out; long contexts, so that a request can take as long as a test needs."""
    folder = save_tiny_model(
        tmp_path_factory.mktemp("chat"),
        vocab_size=3072,
        max_position_embeddings=32768,
        eos_token_id=3049,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.9, "top_k": 50}')
    return folder


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[Server]:
    with serve(chat_model, "--max-model-len", "512", "--max-num-seqs", "64", "--served-model-name", "tiny") as server:
        yield server


@pytest.fixture(scope="session")
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server
