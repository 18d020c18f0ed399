"""The routes: which URL is served by what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from qwen_engine import __version__
from qwen_engine.errors import QwenEngineError
from qwen_engine.server.chat import chat_completions
from qwen_engine.server.completions import completions
from qwen_engine.server.errors import ApiError, as_api_error
from qwen_engine.server.gate import REQUEST_ID_HEADER, Gate, log_failure
from qwen_engine.server.json_response import json_response
from qwen_engine.server.logprobs import token_text
from qwen_engine.server.page import add_page
from qwen_engine.server.protocol import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from qwen_engine.server.responses import responses
from qwen_engine.server.responses_protocol import ResponsesBody
from qwen_engine.server.service import Service, check_token_ids

_TITLE = "qwen-engine"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    service: Service, *, api_keys: Sequence[str], allowed_origins: Sequence[str], max_request_bytes: int
) -> ASGIApp:
    """The whole application. allowed_origins: of browsers' cross-origin requests; none by default."""
    app = FastAPI(title=_TITLE, version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    for kind in (QwenEngineError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_generation(app, service)
    _add_text(app, service)
    _add_operations(app, service)
    add_page(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    gate = Gate(app, api_keys=api_keys, max_request_bytes=max_request_bytes)
    if not allowed_origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_HEADER],
    )


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def post_completions(body: CompletionBody, request: Request) -> Response:
        return await completions(service, body, request)

    @app.post("/v1/chat/completions")
    async def post_chat_completions(body: ChatBody, request: Request) -> Response:
        return await chat_completions(service, body, request)

    @app.post("/v1/responses")
    async def post_responses(body: ResponsesBody, request: Request) -> Response:
        return await responses(service, body, request)

    @app.post("/v1/abort")
    async def post_abort(body: AbortBody) -> Response:
        return json_response({"aborted": service.abort(body.request_id)})

    @app.get("/v1/models")
    async def get_models() -> Response:
        return json_response(
            {"object": "list", "data": [_model(service, name) for name in service.options.model_names]}
        )

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return json_response(_model(service, service.model_name(name)))


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def post_tokenize(body: TokenizeBody) -> Response:
        body.check()
        service.model_name(body.model)
        if body.messages is None:
            ids = await service.in_pool(service.tokenizer.encode, body.prompt, body.add_special_tokens)
        else:
            options = body.template_options
            ids = await service.in_pool(lambda: service.tokenizer.apply_chat_template(body.messages, **options))
        texts = None
        if body.return_token_strs:
            texts = await service.in_pool(lambda: [token_text(service.tokenizer, id_) for id_ in ids])
        content = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": texts}
        return json_response(content)

    @app.post("/detokenize")
    async def post_detokenize(body: DetokenizeBody) -> Response:
        service.model_name(body.model)
        check_token_ids(service.tokenizer, body.tokens, "tokens")
        text = await service.in_pool(lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False))
        return json_response({"prompt": text})


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def get_health() -> Response:
        return Response(status_code=200 if service.client.is_healthy else 503)

    @app.get("/ready")
    async def get_ready() -> Response:
        return Response(status_code=200 if service.is_ready else 503)

    @app.get("/ping")
    async def get_ping() -> Response:
        return Response(status_code=200 if service.client.is_healthy else 503)

    @app.get("/version")
    async def get_version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def get_metrics() -> Response:
        text = service.metrics.exposition(service.client.stats, healthy=service.client.is_healthy)
        return Response(text, media_type=_METRICS_TYPE)

    @app.post("/reset_prefix_cache")
    async def post_reset_prefix_cache() -> Response:
        service.client.reset_prefix_cache()
        return Response(status_code=200)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": _TITLE,
        "root": service.options.model_names[0],
        "parent": None,
        "max_model_len": service.max_model_len,
        "permission": [],
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = as_api_error(error)
    log_failure(request.scope, answer)
    return answer.response()


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with our errors in the place of its own."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = schema["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["Error"] = _error_schema()
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {"description": "An error", "content": content}
        app.openapi_schema = schema
    return app.openapi_schema


def _error_schema() -> dict[str, Any]:
    names = ApiError(500, "").body()["error"]
    text = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    error = {"type": "object", "properties": dict.fromkeys(names, text), "required": list(names)}
    return {"title": "Error", "type": "object", "properties": {"error": error}, "required": ["error"]}
