"""JSON as this server writes it: strict (no NaN or Infinity), UTF-8, without spaces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def to_json(content: Any) -> bytes:
    # A lone surrogate can come back from a request only; it must not turn an answer into an error.
    return _ENCODER.encode(content).encode(errors="backslashreplace")


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")
