"""The chat page as its users meet it, in a headless Chromium. Collected only where there is one (see conftest)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, browser
from fault_tools import wait_until
from scripted import MAX_MODEL_LEN, ScriptedServer, scripted_server

ANSWER = """<think>
A <b>list</b>?
</think>

A **list**, <img src=x onerror="document.title='broken'">:

1. `one`
   - two

```python
<script>document.title = "broken"</script>
```
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def chat(chromium: Browser, scripted: ScriptedServer) -> Iterator[Browser]:
    """The page, just opened."""
    chromium.problems.clear()
    chromium.requested.clear()
    scripted.client.aborted.clear()
    chromium.open(scripted.url)
    chromium.wait("document.getElementById('model').options.length == 1")
    yield chromium
    scripted.client.pause_s, scripted.client.fails_after = 0.0, None


def ask(chat: Browser, text: str) -> None:
    chat.run("document.getElementById('input').focus()")
    chat.type(text)
    chat.press("Enter")


def wait_for_answer(chat: Browser) -> None:
    chat.wait("document.querySelector('.turn.assistant') && !document.querySelector('.busy')")


def test_a_chat_with_thinking_code_and_markup_that_stays_text(chat, scripted):
    scripted.write(ANSWER)
    ask(chat, "What is\na list?")
    wait_for_answer(chat)
    assert chat.run("document.querySelector('.thinking').open") is False
    assert chat.run("document.querySelector('.thinking > div').textContent") == "A <b>list</b>?"
    assert chat.run("document.querySelector('.answer p').textContent").startswith("A list, <img src=x")
    assert chat.run("document.querySelector('.answer pre').textContent").startswith("<script>")
    assert chat.run("document.querySelector('.answer strong').textContent") == "list"
    assert chat.run("document.querySelector('.answer ol li ul li').textContent") == "two"
    assert chat.run("document.querySelectorAll('.answer img, .answer script, .thinking b').length") == 0
    stats = chat.run("document.querySelector('.stats').textContent")
    assert "first token after" in stats
    assert f"{scripted.num_tokens(ANSWER) + 1} tokens" in stats

    scripted.write("And more.")
    ask(chat, "Go on")
    chat.wait("document.querySelectorAll('.turn.assistant').length == 2")
    wait_for_answer(chat)
    assert "a list?<|im_end|>" in scripted.client.prompt
    assert "A **list**" in scripted.client.prompt
    chat.run("document.getElementById('new-chat').click()")
    assert chat.run("document.querySelectorAll('.turn').length") == 0
    ask(chat, "Anew")
    wait_for_answer(chat)
    assert "list" not in scripted.client.prompt
    assert chat.run("document.title") == "qwen-engine"
    assert chat.problems == []
    assert all(url.startswith(scripted.url) for url in chat.requested)


def test_settings_reach_the_model(chat, scripted):
    scripted.write("ok")
    for name, value in {
        "temperature": "0.3",
        "top_p": "0.5",
        "top_k": "7",
        "max_tokens": "9",
        "system": "Be kind.",
    }.items():
        chat.run(f"document.getElementById('{name}').value = '{value}'")
    chat.run("document.getElementById('thinking').checked = false")
    ask(chat, "x")
    wait_for_answer(chat)
    params = scripted.client.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.3, 0.5, 7, 9)
    assert "system\nBe kind." in scripted.client.prompt
    assert scripted.client.prompt.endswith("</think>\n\n")
    chat.run("document.getElementById('temperature').value = '5'")
    ask(chat, "y")
    assert chat.run("document.getElementById('settings').hidden") is False
    assert chat.run("document.getElementById('input').value") == "y"


def test_settings_stay_and_the_conversation_does_not(chat, scripted):
    scripted.write("ok")
    ask(chat, "x")
    wait_for_answer(chat)
    chat.run("document.getElementById('top_p').value = '0.5'")
    chat.run("document.getElementById('settings').dispatchEvent(new Event('change'))")
    chat.open(scripted.url + "/?again")
    assert chat.run("document.getElementById('top_p').value") == "0.5"
    assert chat.run("document.querySelectorAll('.turn').length") == 0
    chat.run("localStorage.clear()")


def test_escape_stops_an_answer_and_keeps_what_there_is(chat, scripted):
    scripted.write("word " * 2000)
    scripted.client.pause_s = 0.02
    ask(chat, "x")
    chat.wait("document.querySelector('.answer').textContent.length > 20")
    assert chat.run("document.getElementById('stop').hidden") is False
    chat.press("Escape")
    wait_for_answer(chat)
    wait_until(lambda: bool(scripted.client.aborted))
    assert "stopped" in chat.run("document.querySelector('.foot').textContent")
    assert chat.run("document.querySelector('.answer').textContent").startswith("word word")


def test_shift_enter_begins_a_line_and_does_not_send(chat):
    chat.run("document.getElementById('input').focus()")
    chat.type("a")
    chat.press("Enter", shift=True)
    chat.type("b")
    assert chat.run("document.getElementById('input').value") == "a\nb"
    assert chat.run("document.querySelectorAll('.turn').length") == 0


def test_failures_are_told_in_a_line(chat, scripted):
    scripted.write("word " * 50)
    scripted.client.fails_after = 5
    ask(chat, "x")
    chat.wait("!document.getElementById('error').hidden")
    assert "The engine has failed" in chat.run("document.getElementById('error').textContent")
    assert "broken off" in chat.run("document.querySelector('.foot').textContent")
    scripted.client.fails_after = None
    chat.run(f"document.getElementById('max_tokens').value = '{MAX_MODEL_LEN * 2}'")
    ask(chat, "my question")
    chat.wait("document.getElementById('error').textContent.includes('maximum context length')")
    assert chat.run("document.getElementById('input').value") == "my question"
    chat.run("document.getElementById('max_tokens').value = ''")
    chat.press("Enter")
    chat.wait("document.querySelectorAll('.turn.assistant').length == 2")
    wait_for_answer(chat)
    assert chat.run("document.getElementById('error').hidden") is True


def test_the_page_waits_for_an_engine_that_starts(chromium, scripted, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(scripted.client, "facts", None)
        chromium.open(scripted.url + "/?starting")
        chromium.wait("document.getElementById('error').textContent.includes('is starting')")
    chromium.wait("document.getElementById('model').options.length == 1")
    assert chromium.run("document.getElementById('error').hidden") is True


def test_a_key_is_asked_for_where_one_is_needed(chromium):
    with scripted_server(api_keys=["secret"]) as server:
        server.write("ok")
        chromium.open(server.url)
        chromium.wait("!document.getElementById('key-form').hidden")
        for key, accepted in (("wrong", False), ("secret", True)):
            chromium.run(f"document.getElementById('key').value = '{key}'")
            chromium.run("document.getElementById('key-form').requestSubmit()")
            shown = "document.getElementById('error').textContent.includes('key')"
            chromium.wait("document.getElementById('key-form').hidden" if accepted else shown)
        ask(chromium, "x")
        wait_for_answer(chromium)
        assert chromium.run("document.querySelector('.answer').textContent") == "ok"


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_window(chat, scripted, width):
    scripted.write(ANSWER + "\n" + "wide" * 200 + "\n\n```\n" + "wide" * 200 + "\n```")
    chat.open(scripted.url + "/?again", width=width, height=600)
    chat.wait("document.getElementById('model').options.length == 1")
    chat.run("document.getElementById('show-settings').click()")
    ask(chat, "long" * 100)
    wait_for_answer(chat)
    assert chat.run("document.documentElement.scrollWidth") == width
    assert chat.run("document.getElementById('log').scrollWidth - document.getElementById('log').clientWidth") == 0
    assert chat.run("document.getElementById('composer').getBoundingClientRect().bottom") <= 600
