"""What text and HTTP add to the engine: time to the first token and between tokens, offline and through the server.

    OMP_NUM_THREADS=1 python benchmarks/server_cost.py [--model demo] [--streams 1 64] [--input-len 128]

The same load in three ways on this machine: token ids in and out of the engine (engine), text in and out of `LLM`
(offline), and streamed completions of `serve` on loopback (server). Time per token is (last - first) / (tokens - 1) of
a request, with the prefill of later ones in it; between outputs are all single gaps. Offline, requests begin with their
batch, which tokenizes all its prompts first; through the server, each when its head has been sent. This client shares
the cores with the server, and its time is in the server's figures; CPU time per output token is given for the API
process and for this client.

Two engines are loaded at once, one here and one behind the server: on a GPU give --kv-cache-bytes. Where torch has as
many threads as there are cores, they wait for the cores that the other processes hold: hence OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from qwen_engine import LLM
from qwen_engine.bench import serve_client
from qwen_engine.bench.load import (
    BatchRun,
    Row,
    check_batches,
    check_fresh,
    check_pool,
    completed,
    run_batch,
    statistics_of,
)
from qwen_engine.bench.output import add_results_dir_argument, at_least, exit_code
from qwen_engine.bench.results import Check, check_writable, device_label, new_result, write_result
from qwen_engine.bench.serve_client import ENDPOINTS, ServeRequest, ServeResult
from qwen_engine.bench.serve_load import PromptMaker
from qwen_engine.bench.serve_report import request_rows
from qwen_engine.engine_args import HelpFormatter, add_engine_arguments, engine_options
from qwen_engine.errors import ConfigError, QwenEngineError
from qwen_engine.models.hub import resolve_model
from qwen_engine.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    import aiohttp

LAYERS = ("engine", "offline", "server")
FIGURES = {"ttft": "first token", "tpot": "time per token", "itl": "between outputs"}
MIN_REQUESTS = 20
"""A load of few streams is repeated until it has had so many requests."""
START_LIMIT_S = 600.0
END_LIMIT_S = 30.0


@dataclass(slots=True)
class Timings:
    """What one layer took under one load, all batches together; requests that failed are left out."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    api_cpu_s: float = 0.0
    client_cpu_s: float = 0.0

    def metrics(self) -> dict[str, float | None]:
        """Statistics in ms."""
        found = {}
        for name in ("ttft", "tpot", "itl"):
            found |= statistics_of(name, getattr(self, f"{name}_s"))
        return found


class Prompts:
    """Random texts of about `num_tokens` tokens, new ones at every call."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, seed: int) -> None:
        self._maker = PromptMaker(np.random.default_rng(seed), tokenizer, as_text=True)
        self._num_tokens = num_tokens

    def draw(self, count: int) -> list[str]:
        return [str(self._maker.sample(self._maker.draw(self._num_tokens), 0).prompt) for _ in range(count)]


def num_batches(args: argparse.Namespace, num_streams: int) -> int:
    return max(args.batches, math.ceil(MIN_REQUESTS / num_streams))


@dataclass(slots=True)
class Measured:
    """Timings by layer and number of streams, and everything that was run and sent, warm-ups too."""

    timings: dict[str, dict[int, Timings]] = field(default_factory=lambda: {layer: {} for layer in LAYERS})
    runs: list[BatchRun] = field(default_factory=list)
    results: list[ServeResult] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        return [row for run in self.runs for row in run.rows]


async def measure(args: argparse.Namespace, llm: LLM, server: Server, prompts: Prompts) -> Measured:
    """Batch by batch the layers take turns, so that whatever else the machine does meets them all alike."""
    measured = Measured()
    async with serve_client.open_session(None) as session:
        for num_streams in args.streams:
            found = {layer: Timings() for layer in LAYERS}
            for batch in range(1 + num_batches(args, num_streams)):
                first = batch % len(LAYERS)  # what comes behind another layer finds the caches cold
                for layer in LAYERS[first:] + LAYERS[:first]:
                    texts, timings = prompts.draw(num_streams), found[layer] if batch else Timings()
                    if layer == "server":
                        measured.results += await run_server(args, session, server, texts, timings)
                    else:
                        measured.runs.append(run_llm(args, llm, layer, texts, timings))
            for layer, timings in found.items():
                measured.timings[layer][num_streams] = timings
    return measured


def run_llm(args: argparse.Namespace, llm: LLM, layer: str, texts: list[str], timings: Timings) -> BatchRun:
    inputs = texts if layer == "offline" else [llm.encode(text) for text in texts]
    run = run_batch(llm, f"{layer}-{len(texts)}", inputs, [args.output_len] * len(texts))
    rows = completed(run.rows)
    timings.ttft_s += [row["ttft_s"] for row in rows]
    timings.tpot_s += [row["tpot_s"] for row in rows]
    timings.itl_s += run.gaps_s
    timings.num_output_tokens += sum(row["output_tokens"] for row in rows)
    return run


async def run_server(
    args: argparse.Namespace, session: aiohttp.ClientSession, server: Server, texts: list[str], timings: Timings
) -> list[ServeResult]:
    requests = [server_request(text, args.output_len) for text in texts]
    api_start_s, client_start_s = process_cpu_s(server.pid), time.process_time()
    results = await asyncio.gather(*(serve_client.complete(session, server.url, request) for request in requests))
    timings.client_cpu_s += time.process_time() - client_start_s
    timings.api_cpu_s += process_cpu_s(server.pid) - api_start_s
    for result in results:
        timings.itl_s += result.itl_s
        if result.ttft_s is not None and result.tpot_s is not None:
            timings.ttft_s.append(result.ttft_s)
            timings.tpot_s.append(result.tpot_s)
            timings.num_output_tokens += result.num_output_tokens
    return results


def server_request(text: str, max_tokens: int) -> ServeRequest:
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return ServeRequest(body=json.dumps(body).encode(), num_prompt_tokens=None, max_tokens=max_tokens)


@dataclass(frozen=True, slots=True)
class Server:
    """Where completions are asked for, and the API process."""

    url: str
    pid: int


@contextlib.contextmanager
def running_server(args: argparse.Namespace) -> Iterator[Server]:
    """A server with the same engine options, once it is ready. Raises ConfigError."""
    command = [sys.executable, "-m", "qwen_engine", "serve", "--model", args.model, "--port", "0", *engine_flags(args)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        with path.open("w") as log:
            process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            yield Server(wait_ready(process, path) + ENDPOINTS["openai"], process.pid)
        finally:
            process.terminate()
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        text = log.read_text(errors="replace")
        if " ready: " in text and (found := re.search(r"listening on (http://\S+)", text)):
            return found[1]
        if has_ended:
            reason = text.strip().splitlines()[-1:] or [f"code {process.returncode}"]
            raise ConfigError(f"the server has ended: {reason[0].removeprefix('error: ')}")
        time.sleep(0.05)
    raise ConfigError(f"the server was not ready within {START_LIMIT_S:g} s")


def engine_flags(args: argparse.Namespace) -> list[str]:
    """The engine options of `args` as a command line."""
    flags = []
    for name, value in engine_options(args).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags


def process_cpu_s(pid: int) -> float:
    """CPU time of a process so far, without its children; NaN where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def metrics_of(timings: dict[str, dict[int, Timings]]) -> dict[str, float | None]:
    """streams<N>_<layer>_<figure>, and streams<N>_<figure>_ms_added with its share of the engine's own time."""
    metrics: dict[str, float | None] = {}
    for layer, by_streams in timings.items():
        for num_streams, found in by_streams.items():
            metrics |= {f"streams{num_streams}_{layer}_{name}": value for name, value in found.metrics().items()}
    for num_streams, found in timings["server"].items():
        for name, seconds in (("api", found.api_cpu_s), ("client", found.client_cpu_s)):
            per_token = seconds / found.num_output_tokens * 1e6 if found.num_output_tokens else None
            metrics[f"streams{num_streams}_server_{name}_cpu_us_per_token"] = per_token
        for figure in FIGURES:
            engine, server = (median_ms(metrics, num_streams, layer, figure) for layer in ("engine", "server"))
            if engine is not None and server is not None:
                metrics[f"streams{num_streams}_{figure}_ms_added"] = server - engine
                metrics[f"streams{num_streams}_{figure}_share_added"] = (server - engine) / engine
    return metrics


def median_ms(metrics: Mapping[str, float | None], num_streams: int, layer: str, figure: str) -> float | None:
    return metrics.get(f"streams{num_streams}_{layer}_median_{figure}_ms")


def check_server(results: Sequence[ServeResult]) -> list[Check]:
    """That every stream came whole, and not from the prefix cache."""
    wrong = [result for result in results if result.error or result.num_output_tokens != result.max_tokens]
    detail = f"{len(results) - len(wrong)} of {len(results)} streams have exactly the tokens asked for"
    detail += f"; {wrong[0].error or wrong[0].num_output_tokens}" if wrong else ""
    rows = [
        {"cached_tokens": result.num_cached_tokens or 0, "prompt_tokens": result.num_prompt_tokens or 0}
        for result in results
    ]
    fresh = check_fresh(rows)
    return [Check("streams complete", not wrong, detail), Check("streams fresh", fresh.passed, fresh.detail)]


def table(metrics: Mapping[str, float | None], streams: Sequence[int]) -> str:
    """Medians of each layer in ms, what each adds to the one before, and all that is added."""
    lines = [f"{'median, ms':28}{'engine':>10}{'+ text':>10}{'+ HTTP':>10}{'server':>10}{'added':>22}"]
    for num_streams in streams:
        for figure, title in FIGURES.items():
            values = [median_ms(metrics, num_streams, layer, figure) for layer in LAYERS]
            name = f"{num_streams} stream{'s' if num_streams > 1 else ''}, {title}"
            if None in values:
                lines.append(f"{name:28}  not measured")
                continue
            engine, offline, server = map(float, values)  # type: ignore[arg-type]
            added = f"{server - engine:+.3f} ms ({100 * (server - engine) / engine:+.1f} %)"
            lines.append(
                f"{name:28}{engine:10.3f}{offline - engine:+10.3f}{server - offline:+10.3f}{server:10.3f}{added:>22}"
            )
        cpu = [metrics.get(f"streams{num_streams}_server_{name}_cpu_us_per_token") for name in ("api", "client")]
        if None not in cpu:
            lines.append(f"{'':28}CPU time per output token: API process {cpu[0]:.0f} us, client {cpu[1]:.0f} us")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    check_writable(args.results_dir)
    tokenizer = Tokenizer.from_folder(resolve_model(args.model, with_weights=False))
    seed = int.from_bytes(os.urandom(4)) if args.prompt_seed is None else args.prompt_seed
    prompts = Prompts(tokenizer, args.input_len, seed)
    with running_server(args) as server, LLM(args.model, **engine_options(args)) as llm:
        measured = asyncio.run(measure(args, llm, server, prompts))
        metrics = metrics_of(measured.timings)
        sent = [{"phase": "server", **row} for row in request_rows(measured.results, detailed=False)]
        result = new_result(
            "server-cost",
            metrics=metrics,
            checks=[
                *check_server(measured.results),
                *check_batches(measured.runs),
                check_fresh(measured.rows),
                check_pool(llm),
            ],
            requests=[*measured.rows, *sent],
            parameters={
                **{name: getattr(args, name) for name in ("streams", "input_len", "output_len")},
                "num_batches": {str(count): num_batches(args, count) for count in args.streams},
                "prompt_seed": seed,
            },
            notes=[shared_cores_note()],
            llm=llm,
        )
    path = write_result(result, args.results_dir)
    num_prompt = statistics.fmean(row["prompt_tokens"] for row in measured.rows)
    print(
        f"{args.model} on {device_label(result)}, prompts of {num_prompt:.0f} tokens, {args.output_len} output tokens"
    )
    print(table(metrics, args.streams))
    for check in result["checks"]:
        print(f"{'ok  ' if check['passed'] else 'FAIL'} {check['name']}: {check['detail']}")
    print(f"note: {result['notes'][0]}\n-> {path}")
    return exit_code(result)


def shared_cores_note() -> str:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"client, API process and engine share {num_cores} cores; torch uses {torch.get_num_threads()} threads"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", default="demo", help="folder, Hugging Face repository, or demo")
    parser.add_argument(
        "--streams", type=at_least(1), nargs="+", default=[1, 64], help="concurrent requests (default: 1 64)"
    )
    parser.add_argument("--input-len", type=at_least(1), default=128, help="prompt tokens")
    parser.add_argument("--output-len", type=at_least(2), default=64, help="output tokens")
    parser.add_argument("--batches", type=at_least(1), default=5, help="measured batches of each load, at least")
    parser.add_argument("--prompt-seed", type=int, help="of the random prompts (default: another one each run)")
    add_results_dir_argument(parser)
    add_engine_arguments(parser, without={"max_num_waiting"})
    try:
        return run(parser.parse_args())
    except QwenEngineError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
