"""JSON as this server writes it: strict (no NaN or Infinity), UTF-8, without spaces."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def to_json(content: Any) -> bytes:
    # A lone surrogate can come back from a request only; it must not turn an answer into an error.
    return _ENCODER.encode(content).encode(errors="backslashreplace")


class JsonTemplate:
    """JSON that differs in a text only, encoded but for that text, which may be in it several times.

    make: content with a text in it. A stream's chunks are like that, and the encoder costs more than all else in them.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        text = uuid.uuid4().hex  # which is nowhere else
        self._pieces = to_json(make(text)).split(to_json(text))

    def fill(self, text: str) -> bytes:
        """`to_json(make(text))`"""
        return to_json(text).join(self._pieces)


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")
