"""From a model's name to a local folder: the embedded demo, a folder, or a Hugging Face repository."""

from __future__ import annotations

import re
from pathlib import Path

from qwen_engine.errors import ConfigError, shown

DEMO_NAME = "demo"
DEMO_FOLDER = Path(__file__).parent.parent / "demo"
_CONFIG_FILES = ["config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]


def resolve_model(name: str, *, with_weights: bool = True) -> Path:
    """The local folder of `name`; downloads a repository's needed files once. Raises ConfigError in one line."""
    if name == DEMO_NAME:
        return DEMO_FOLDER
    try:
        folder = Path(name).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError):  # a name no file can have, or the home of an unknown user
        raise ConfigError(f"{shown(name)} cannot be a model's folder") from None
    if is_folder:
        return folder
    if exists:
        raise ConfigError(f"{name} is a file; a model is a folder with config.json and *.safetensors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "/", "~")):
        raise ConfigError(f"no folder {name}; give a model folder, a repository like Qwen/Qwen3-0.6B, or 'demo'")
    return _download(name, _CONFIG_FILES + (_WEIGHT_FILES if with_weights else []))


def _download(repository: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except LocalEntryNotFoundError:
        reason = "it is not in the local cache and the Hugging Face hub cannot be reached"
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
    raise ConfigError(f"cannot download {repository}: {reason}; check the name, or give a local folder")
