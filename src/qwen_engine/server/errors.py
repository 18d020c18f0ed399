"""Errors as OpenAI clients expect them: one envelope, types and codes they act on, never more than a line of text.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from qwen_engine.errors import EngineDeadError, QwenEngineError, RequestError, shown
from qwen_engine.server.json_response import json_response

MAX_MESSAGE_CHARS = 500
MAX_LOGGED_CHARS = 200
RETRY_AFTER_S = 1

# Where a message begins to show a value: a quotation, a list or an object, but no apostrophe, index or range.
_VALUE = re.compile(r"(?<![\w\]])(?<!in )['\"\[{].*", flags=re.DOTALL)
_INVALID = "invalid_request_error"
_STATUS_TYPES = {
    401: "authentication_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(QwenEngineError):
    """An error with everything its HTTP answer needs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        error_type = _STATUS_TYPES.get(self.status, _INVALID)
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}

    def log_fields(self) -> dict[str, Any]:
        """What the log says of it: nothing that a client wrote, but for the name of a field."""
        reason = _VALUE.sub("…", self.message)[:MAX_LOGGED_CHARS]
        param = None if self.param is None else self.param[:MAX_LOGGED_CHARS]
        return {"status": self.status, "code": self.code, "param": param, "reason": reason}

    def response(self) -> Response:
        return json_response(self.body(), status=self.status, headers=self.headers)


class DeadlineError(QwenEngineError):
    """A request's own timeout ran out before there was anything to return."""


def unsupported(param: str, message: str) -> ApiError:
    """A field this server knows and cannot serve."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def context_length_exceeded(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unavailable(message: str, code: str) -> ApiError:
    """Not now; a client may try again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as what the client is told; unexpected ones show nothing of themselves."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, RequestValidationError):
        return _of_validation(error.errors())
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), param="timeout", code="timeout")
    if isinstance(error, EngineDeadError):
        return ApiError(500, "the engine has failed while it served this request", code="engine_failed")
    return ApiError(500, "the server has failed while it served this request; its log says why", code="internal_error")


def _of_http(error: HTTPException) -> ApiError:
    messages = {404: "there is no such URL", 405: "this URL does not take this method"}
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = messages.get(error.status_code, str(error.detail))
    code = codes.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first error alone: it names a field, and what follows is often its consequence."""
    first = errors[0]
    kind, context = first["type"], first.get("ctx") or {}
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {context.get('error', 'it cannot be parsed')}")
    if kind == "missing" and tuple(first["loc"]) == ("body",):
        return ApiError(400, "the body is empty; send a JSON object")
    param = _path(first["loc"])
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {shown(param)}", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"the field {param} is missing", param=param, code="missing_required_parameter")
    cause = context.get("error")
    if isinstance(cause, QwenEngineError):
        return as_api_error(cause)
    if param is None:
        return ApiError(400, "the body must be a JSON object")
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param} is {shown(first.get('input'))}: {reason}", param=param)


def _path(location: Sequence[str | int]) -> str | None:
    """A field's place in the body, as in messages[0].role, without pydantic's names for the variants of a type."""
    path = ""
    for step in location[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int", "float", "bool", "dict", "list"):
            path += f".{step}" if path else step
        elif not path:
            path = step  # a field of the client's own, whatever its name
    return path[:MAX_MESSAGE_CHARS] or None
