"""The server's own life: start, keys, overload, drain, and what becomes of everybody when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fault_tools import children, is_running, wait_until, workers_of
from server_tools import Answer, Server, serve

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.errors import ConfigError, EngineDeadError
from qwen_engine.frontend.input_processor import InputProcessor
from qwen_engine.request import SamplingParams
from qwen_engine.server import engine_client
from qwen_engine.server.metrics import Metrics
from qwen_engine.server.page import PAGE_FILES
from qwen_engine.tokenization.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "def f(", "max_tokens": 15000, "ignore_eos": True}
"""Takes a minute or more; nothing here waits for its end."""
SHORT = {"prompt": "def f(", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def directories(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """The private directories of this test's servers, and of no others: it has a folder for temporary files alone."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield lambda: [path.name for path in Path(folder).glob("qwen-engine-*")]


@contextlib.contextmanager
def in_flight(server: Server, *bodies: dict[str, Any], count: int, **options: Any):
    """The answers of these requests, as futures, once so many sequences run."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        futures: list[Future[Answer]] = [pool.submit(server.ask, COMPLETIONS, body, **options) for body in bodies]
        wait_until(lambda: server.num_running() == count or any(future.done() for future in futures))
        assert not any(future.done() for future in futures), [f.result().body for f in futures if f.done()]
        yield futures


def last_event(answer: Answer) -> dict[str, Any]:
    """Of a stream that ended as it should, with [DONE]."""
    *_, last, done = answer.body.decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: "))


def ended(server: Server, limit_s: float = 120.0) -> int:
    """Exit code of the server; nothing of it is left, and its log is complete."""
    code = server.process.wait(limit_s)
    wait_until(lambda: not group_of(server))
    server.read_all()
    return code


def group_of(server: Server) -> list[int]:
    """Processes that belong to the server's session: its own group, the engine's and the ranks'."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getsid(int(name)) == server.process.pid and is_running(int(name)):
                found.append(int(name))
    return found


def test_the_api_process_does_not_import_torch():
    code = "import sys, qwen_engine.server.serve; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False).returncode == 0


def test_tpw_01_a_killed_engine_fails_its_requests_and_is_started_anew_as_often_as_allowed(chat_model, directories):
    with serve(chat_model, "--max-model-len", "16384", "--restart-engine", "1", "--dead-engine-grace", "600") as server:
        assert not directories(), "the socket's directory is gone once the engine is connected"
        first = server.engine_pid
        with in_flight(server, {**LONG, "n": 2}, {**LONG, "stream": True}, count=3) as (whole, stream):
            os.kill(first, signal.SIGKILL)
            answer = whole.result(120)
            assert (answer.status, answer.error["code"]) == (500, "engine_failed")
            assert last_event(stream.result(120))["error"]["code"] == "engine_failed"
        server.wait_for_log("killed by signal 9")
        wait_until(lambda: server.ask("/health").status == 200)
        assert server.engine_pid != first
        assert server.ask(COMPLETIONS, SHORT).status == 200
        wait_until(server.is_idle)

        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: server.ask("/health").status == 503)
        assert server.ask("/ready").status == 503
        answer = server.ask(COMPLETIONS, SHORT)
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")
        assert server.metrics()["engine_healthy"] == 0
        server.process.terminate()
        assert ended(server) == 1
        assert not directories()


def test_an_engine_that_hangs_is_killed_but_not_one_that_was_frozen_with_its_server(chat_model, monkeypatch):
    config = EngineConfig(model=str(chat_model), device="cpu", kv_cache_bytes=2**26)
    tokenizer = Tokenizer.from_folder(chat_model)
    inputs = InputProcessor(config, ModelConfig.from_folder(chat_model), tokenizer)
    reasons: list[str] = []

    async def scenario() -> None:
        metrics = Metrics(prefix="test", model_name="m")
        client = engine_client.EngineClient(config, chat_model, tokenizer, metrics, on_death=reasons.append)
        try:
            await client.start()
            (engine,) = (pid for pid in children() if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
            assert client.is_healthy
            os.kill(engine, signal.SIGSTOP)
            monkeypatch.setattr(engine_client, "HANG_LIMIT_S", 4.0)
            generation = client.submit([inputs.process("x", SamplingParams(max_tokens=4))], streams=False)
            time.sleep(5.0)  # this process is frozen as well
            await asyncio.sleep(0.2)
            os.kill(engine, signal.SIGCONT)
            await generation.wait_finished()

            generation = client.submit([inputs.process("x", SamplingParams(max_tokens=15000))], streams=False)
            os.kill(engine, signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="no sign of life"):
                await generation.wait_finished()
            assert not client.is_healthy
            with pytest.raises(EngineDeadError):
                client.submit([inputs.process("x", SamplingParams())], streams=False)
        finally:
            await client.close()
        assert not is_running(engine)

    asyncio.run(scenario())
    assert len(reasons) == 1


def test_the_last_words_of_an_engine_are_heard_long_after_its_end(chat_model, monkeypatch):
    config = EngineConfig(model=str(chat_model), device="cpu", max_model_len=99999999)
    metrics = Metrics(prefix="test", model_name="m")
    client = engine_client.EngineClient(config, chat_model, Tokenizer.from_folder(chat_model), metrics)
    read = client._read

    async def read_late(engine: Any, ready: Any) -> None:
        await asyncio.to_thread(wait_until, lambda: not is_running(engine.process.pid))
        await asyncio.sleep(0.5)
        await read(engine, ready)

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="max_model_len is 99999999"):
            await client.start()
        await client.close()

    monkeypatch.setattr(client, "_read", read_late)
    asyncio.run(scenario())


def test_an_engine_that_has_ended_is_not_healthy_while_its_last_words_are_awaited(chat_model, monkeypatch):
    monkeypatch.setattr(engine_client, "_LAST_WORDS_S", 600.0)
    config = EngineConfig(model=str(chat_model), device="cpu", kv_cache_bytes=2**26)
    metrics = Metrics(prefix="test", model_name="m")
    client = engine_client.EngineClient(config, chat_model, Tokenizer.from_folder(chat_model), metrics)

    async def scenario() -> None:
        try:
            await client.start()
            assert client.is_healthy
            process = client._engine.process
            wait = process.wait
            monkeypatch.setattr(process, "wait", lambda limit_s: abs(wait(limit_s)))  # as if it had left by itself
            process.kill()
            while client.is_healthy:
                await asyncio.sleep(0.01)
            assert client.status is engine_client.EngineStatus.DEAD
            assert client._engine is not None
        finally:
            monkeypatch.undo()
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_an_engine_that_takes_its_time_to_be_gone_holds_up_nobody_and_its_last_words_count(chat_model, monkeypatch):
    """As one that frees a GPU's memory: its heartbeat has ended, its process has not."""
    config = EngineConfig(model=str(chat_model), device="cpu", kv_cache_bytes=2**26)
    metrics, reasons = Metrics(prefix="test", model_name="m"), []
    tokenizer = Tokenizer.from_folder(chat_model)
    client = engine_client.EngineClient(config, chat_model, tokenizer, metrics, on_death=reasons.append)
    may_give_up = threading.Event()

    def wait(limit_s: float) -> int:
        monkeypatch.undo()
        assert may_give_up.wait(60.0)
        raise subprocess.TimeoutExpired("engine", limit_s)

    async def scenario() -> None:
        try:
            await client.start()
            client._engine.last_words = "the GPU has fallen off the bus"
            monkeypatch.setattr(client._engine.process, "wait", wait)
            client._engine.process.kill()
            while client.is_healthy:
                await asyncio.sleep(0.01)
            assert client.status is engine_client.EngineStatus.DEAD
            assert client._engine is not None
            may_give_up.set()
            while not reasons:
                await asyncio.sleep(0.01)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))
    assert reasons == ["the GPU has fallen off the bus"]


def test_an_engine_that_cannot_be_started_is_dead_and_leaves_nothing(chat_model, monkeypatch, directories):
    config = EngineConfig(model=str(chat_model), device="cpu", kv_cache_bytes=2**26)
    tokenizer = Tokenizer.from_folder(chat_model)
    reasons: list[str] = []

    def new_client() -> engine_client.EngineClient:
        metrics = Metrics(prefix="test", model_name="m")
        return engine_client.EngineClient(
            config, chat_model, tokenizer, metrics, max_restarts=2, on_death=reasons.append
        )

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario() -> None:
        client = new_client()
        num_open = len(os.listdir("/proc/self/fd"))
        await client.start()
        (engine,) = (pid for pid in children() if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
        monkeypatch.setattr(engine_client.subprocess, "Popen", refuse)
        os.kill(engine, signal.SIGKILL)
        async with asyncio.timeout(120):
            while not reasons:
                await asyncio.sleep(0.02)
        assert client.status is engine_client.EngineStatus.DEAD
        with pytest.raises(EngineDeadError, match=r"did not start.*Too many open files"):
            await new_client().start()
        await client.close()
        assert len(os.listdir("/proc/self/fd")) <= num_open

    asyncio.run(scenario())
    assert len(reasons) == 1
    assert "Too many open files" in reasons[0]
    assert not directories()


def test_tpw_01_a_rank_that_dies_while_nothing_runs_ends_the_server(chat_model):
    with serve(chat_model, "--tensor-parallel-size", "2", "--dead-engine-grace", "0") as server:
        assert server.ask(COMPLETIONS, SHORT).status == 200
        wait_until(server.is_idle)
        (worker,) = workers_of(server.engine_pid)
        os.kill(worker, signal.SIGKILL)
        assert ended(server) == 1
        server.wait_for_log("rank 1")


def test_shd_01_nothing_outlives_a_killed_server(chat_model, directories):
    with serve(chat_model, "--max-model-len", "16384") as server:
        engine = server.engine_pid
        with in_flight(server, LONG, count=1) as (answer,):
            server.process.kill()
            with pytest.raises(OSError):
                answer.result(120)
        wait_until(lambda: not is_running(engine))
        wait_until(lambda: not group_of(server))
        assert not directories()


def test_keys_https_overload_and_a_drain_without_patience(chat_model, tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    config = tmp_path / "config.yaml"
    config.write_text(f"ssl_certfile: {certificate}\nssl-keyfile: {key}\nmax_model_len: 16384\nmax_num_seqs: 1\n")
    args = ("--config", str(config), "--max-queued-requests", "1", "--log-format", "json", "--shutdown-timeout", "0")
    args += ("--allowed-origins", "http://a.example", "--generation-config", "engine")
    with serve(chat_model, *args, environment={"QWEN_ENGINE_API_KEY": "one,two"}) as server:
        assert server.url.startswith("https://")
        server.context = ssl.create_default_context(cafile=str(certificate))
        check_origins(server)
        check_keys(server)
        server.headers["Authorization"] = "Bearer two"
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(server.ask, COMPLETIONS, {**LONG, "stream": True})
            wait_until(lambda: server.num_running() == 1)
            waiting = pool.submit(server.ask, COMPLETIONS, LONG)
            wait_until(lambda: server.metrics()["num_requests_waiting"] == 1)
            answer = server.ask(COMPLETIONS, SHORT)
            assert (answer.status, answer.error["code"]) == (503, "queue_full")
            assert answer.headers["Retry-After"]
            assert server.ask("/health").status == 200

            server.process.send_signal(signal.SIGINT)
            assert last_event(running.result(120))["choices"][0]["finish_reason"] == "abort"
            choice = waiting.result(120).json["choices"][0]
            assert (choice["finish_reason"], choice["text"]) == ("abort", "")
        assert ended(server) == 0
        lines = [json.loads(line) for line in server.log]  # every line, of both processes
        requests = [line for line in lines if line["message"] == "request"]
        assert {line["finish_reason"] for line in requests if "finish_reason" in line} == {"abort"}


def check_origins(server: Server) -> None:
    preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    answer = server.ask(COMPLETIONS, headers=preflight, method="OPTIONS")
    assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "http://a.example")
    assert not server.ask("/health", headers={"Origin": "http://b.example"}).headers["Access-Control-Allow-Origin"]


def check_keys(server: Server) -> None:
    """sec_12: every route, however it is spelled, is closed without a key; /health and the chat page are open."""
    paths = server.ask("/openapi.json", headers={"Authorization": "Bearer one"}).json["paths"]
    assert len(paths) > 12
    assert server.ask("/health").status == 200
    for path in PAGE_FILES:
        assert server.ask(path).status == 200
        assert server.ask("//" + path).status == server.ask(path + "x").status == 401
    for path in [*paths, "/openapi.json", "/docs", "/nowhere"]:
        if path == "/health":
            continue
        for spelling in (path, path + "/", "/" + path, path.upper(), "/health/.." + path):
            answer = server.ask(spelling, b"{}" if spelling == path else None)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), spelling
    for wrong in ("Bearer three", "Bearer ", "one", "Basic one", "Bearer onetwo", "bearer one two"):
        assert server.ask("/version", headers={"Authorization": wrong}).status == 401, wrong
    for right in ("Bearer one", "bearer two"):
        assert server.ask("/version", headers={"Authorization": right}).status == 200


def test_a_drain_refuses_new_requests_and_finishes_old_ones(chat_model):
    args = ("--max-model-len", "16384", "--shutdown-timeout", "300", "--metrics-prefix", "vllm")
    with serve(chat_model, *args) as server:
        text = server.ask("/metrics").body.decode()
        for name in ("num_requests_running{", "kv_cache_usage_perc{", "time_to_first_token_seconds_bucket{"):
            assert "vllm:" + name in text
        medium = {**LONG, "max_tokens": 1000}
        with in_flight(server, medium, {**LONG, "stream": True}, count=2) as (whole, stream):
            server.process.terminate()
            wait_until(lambda: server.ask("/ready").status == 503)
            assert server.ask("/health").status == 200
            answer = server.ask(COMPLETIONS, SHORT)
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")
            answer = whole.result(120).json
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 1000
            server.process.terminate()  # the second signal does not wait for the other one
            assert ended(server) == 0
            assert stream.exception(60) or stream.result().status == 200  # cut off, or with a last chunk


def test_a_signal_while_the_model_loads_ends_the_server(chat_model, directories):
    with serve(chat_model, ready=False) as server:
        server.url = server.wait_for_log(r"listening on (http\S+\d)")[1]
        wait_until(lambda: server.engine_pid)
        os.kill(server.engine_pid, signal.SIGSTOP)  # so that it goes on loading for as long as this takes
        assert server.ask("/health").status == 503
        answer = server.ask(COMPLETIONS, SHORT)
        assert (answer.status, answer.error["code"]) == (503, "engine_starting")
        server.process.terminate()
        assert ended(server) == 0
        assert not directories()


def test_options_that_the_engine_refuses_end_the_start_in_one_line(chat_model):
    with serve(chat_model, "--max-model-len", "99999999", ready=False) as server:
        assert ended(server) == 2
    (line,) = (line for line in server.log if line.startswith("error: "))
    assert "max_model_len is 99999999" in line
