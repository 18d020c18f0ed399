"""`python -m qwen_engine serve`: an OpenAI-compatible HTTP server over one engine.

The port is bound before the model is loaded. The first SIGTERM or Ctrl-C drains: new requests get a 503, those in
flight have --shutdown-timeout seconds to end and are aborted then; the second signal ends the server at once.
Exit codes: 0 stopped by a signal, 1 the engine died, 2 bad options.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import re
import signal
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from qwen_engine import child_process
from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.engine_args import HelpFormatter, add_engine_arguments, engine_options
from qwen_engine.errors import ConfigError, EngineDeadError
from qwen_engine.models.hub import resolve_model
from qwen_engine.server import log_format
from qwen_engine.server.app import create_app
from qwen_engine.server.config_file import file_arguments
from qwen_engine.server.engine_client import EngineClient
from qwen_engine.server.http_protocol import LimitedHttp
from qwen_engine.server.metrics import Metrics
from qwen_engine.server.service import Service, ServiceOptions
from qwen_engine.server.tracing import RequestTracer
from qwen_engine.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "QWEN_ENGINE_API_KEY"
_BACKLOG = 2048
_FLUSH_S = 2.0  # for the last chunks of aborted requests to leave
_KEEP_ALIVE_S = 60
_API_KEY = re.compile(r"[\x21-\x7e]+")
_RANGES = {
    "port": (0, 65535),  # the resolver would wrap others round
    "max_request_bytes": (1, 2**40),
    "max_queued_requests": (0, 10**9),
    "restart_engine": (0, 10**9),
    "shutdown_timeout": (0, 10**9),
    "dead_engine_grace": (0, 10**9),
}
_METRICS_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """argv: what follows `serve`. The namespace has `run(args)` and `verbose`."""
    parser = argparse.ArgumentParser(
        prog="python -m qwen_engine serve",
        description=__doc__,
        usage="python -m qwen_engine serve [MODEL] [options]",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    _add_arguments(parser)
    parser.set_defaults(run=run, verbose=True)
    if argv and not argv[0].startswith("-"):
        if any(word.partition("=")[0] == "--model" for word in argv[1:]):
            parser.error(f"the model is named twice, as {argv[0]} and with --model")
        argv = ["--model", *argv]
    return parser.parse_args([*file_arguments(parser, argv), *argv])


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; returns the exit code."""
    log_format.configure(args.log_format)
    _check_options(args)
    config = EngineConfig.from_options({"model": args.model, **engine_options(args)})
    with contextlib.ExitStack() as stack:
        tracer = None
        if args.otlp_traces_endpoint is not None:
            tracer = RequestTracer(args.otlp_traces_endpoint)
            stack.callback(tracer.close)
        listener = stack.enter_context(_listen(args.host, args.port))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        try:
            return runner.run(_Server(args, config, listener, tracer).run())
        except EngineDeadError as error:
            logger.error("%s", error)
            return 1


class _Server:
    """One run of the server: HTTP from the start, the engine as soon as it is loaded, and an orderly end."""

    def __init__(
        self, args: argparse.Namespace, config: EngineConfig, listener: socket.socket, tracer: RequestTracer | None
    ) -> None:
        self._args = args
        self._listener = listener
        folder = resolve_model(config.model, with_weights=config.load_format != "dummy")
        model_config = ModelConfig.from_folder(folder)
        tokenizer = Tokenizer.from_folder(folder)
        names = args.served_model_name or [args.model]
        self._metrics = Metrics(prefix=args.metrics_prefix, model_name=names[0])
        self._client = EngineClient(
            config,
            folder,
            tokenizer,
            self._metrics,
            max_restarts=args.restart_engine,
            log_format=args.log_format,
            on_death=self._note_death,
        )
        defaults = model_config.sampling_defaults if args.generation_config == "auto" else {}
        options = ServiceOptions(
            model_names=names,
            max_queued=args.max_queued_requests,
            sampling_defaults=defaults,
            reasoning_alias=args.reasoning_alias,
        )
        self._service = Service(
            options,
            config=config,
            model_config=model_config,
            tokenizer=tokenizer,
            client=self._client,
            metrics=self._metrics,
            tracer=tracer,
        )
        app = create_app(
            self._service,
            api_keys=_api_keys(args),
            allowed_origins=args.allowed_origins or (),
            max_request_bytes=args.max_request_bytes,
        )
        self._http = _Http(
            uvicorn.Config(
                app,
                http=LimitedHttp,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_FLUSH_S,
                ssl_certfile=args.ssl_certfile,
                ssl_keyfile=args.ssl_keyfile,
            )
        )
        self._stop = asyncio.Event()  # the first signal
        self._stop_now = asyncio.Event()  # the second
        self._died = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take_signal)
        http = asyncio.create_task(self._http.serve([self._listener]))
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._args.ssl_certfile else "http"
        logger.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
        start = asyncio.create_task(self._client.start())
        try:
            await self._first_of(start, self._stop.wait(), http)
            if not self._stop.is_set() and start.done():
                start.result()
                child_process.settle()
                self._log_ready()
                await self._first_of(self._died.wait(), self._stop.wait(), http)
            if self._died.is_set():
                await self._within(self._args.dead_engine_grace, self._stop)
                return 1
            await self._drain()
            return 0
        finally:
            self._http.should_exit = True
            self._http.force_exit = self._stop_now.is_set()
            await self._client.close()
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            await http

    async def _drain(self) -> None:
        """Lets calls end by themselves for a while, then ends them with what they have."""
        service = self._service
        service.draining = True
        logger.info("shutting down; requests in flight: %d", service.num_calls)
        if not await self._drained_within(self._args.shutdown_timeout):
            logger.warning("aborting %d requests", service.num_calls)
            self._client.abort_all()
            await self._drained_within(_FLUSH_S)

    async def _drained_within(self, limit_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + limit_s
        while self._service.num_calls:
            if asyncio.get_running_loop().time() > deadline or self._stop_now.is_set():
                return False
            await asyncio.sleep(0.02)
        return True

    async def _first_of(self, *awaitables: Any) -> None:
        """Returns when one of them is done; if that is a task that failed, its caller finds out."""
        tasks = [asyncio.ensure_future(item) for item in awaitables]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task, item in zip(tasks, awaitables):
            if task is not item:
                task.cancel()

    async def _within(self, limit_s: float, event: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await event.wait()

    def _log_ready(self) -> None:
        facts, options = self._client.facts, self._service.options
        assert facts is not None
        self._metrics.set_facts(facts)
        defaults = dict(options.sampling_defaults)
        logger.info(
            "ready: %s on %s, %s, up to %d tokens a request; sampling defaults %s",
            options.model_names[0],
            facts.device,
            facts.dtype,
            facts.max_model_len,
            f"of generation_config.json: {defaults}" if defaults else "of the engine",
        )

    def _take_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _note_death(self, reason: str) -> None:
        self._died.set()


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _check_options(args: argparse.Namespace) -> None:
    """Raises ConfigError for what no type can exclude; the engine's options are checked by `EngineConfig`."""
    for name, (low, high) in _RANGES.items():
        value = getattr(args, name)
        if not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {low} to {high}")
    if not _METRICS_PREFIX.fullmatch(args.metrics_prefix):
        raise ConfigError(f"metrics prefix {args.metrics_prefix!r} must be letters, digits and underscores")
    if args.served_model_name and not all(args.served_model_name):
        raise ConfigError("--served-model-name is empty; give the name that clients send")
    if not all(map(_API_KEY.fullmatch, _api_keys(args))):
        # An empty one, from a variable that is not set, would let everybody in; the others nobody could send.
        raise ConfigError("an API key is empty or holds something else than printable ASCII without spaces")
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both or none")
    if args.ssl_certfile is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        except OSError as error:
            raise ConfigError(f"cannot use {args.ssl_certfile} with {args.ssl_keyfile}: {error}") from error


def _api_keys(args: argparse.Namespace) -> list[str]:
    """Those of the command line, else those of the environment."""
    value = os.environ.get(API_KEY_VARIABLE)
    return args.api_key or (value.split(",") if value else [])


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError in one line, long before a model would have been loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        hint = "; --port 0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error}{hint}") from error
    return listener


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="demo", help="folder, Hugging Face repository, or 'demo' (default); or the first word"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of these options; the command line is stronger"
    )
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="port; 0 takes a free one and logs it")
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model for clients, repeatable (default: that of --model)",
    )
    group.add_argument(
        "--generation-config",
        choices=("auto", "engine"),
        default="auto",
        help="sampling defaults: auto takes the checkpoint's generation_config.json, engine those of SamplingParams",
    )
    group.add_argument(
        "--reasoning-alias", action=argparse.BooleanOptionalAction, default=True,
        help="send the thinking of chats as `reasoning` too, not just as `reasoning_content`",
    )  # fmt: skip
    group.add_argument(
        "--api-key", action="append", metavar="KEY",
        help=f"key that clients must send, except to /health and the page; repeatable, or {API_KEY_VARIABLE}=KEY,KEY",
    )  # fmt: skip
    group.add_argument(
        "--allowed-origins",
        action="append",
        metavar="ORIGIN",
        help="browser origin to allow (CORS), repeatable (default: none)",
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its key")
    group.add_argument(
        "--max-request-bytes", type=int, default=16 * 2**20, metavar="N", help="largest body of a request in bytes"
    )
    group.add_argument(
        "--max-queued-requests", type=int, default=2048, metavar="N",
        help="sequences that may wait beyond the max-num-seqs that run; more get a 503",
    )  # fmt: skip
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="S", help="seconds that requests in flight have to end"
    )
    group.add_argument("--restart-engine", type=int, default=0, metavar="N", help="times to start a dead engine anew")
    group.add_argument(
        "--dead-engine-grace", type=float, default=10.0, metavar="S",
        help="seconds to answer 503 after the engine's last death before exiting with code 1",
    )  # fmt: skip
    group.add_argument("--log-format", choices=log_format.FORMATS, default="text", help="format of the log on stderr")
    group.add_argument(
        "--metrics-prefix",
        default="qwen_engine",
        metavar="NAME",
        help="what names of metrics begin with; 'vllm' makes them vLLM's",
    )
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL",
        help="send a trace of each request there, as OTLP over HTTP (http://HOST:4318/v1/traces); needs the extra otel",
    )  # fmt: skip
    add_engine_arguments(parser, without={"max_num_waiting"})  # --max-queued-requests does that, with a 503
