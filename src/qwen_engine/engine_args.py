"""Engine options as command-line flags, for every program that loads a model, and how all help texts look."""

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
_METAVARS = {int: "N", float: "X", str: "NAME"}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Says the default of every option that has one, in the same words."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_default = action.option_strings and action.default not in (None, "", argparse.SUPPRESS)
        if not has_default or "default" in text:
            return text
        if isinstance(action.default, bool):
            is_switch = isinstance(action, argparse.BooleanOptionalAction)
            return f"{text} (default: {'yes' if action.default else 'no'})" if is_switch else text
        return f"{text} (default: %(default)s)"


def add_engine_arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """One flag per field of EngineConfig but those of `without`; the help is the field's line in its docstring."""
    group = parser.add_argument_group("engine")
    helps = dict(re.findall(r"^ *(\w+): (.+)$", EngineConfig.__doc__ or "", flags=re.MULTILINE))
    for field in dataclasses.fields(EngineConfig):
        if field.name in _WITHOUT_FLAG or field.name in without:
            continue
        flag = "--" + field.name.replace("_", "-")
        text = helps.get(field.name, "").removesuffix(".").replace("%", "%%")
        options: dict[str, Any] = {"dest": _PREFIX + field.name, "default": field.default}
        if isinstance(field.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = int if field.default is None else type(field.default)
            options["metavar"] = _METAVARS[options["type"]]
        group.add_argument(flag, help=text, **options)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword options of `LLM` that `args` hold."""
    return {name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)}
