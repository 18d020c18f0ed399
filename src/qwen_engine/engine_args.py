"""Engine options as command-line flags, for every program that loads a model."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Collection
from typing import Any

from qwen_engine.config import EngineConfig

_PREFIX = "engine_"
# `--model` is the program's own flag; skipping the tokenizer only makes sense from Python.
_WITHOUT_FLAG = {"model", "skip_tokenizer_init"}


def add_engine_arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """One flag per field of EngineConfig but those of `without`; the help is the field's line in its docstring."""
    group = parser.add_argument_group("engine")
    helps = dict(re.findall(r"^ *(\w+): (.+)$", EngineConfig.__doc__ or "", flags=re.MULTILINE))
    for field in dataclasses.fields(EngineConfig):
        if field.name in _WITHOUT_FLAG or field.name in without:
            continue
        flag = "--" + field.name.replace("_", "-")
        text = helps.get(field.name, "").replace("%", "%%")
        options: dict[str, Any] = {"dest": _PREFIX + field.name, "default": field.default}
        if isinstance(field.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = int if field.default is None else type(field.default)
            options["metavar"] = "N" if options["type"] is int else options["type"].__name__.upper()
            text += "" if field.default is None else f" (default: {field.default})"
        group.add_argument(flag, help=text, **options)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword options of `LLM` that `args` hold."""
    return {name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)}
