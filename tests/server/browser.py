"""A headless Chromium, driven over its debugging pipe with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fault_tools import wait_until

ANSWER_LIMIT_S = 120.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page of it. `problems` are what the page wrote to its console as errors, and requests to other hosts."""

    def __init__(self, process: subprocess.Popen[bytes], to_fd: int, from_fd: int) -> None:
        self._process = process
        self._to = os.fdopen(to_fd, "wb", buffering=0)
        self._from = os.fdopen(from_fd, "rb")
        self._numbers = itertools.count(1)
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._session: str | None = None
        self.problems: list[str] = []
        self.requested: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        message: dict[str, Any] = {"id": next(self._numbers), "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        answer = self._answers.get(timeout=ANSWER_LIMIT_S)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait(self, script: str) -> None:
        wait_until(lambda: self.run(f"Boolean({script})"), ANSWER_LIMIT_S)

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"Enter": "\r"}.get(key)
        code = {"Enter": 13, "Escape": 27}[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _read(self) -> None:
        data = b""
        while piece := self._from.read1(65536):
            *messages, data = (data + piece).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.put(message)
                else:
                    self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """profile: an empty folder for what it keeps."""
    assert CHROMIUM is not None
    child_in, to_fd = os.pipe()
    from_fd, child_out = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    flags += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{child_in} 4>&{child_out}', CHROMIUM, *flags],
        pass_fds=(child_in, child_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_in)
    os.close(child_out)
    try:
        yield Browser(process, to_fd, from_fd)
    finally:
        process.terminate()
        process.wait(30)
