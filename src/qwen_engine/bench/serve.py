"""Puts load on a running OpenAI-compatible server and reports what its users would feel.

Flags and the names of figures are those of `vllm bench serve`: numbers are in the result's `metrics`, settings in its
`parameters`. One difference: without `--seed` every run draws new prompts, because a repeated run would measure the
server's prefix cache. Ctrl-C ends the run and reports the requests that had ended.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import itertools
import json
import math
import os
import resource
import secrets
import sys
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from qwen_engine.bench import serve_client, serve_load
from qwen_engine.bench.facts import GPU_KEYS, query_gpus
from qwen_engine.bench.output import add_results_dir_argument, exit_code
from qwen_engine.bench.results import check_writable, new_result, write_result
from qwen_engine.bench.serve_client import ENDPOINTS, ServeRequest, ServeResult
from qwen_engine.bench.serve_load import PromptMaker, Sample
from qwen_engine.bench.serve_report import (
    METRICS,
    checks,
    distributions,
    find_notes,
    render,
    request_rows,
    summarize,
)
from qwen_engine.errors import ConfigError, shown

# flags ─► Samples (serve_load) ─► ServeRequests ─► ServeResults (serve_client) ─► report (serve_report)
#                                                                            table on stdout, result file

LAG_PERIOD_S = 0.05
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
IDLE_GPU_BYTES = 1 << 30
"""A GPU of this host with less in use serves no model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench serve` to `parser`."""
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=sorted(ENDPOINTS), default="openai", help="API: completions, or chat")
    server.add_argument("--base-url", help="like http://host:8000; instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1", help="where the server is")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="and its port")
    server.add_argument("--endpoint", help="path of the API (default: that of the backend)")
    server.add_argument("--model", help="model name to send (default: the first that the server lists)")
    server.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 always takes the most likely token"
    )
    server.add_argument("--ignore-eos", action="store_true", help="ask for outputs of exactly the wanted length")
    server.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields of each request"
    )

    data = parser.add_argument_group("prompts (lengths in tokens)")
    names = ("random", "custom", "sharegpt", "prefix_repetition")
    data.add_argument("--dataset-name", choices=names, default="random", help="where prompts come from")
    data.add_argument("--dataset-path", type=Path, help="the file of custom (JSON lines with 'prompt') and sharegpt")
    data.add_argument("--tokenizer", help="model folder or repository; makes lengths of random prompts exact")
    data.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="requests")
    data.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests sent before, and not measured")
    data.add_argument(
        "--seed", type=int, metavar="N", help="repeat the prompts and arrivals of that seed (default: new ones)"
    )
    data.add_argument("--random-input-len", type=int, default=1024, metavar="N", help="prompt tokens of each")
    data.add_argument("--random-output-len", type=int, default=128, metavar="N", help="output tokens of each")
    data.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by this share up and down"
    )
    data.add_argument(
        "--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts share, added in front"
    )
    data.add_argument("--custom-output-len", type=int, default=256, metavar="N", help="output tokens of each")
    data.add_argument(
        "--sharegpt-output-len",
        type=int,
        metavar="N",
        help="output tokens (default: as many as the recorded answer has)",
    )
    data.add_argument("--prefix-repetition-prefix-len", type=int, default=256, metavar="N", help="tokens of a prefix")
    data.add_argument("--prefix-repetition-suffix-len", type=int, default=256, metavar="N", help="tokens behind it")
    data.add_argument(
        "--prefix-repetition-num-prefixes", type=int, default=10, metavar="N", help="prefixes that prompts share"
    )
    data.add_argument(
        "--prefix-repetition-output-len", type=int, default=128, metavar="N", help="output tokens of each"
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="X", help="requests per second; inf sends all at once"
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="shape of the gaps between requests: 1 is Poisson, less is burstier",
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests in flight (default: any number)")

    report = parser.add_argument_group("report")
    report.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=METRICS,
        metavar="LIST",
        help=f"latencies, in ms (default: {','.join(METRICS)})",
    )
    report.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=(50, 90, 95, 99),
        metavar="LIST",
        help="of those (default: 50,90,95,99)",
    )
    report.add_argument(
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help="also count the requests within these limits, like ttft:500 tpot:50 e2el:3000",
    )
    add_results_dir_argument(report)
    report.add_argument("--save-result", action="store_true", help="accepted as vLLM's flag; every run is saved")
    report.add_argument("--save-detailed", action="store_true", help="also save each request's text and gaps")
    report.add_argument("--label", help="names the server in reports, like vllm-0.24 (default: its address)")
    report.add_argument("--server-device", help="what it runs on (default: this host's GPUs in use, if it runs here)")
    report.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.set_defaults(verbose=False)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark, prints its table and writes the result file; returns the exit code."""
    _raise_file_limit()
    check_writable(args.results_dir)
    result = asyncio.run(benchmark(args))
    sys.stdout.write(render(result))
    path = write_result(result, args.results_dir)
    sys.stdout.write(f"result: {path}\n")
    return exit_code(result)


async def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The result of one run. Raises ConfigError for flags or servers that cannot work."""
    _check(args)
    slos = _parse_goodput(args.goodput or ())
    seed = secrets.randbits(32) if args.seed is None else args.seed
    rng = np.random.default_rng(seed)
    samples = _make_samples(args, rng)
    samples, spare = samples[: args.num_prompts], samples[args.num_prompts :]
    warmups = list(itertools.islice(itertools.cycle(spare or samples), args.num_warmups))
    offsets_s = serve_load.arrival_offsets_s(
        len(samples), request_rate=args.request_rate, burstiness=args.burstiness, rng=rng
    )
    measured = await _measure(args, samples, warmups=warmups, offsets_s=offsets_s)
    results = measured.results
    metrics = {
        **summarize(results, metrics=args.percentile_metrics, percentiles=args.metric_percentiles, slos=slos),
        "unfinished": len(samples) - len(results),
        "warmups_failed": sum(result.error is not None for result in measured.warmup_results),
        "client_lag_p99_ms": float(np.percentile(measured.lags_s, 99)) * 1e3 if measured.lags_s else None,
    }
    lengths = {name: getattr(args, name) for name in _LENGTHS[args.dataset_name]}
    parameters = {
        "model_id": measured.model,
        "label": args.label,
        "backend": args.backend,
        "url": _url(args),
        "tokenizer_id": args.tokenizer,
        "dataset_name": args.dataset_name,
        "dataset_path": None if args.dataset_path is None else str(args.dataset_path),
        **lengths,
        "num_prompts": len(samples),
        "num_warmups": len(warmups),
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "ignore_eos": args.ignore_eos,
        "temperature": args.temperature,
        "extra_body": args.extra_body,
        "prompt_seed": seed,
        "new_prompts": args.seed is None and args.dataset_name in ("random", "prefix_repetition"),
        "goodput_slos_ms": slos,
    }
    return new_result(
        "serve",
        metrics=metrics,
        checks=[] if measured.interrupted else checks(args, metrics, results),
        requests=request_rows(results, detailed=args.save_detailed),
        parameters=parameters,
        distributions=distributions(results),
        notes=find_notes(args, parameters, metrics, results, reused_warmups=bool(warmups) and not spare),
        facts=_server_facts(args),
        interrupted=measured.interrupted,
    )


# The flags that say how long prompts and outputs are.
_LENGTHS = {
    "random": ("random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len"),
    "custom": ("custom_output_len",),
    "sharegpt": ("sharegpt_output_len",),
    "prefix_repetition": (
        "prefix_repetition_prefix_len",
        "prefix_repetition_suffix_len",
        "prefix_repetition_num_prefixes",
        "prefix_repetition_output_len",
    ),
}


def _server_facts(args: argparse.Namespace) -> dict[str, Any]:
    """Device and memory of the server as far as this process can know them; nothing of this client is the server's."""
    host = urllib.parse.urlsplit(_base_url(args)).hostname
    found = query_gpus() if host in LOOPBACK_HOSTS and args.server_device is None else []
    gpus = [gpu for gpu in found if (gpu.used_bytes or 0) > IDLE_GPU_BYTES]
    first = dataclasses.asdict(gpus[0]) if gpus else {"name": args.server_device, "driver": None}
    rows = [{**dataclasses.asdict(gpu), "torch_peak_bytes": None} for gpu in gpus]
    return {
        "device": {"name": first["name"], "count": len(gpus) or None, "driver": first["driver"]},
        "engine_config": None,
        "model_config": None,
        "memory": {"gpus": [{key: row[key] for key in GPU_KEYS} for row in rows], "host_peak_bytes": None},
    }


@dataclass(slots=True)
class _Measured:
    """What a run leaves; `lags_s` says how late this process was each time it wanted to wake up."""

    model: str
    warmup_results: list[ServeResult] = field(default_factory=list)
    results: list[ServeResult] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    interrupted: bool = False


async def _measure(
    args: argparse.Namespace, samples: Sequence[Sample], *, warmups: Sequence[Sample], offsets_s: Sequence[float]
) -> _Measured:
    """Sends the warm-ups, then the samples at their offsets; a cancellation after the warm-ups ends it early."""
    async with serve_client.open_session(os.environ.get("OPENAI_API_KEY")) as session:
        run = _Measured(args.model or await serve_client.ask_model(session, _base_url(args)))
        send = functools.partial(serve_client.complete, session, _url(args))
        load = functools.partial(serve_load.run_load, send, max_concurrency=args.max_concurrency)
        requests = [_make_request(args, run.model, sample) for sample in warmups]
        await load(requests, offsets_s=[0.0] * len(requests), on_result=run.warmup_results.append)

        requests = [_make_request(args, run.model, sample) for sample in samples]
        watch = asyncio.create_task(_watch_lag(run.lags_s))
        with tqdm(total=len(requests), unit="req", disable=args.disable_tqdm or None, leave=False) as bar:

            def on_result(result: ServeResult) -> None:
                run.results.append(result)
                bar.update()

            try:
                await load(requests, offsets_s=offsets_s, on_result=on_result)
            except asyncio.CancelledError:  # asyncio.run turns the first Ctrl-C into this
                run.interrupted = True
                if task := asyncio.current_task():
                    task.uncancel()
        watch.cancel()
    return run


def _make_samples(args: argparse.Namespace, rng: np.random.Generator) -> list[Sample]:
    """The prompts to measure, then those for warm-ups as far as the dataset has more."""
    num_samples = args.num_prompts + args.num_warmups
    tokenizer = None
    if args.tokenizer is not None:
        from qwen_engine.models.hub import resolve_model
        from qwen_engine.tokenization.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_folder(resolve_model(args.tokenizer, with_weights=False))
    if args.dataset_name == "custom":
        return serve_load.custom_samples(args.dataset_path, output_len=args.custom_output_len)[:num_samples]
    if args.dataset_name == "sharegpt":
        return serve_load.sharegpt_samples(
            args.dataset_path, rng, tokenizer, num_prompts=num_samples, output_len=args.sharegpt_output_len
        )
    maker = PromptMaker(rng, tokenizer, as_text=args.backend == "openai-chat")
    if args.dataset_name == "random":
        return serve_load.random_samples(
            maker,
            rng,
            num_samples,
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
        )
    return serve_load.prefix_repetition_samples(
        maker,
        rng,
        num_samples,
        prefix_len=args.prefix_repetition_prefix_len,
        suffix_len=args.prefix_repetition_suffix_len,
        num_prefixes=args.prefix_repetition_num_prefixes,
        output_len=args.prefix_repetition_output_len,
    )


def _make_request(args: argparse.Namespace, model: str, sample: Sample) -> ServeRequest:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if args.backend == "openai-chat":
        body |= {"messages": [{"role": "user", "content": sample.prompt}], "max_completion_tokens": sample.max_tokens}
    else:
        body |= {"prompt": sample.prompt, "max_tokens": sample.max_tokens}
    body["temperature"] = args.temperature
    if args.ignore_eos:
        body["ignore_eos"] = True
    body |= args.extra_body
    return ServeRequest(
        body=json.dumps(body).encode(), num_prompt_tokens=sample.num_prompt_tokens, max_tokens=sample.max_tokens
    )


async def _watch_lag(lags_s: list[float]) -> None:
    """Records how late this process wakes up: the error of every time it takes."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lags_s.append(max(loop.time() - due_s, 0.0))


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for a value no run can have."""
    for name, least in {
        "num_prompts": 0,
        "num_warmups": 0,
        "max_concurrency": 1,
        "random_input_len": 1,
        "random_output_len": 1,
        "random_prefix_len": 0,
        "custom_output_len": 1,
        "sharegpt_output_len": 1,
        "prefix_repetition_prefix_len": 0,
        "prefix_repetition_suffix_len": 1,
        "prefix_repetition_num_prefixes": 1,
        "prefix_repetition_output_len": 1,
        "seed": 0,
    }.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    for name in ("request_rate", "burstiness"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio is {args.random_range_ratio}; it must be at least 0 and below 1")
    if args.dataset_name in ("custom", "sharegpt") and args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path")


def _base_url(args: argparse.Namespace) -> str:
    if args.base_url is None:
        return f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    return args.base_url.rstrip("/").removesuffix("/v1")


def _url(args: argparse.Namespace) -> str:
    return _base_url(args) + (args.endpoint or ENDPOINTS[args.backend])


def _parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    slos = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        try:
            slos[name] = float(limit)
        except ValueError:
            slos[name] = math.nan
        if name not in ("ttft", "tpot", "e2el") or not 0 <= slos[name] < math.inf:
            raise ConfigError(f"--goodput takes ttft, tpot and e2el in ms, like ttft:500, not {shown(pair)}")
    return slos


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(METRICS):
        raise argparse.ArgumentTypeError(f"unknown metric {sorted(unknown)[0]!r}; known: {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(item) for item in text.split(","))
    except ValueError:
        values = (math.nan,)
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers from 0 to 100, like 50,99")
    return values


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _raise_file_limit() -> None:
    """One connection is one open file; the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
