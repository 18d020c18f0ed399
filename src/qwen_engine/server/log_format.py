"""Log lines of the server, as text or as one JSON object a line. Records may bring `fields`, a mapping of their own."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, "fields", None)
        if fields:
            line += "".join(f" {name}={_word(value)}" for name, value in fields.items() if value is not None)
        return line


def _word(value: Any) -> str:
    """A value without spaces and line breaks, or in quotes."""
    text = str(value)
    is_printable = text.isprintable()
    return text if is_printable and " " not in text else json.dumps(text, ensure_ascii=not is_printable)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        line = json.dumps(content, ensure_ascii=False)
        return line if line.isprintable() else json.dumps(content)


def configure(log_format: str, prefix: str = "") -> None:
    """Sets the format of everything this process logs to stderr. prefix: of messages, where they are text."""
    text = TextFormatter(f"%(asctime)s %(levelname)s {prefix}%(message)s")
    formatter = JsonFormatter() if log_format == "json" else text
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
