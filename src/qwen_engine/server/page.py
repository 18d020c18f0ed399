"""The chat page at /: three static files that need nothing but this server's API.

They hold no secrets and are open to everybody; what the page asks for carries the key that its user typed. The policy
lets the page load nothing from elsewhere and run no script but its own, so text that a model wrote cannot become one.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/chat.css": ("chat.css", "text/css; charset=utf-8"),
    "/static/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
}
"""Path → file and media type."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Adds the page's routes. The files are read once, now."""
    for path, (name, media_type) in PAGE_FILES.items():
        _add_file(app, path, (_FOLDER / name).read_bytes(), media_type)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def get_file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)
