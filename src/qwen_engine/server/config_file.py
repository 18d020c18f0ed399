"""`--config file.yaml`: options of a command line from a file, put in front of those that were typed.

Keys are the options' names, with - or _. They go through the same parser, so types and choices are checked alike;
unknown keys are refused. An option that was typed replaces the file's, lists included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from qwen_engine.errors import ConfigError, UnknownOptionError, shown


def file_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments that the file named by `--config` in argv stands for; none without one. Raises ConfigError."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(argv)[0].config
    if path is None:
        return []
    actions = {option: action for action in parser._actions for option in action.option_strings}
    typed = {actions[word.partition("=")[0]].dest for word in argv if word.partition("=")[0] in actions}
    arguments: list[str] = []
    for name, value in _read(path).items():
        option = "--" + str(name).replace("_", "-")
        action = actions.get(option)
        if action is None or action.dest in ("config", "help") or option.startswith("--no-"):
            raise UnknownOptionError(f"{path} has unknown key {shown(name)}; keys are options without their dashes")
        if action.dest not in typed and value is not None:
            arguments += _arguments(path, option, action, value)
    return arguments


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}; it must map options to values")
    return content


def _arguments(path: Path, option: str, action: argparse.Action, value: Any) -> list[str]:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {option[2:]} is {shown(value)}; it must be true or false")
        return [option if value else "--no-" + option[2:]]
    values = value if isinstance(value, list) else [value]
    is_repeatable = isinstance(action, argparse._AppendAction)
    if isinstance(value, list) and not is_repeatable:
        raise ConfigError(f"{path}: {option[2:]} is a list; it takes one value")
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ConfigError(f"{path}: {option[2:]} is {shown(item)}; it must be text or a number")
    return [f"{option}={item}" for item in values]
