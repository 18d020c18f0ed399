"""The chat page's files as they are served, and what can be read off them without a browser."""

from __future__ import annotations

import fnmatch
import re
import tomllib
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fault_tools import ROOT
from scripted import ScriptedServer

import qwen_engine
from qwen_engine.server import page

TYPES = {"/": "text/html", "/static/chat.css": "text/css", "/static/chat.js": "text/javascript"}


def fetch(scripted: ScriptedServer, path: str) -> tuple[str, dict[str, str]]:
    with urllib.request.urlopen(scripted.url + path) as answer:
        return answer.read().decode(), {name.lower(): value for name, value in answer.headers.items()}


class Elements(HTMLParser):
    """All start tags of a document, and the text inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline += data.strip()


@pytest.mark.parametrize("path", TYPES)
def test_a_file_is_served_under_a_policy_that_lets_nothing_in(scripted, path):
    text, headers = fetch(scripted, path)
    assert headers["content-type"] == f"{TYPES[path]}; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    policy = {name: sources for name, *sources in map(str.split, headers["content-security-policy"].split(";"))}
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == ["'none'"]
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
    assert policy["require-trusted-types-for"] == ["'script'"]
    assert not re.search(r"https?:|wss?:|[\"'(=]\s*//", text, re.IGNORECASE), "a URL that leaves the server"


def test_the_document_needs_its_own_files_only(scripted):
    document = Elements(fetch(scripted, "/")[0])
    assert document.inline == ""
    for tag, attributes in document.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        for name in ("src", "href", "action", "srcset", "data"):
            assert attributes.get(name) in (None, "static/chat.css", "static/chat.js", "data:,"), tag


def test_what_the_script_looks_for_is_in_the_document(scripted):
    document, script = Elements(fetch(scripted, "/")[0]), fetch(scripted, "/static/chat.js")[0]
    ids = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    used = {*re.findall(r'byId\("([\w-]+)"\)', script), "temperature", "top_p", "top_k", "max_tokens"}
    assert len(used) > 15
    assert used <= set(ids)
    labelled = {attributes.get("for") for tag, attributes in document.tags if tag == "label"}
    for tag, attributes in document.tags:
        if tag in ("input", "select", "textarea"):
            assert attributes["id"] in labelled


def test_text_never_becomes_markup(scripted):
    script = fetch(scripted, "/static/chat.js")[0]
    for name in (
        *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "createContextualFragment"),
        *("eval(", "Function(", "srcdoc", "setHTML", "javascript:"),
    ):
        assert name not in script


def test_what_the_page_sends_is_accepted(scripted):
    scripted.write("<think>\nhm\n</think>\n\nHi")
    chunks = list(
        scripted.openai.chat.completions.create(
            model="scripted",
            messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "x"}],
            temperature=0.5,
            top_p=0.9,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            extra_body={"top_k": 20, "chat_template_kwargs": {"enable_thinking": True}},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == scripted.num_tokens("<think>\nhm\n</think>\n\nHi") + 1


def test_the_files_are_part_of_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["qwen_engine"]
    package = Path(qwen_engine.__file__).parent
    files = [path.relative_to(package).as_posix() for path in (package / "server" / "static").iterdir()]
    assert len(files) == len(page.PAGE_FILES)
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in files)
