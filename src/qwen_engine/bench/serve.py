"""`bench serve`: load on a running OpenAI-compatible server, and what its users would feel.

    flags ─► Samples (serve_load) ─► ServeRequests ─► ServeResults (serve_client) ─► report (serve_report)
                                                                                     table on stdout, JSON in a file

Flags and JSON keys are those of `vllm bench serve`, with one difference: without `--seed` every run draws new prompts,
because a repeated run would measure the server's prefix cache. Ctrl-C ends the run and reports the requests that had
ended. The command line calls `add_arguments` and `run`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import functools
import itertools
import json
import math
import os
import resource
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from qwen_engine.bench import serve_client, serve_load
from qwen_engine.bench.results import check_writable, write_atomically
from qwen_engine.bench.serve_client import ENDPOINTS, ServeRequest, ServeResult
from qwen_engine.bench.serve_load import PromptMaker, Sample
from qwen_engine.bench.serve_report import METRICS, find_warnings, render, request_rows, summarize
from qwen_engine.errors import ConfigError, shown

LAG_PERIOD_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench serve` to `parser`."""
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=sorted(ENDPOINTS), default="openai", help="completions (default), or chat")
    server.add_argument("--base-url", help="like http://host:8000; instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--endpoint", help="path of the API (default: that of the backend)")
    server.add_argument("--model", help="model name to send (default: the first that the server lists)")
    server.add_argument("--temperature", type=float, default=0.0, help="0 (default) always takes the likeliest token")
    server.add_argument("--ignore-eos", action="store_true", help="ask for outputs of exactly the wanted length")
    server.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields of each request"
    )

    data = parser.add_argument_group("prompts (lengths in tokens)")
    names = ("random", "custom", "sharegpt", "prefix_repetition")
    data.add_argument("--dataset-name", choices=names, default="random")
    data.add_argument("--dataset-path", type=Path, help="the file of custom (JSON lines with 'prompt') and sharegpt")
    data.add_argument("--tokenizer", help="model folder or repository; makes lengths of random prompts exact")
    data.add_argument("--num-prompts", type=int, default=1000)
    data.add_argument("--num-warmups", type=int, default=0, help="requests sent before, and not measured")
    data.add_argument("--seed", type=int, help="repeat the prompts and arrivals of that seed (default: new ones)")
    data.add_argument("--random-input-len", type=int, default=1024)
    data.add_argument("--random-output-len", type=int, default=128)
    data.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share up and down")
    data.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all prompts share, added in front")
    data.add_argument("--custom-output-len", type=int, default=256)
    data.add_argument("--sharegpt-output-len", type=int, help="instead of the length of the recorded answer")
    data.add_argument("--prefix-repetition-prefix-len", type=int, default=256)
    data.add_argument("--prefix-repetition-suffix-len", type=int, default=256)
    data.add_argument("--prefix-repetition-num-prefixes", type=int, default=10)
    data.add_argument("--prefix-repetition-output-len", type=int, default=128)

    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=math.inf, help="requests per second (default inf: at once)")
    load.add_argument("--burstiness", type=float, default=1.0, help="shape of the gaps: 1 Poisson, less is burstier")
    load.add_argument("--max-concurrency", type=int, help="most requests in flight; with rate inf a closed loop")

    report = parser.add_argument_group("report")
    report.add_argument("--percentile-metrics", type=_metrics, default=METRICS, help=f"default {','.join(METRICS)}")
    report.add_argument("--metric-percentiles", type=_percentiles, default=(50, 90, 95, 99), help="default 50,90,95,99")
    report.add_argument("--goodput", nargs="+", metavar="METRIC:MS", help="SLOs, like ttft:500 tpot:50 e2el:3000")
    report.add_argument("--save-result", action="store_true", help="write the report as JSON")
    report.add_argument("--save-detailed", action="store_true", help="also one row per request, with its text")
    report.add_argument("--result-dir", type=Path, default=Path())
    report.add_argument("--result-filename", help="default: named after the backend, load, model and time")
    report.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark, prints the table and writes the file; 1 if no request succeeded, 130 if interrupted."""
    _raise_file_limit()
    if args.save_result or args.save_detailed:
        check_writable(args.result_dir)
    report = asyncio.run(benchmark(args))
    sys.stdout.write(render(report))
    if args.save_result or args.save_detailed:
        path = args.result_dir / (args.result_filename or _file_name(report))
        write_atomically(path, (json.dumps(report, allow_nan=False, indent=1) + "\n").encode())
        sys.stdout.write(f"saved to {path}\n")
    if report["interrupted"]:
        return 130
    return 1 if report["failed"] and not report["completed"] else 0


async def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The report of one run, ready for strict JSON. Raises ConfigError for flags or servers that cannot work."""
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
    report = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": args.backend,
        "url": _url(args),
        "model_id": measured.model,
        "tokenizer_id": args.tokenizer,
        "dataset_name": args.dataset_name,
        "num_prompts": len(samples),
        "num_warmups": len(warmups),
        "warmups_failed": sum(result.error is not None for result in measured.warmup_results),
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "ignore_eos": args.ignore_eos,
        "temperature": args.temperature,
        "extra_body": args.extra_body,
        "seed": seed,
        "new_prompts": args.seed is None and args.dataset_name in ("random", "prefix_repetition"),
        "goodput_slos_ms": slos,
        "interrupted": measured.interrupted,
        "unfinished": len(samples) - len(results),
        "client_lag_p99_ms": float(np.percentile(measured.lags_s, 99)) * 1e3 if measured.lags_s else None,
        **summarize(results, metrics=args.percentile_metrics, percentiles=args.metric_percentiles, slos=slos),
    }
    report["warnings"] = find_warnings(args, report, results, reused_warmups=bool(warmups) and not spare)
    if args.save_detailed:
        report["requests"] = request_rows(results)
    return report


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


def _file_name(report: Mapping[str, Any]) -> str:
    concurrency = f"-concurrency{report['max_concurrency']}" if report["max_concurrency"] else ""
    model = report["model_id"].rstrip("/").rsplit("/", 1)[-1]
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{report['backend']}-{report['request_rate']}qps{concurrency}-{model}-{stamp}.json"


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
