"""Errors that reach a user: one line each, with both numbers and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

MAX_SHOWN_CHARS = 80
MAX_SUMMARY_CHARS = 2000


def shown(value: object) -> str:
    """A value as an error message shows it: never longer than a line, whatever it is."""
    try:
        text = repr(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str | bytes) else value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"too large a value ({type(value).__name__})"
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def summary(error: BaseException) -> str:
    """What an exception says, in one line that names its class."""
    text = " ".join(str(error).split())[:MAX_SUMMARY_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def suggestion(name: str, known: Sequence[str]) -> str:
    """What to write instead of a name that does not exist: the nearest of those that do, or all."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


class QwenEngineError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(QwenEngineError, ValueError):
    """The engine's options, the checkpoint's config.json or the machine do not fit together."""


class UnknownOptionError(ConfigError, TypeError):
    """An option name that does not exist."""


class RequestError(QwenEngineError, ValueError):
    """A request that is refused at admission. `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def renamed(self, names: Mapping[str, str]) -> RequestError:
        """This error for somebody who knows fields by other names. names: a field's name here → there."""
        if self.param is None or self.param not in names:
            return self
        name, message = names[self.param], str(self)
        if message.startswith(f"{self.param} is "):
            message = name + message[len(self.param) :]
        return RequestError(message, name)


class UnknownParameterError(RequestError, TypeError):
    """A parameter name that does not exist."""


class CheckpointError(QwenEngineError):
    """Weights on disk that do not match the model; the message lists every fault found."""


class EngineDeadError(QwenEngineError, RuntimeError):
    """The engine was closed or has failed and takes no more requests."""
