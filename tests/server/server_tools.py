"""A real server in a process of its own, and ways to talk to it and to look at what it holds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

from fault_tools import ROOT, children, wait_until

START_LIMIT_S = 120.0
MAX_REQUEST_BYTES = 2**20


@dataclass
class Answer:
    """An HTTP answer; `json` of its body."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=lambda text: 1 / 0)  # NaN and Infinity are no JSON

    @property
    def error(self) -> dict[str, Any]:
        content = self.json
        assert list(content) == ["error"]
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert 0 < len(content["error"]["message"]) <= 500
        return content["error"]


@dataclass
class Server:
    """A running `serve`. `log` grows as it writes to stderr."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request."""
    context: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self._reader.start()

    @property
    def engine_pid(self) -> int:
        """The process of the engine that runs now; 0 while there is none."""
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return 0

    def ask(
        self, path: str, body: Any = None, *, headers: dict[str, str] | None = None, method: str | None = None
    ) -> Answer:
        """GET without a body, POST with one; bytes go as they are."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        for name, value in {**self.headers, **(headers or {})}.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=START_LIMIT_S, context=self.context) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of all events of a stream; the [DONE] of completions is checked and left out."""
        answer = self.ask(path, {**body, "stream": True})
        assert answer.status == 200, answer.body
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = []
        for frame in answer.body.decode().split("\n\n"):
            events += [line[6:] for line in frame.splitlines() if line.startswith("data: ")]
        if path != "/v1/responses":
            assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def metrics(self) -> dict[str, float]:
        """Name without its prefix → value, for the metrics that are one number."""
        text = self.ask("/metrics").body.decode()
        return {
            name: float(value)
            for name, value in re.findall(
                r"^\w+:(\w+)\{engine=\"0\",model_name=\"[^\"]*\"\} (\S+)$", text, re.MULTILINE
            )
        }

    def is_idle(self) -> bool:
        metrics = self.metrics()
        return metrics["num_requests_running"] == metrics["num_requests_waiting"] == metrics["kv_cache_usage_perc"] == 0

    def num_running(self) -> float:
        return self.metrics()["num_requests_running"]

    def wait_for_log(self, pattern: str, limit_s: float = START_LIMIT_S) -> re.Match[str]:
        """Waits for a line; AssertionError with the whole log if the server ends or takes too long."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            has_ended = self.process.poll() is not None
            if has_ended:
                self.read_all()
            found[:] = [match for line in list(self.log) if (match := re.search(pattern, line))]
            assert found or not has_ended, "the server has ended:\n" + "".join(self.log)
            return bool(found)

        wait_until(look, limit_s)
        return found[0]

    def read_all(self) -> None:
        """Waits until the log is complete, which it is once no process is left that could write to it."""
        self._reader.join(START_LIMIT_S)
        assert not self._reader.is_alive()


@contextlib.contextmanager
def serve(
    model: Path | str, *args: str, ready: bool = True, environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """A server on a free port, waited for; its whole process group is gone afterwards."""
    command = [sys.executable, "-m", "qwen_engine", "serve", "--model", str(model), "--port", "0"]
    process = subprocess.Popen(
        [
            *command,
            "--device",
            "cpu",
            "--kv-cache-bytes",
            str(64 * 2**20),
            "--max-request-bytes",
            str(MAX_REQUEST_BYTES),
            *args,
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    server = Server(process)
    try:
        if ready:
            server.url = server.wait_for_log(r"listening on (http\S+\d)")[1]
            server.wait_for_log(r"ready: ")
        yield server
    finally:
        engine = server.engine_pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if engine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
        process.wait()
        server.read_all()
        process.stdout.close()
        process.stderr.close()
