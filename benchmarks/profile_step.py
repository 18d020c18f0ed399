"""Where the time of one step goes: microseconds per part, gaps between kernels, idle time of the GPU.

    PYTHONPATH=src python benchmarks/profile_step.py --model FOLDER --batch-sizes 1,16,256 [--tensor-parallel-size 2]
    PYTHONPATH=src python benchmarks/profile_step.py --model FOLDER --batch-sizes "" --prefill 1x128,8x1024

FOLDER needs a config.json only; weights are random. An eager engine runs first, with every launch under the name of its
part; the kernels of a CUDA graph, which come without names, are then those at the same places of the sequence. On a CPU
there is the eager engine only, and operators stand for kernels. With several ranks, rank 0 is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from qwen_engine import LLM, SamplingParams, kernels
from qwen_engine.distributed.tp_group import TPGroup
from qwen_engine.engine.decode_step import DecodeStep
from qwen_engine.engine.mixed_step import MixedStep
from qwen_engine.engine_args import HelpFormatter
from qwen_engine.errors import QwenEngineError
from qwen_engine.layers.embedding import VocabParallelEmbedding

OF_FUNCTION = {
    "embed_tokens": "embedding",
    "qk_norm_rope_kv_write": "rope, KV write",
    "split_decodes": "attention",
    "chunk_tiles": "attention",
    "decode_attention": "attention",
    "prefill_attention": "attention",
    "push_add_rms_norm": "all-reduce",
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "decode_inputs": "sampling",
    "slot_argmax": "sampling",
    "advance_to_best": "sampling",
}
OF_MODULE = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up, swiglu", "down_proj": "down"}
PARTS = (
    "embedding",
    "norms",
    "qkv",
    "rope, KV write",
    "attention",
    "o",
    "gate_up, swiglu",
    "down",
    "all-reduce",
    "lm_head",
    "sampling",
    "other",
)
CALL = "call:"  # prefix of the annotation around each captured part of a step
MAX_NUM_BATCHED_TOKENS = 8192
WARM_UP_STEPS = 4
KERNELS, LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel, or an operator on a CPU. call: start of the annotated call it belongs to; launch: what started it."""

    name: str
    start_us: float
    duration_us: float
    part: str
    call: float | None
    launch: int | None


@contextlib.contextmanager
def annotated(model: torch.nn.Module) -> Iterator[None]:
    """Launches happen under the names of their parts; where names are nested, the innermost counts."""

    def wrap(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            with record_function(name(*args)):
                return function(*args, **options)

        return wrapped

    targets: list[tuple[Any, str, Callable[..., str]]] = [
        (kernels, function, lambda *_, part=part: part) for function, part in OF_FUNCTION.items()
    ]
    targets += [
        (VocabParallelEmbedding, "logits_shard", lambda *_: "lm_head"),
        (TPGroup, "_reduce", lambda *_: "all-reduce"),
        (DecodeStep, "_launch", lambda _, name, size: CALL + name),
        (MixedStep, "_forward", lambda *_: CALL + "exact"),
        (MixedStep, "_forward_padded", lambda *_: CALL + "padded"),
    ]
    for path, module in model.named_modules():
        part = OF_MODULE.get(path.rpartition(".")[2])
        if part is not None:
            targets.append((module, "forward", lambda *_, part=part: part))
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in targets:
            own = attribute in vars(owner)
            original = getattr(owner, attribute)
            setattr(owner, attribute, wrap(original, name))
            undo = (setattr, owner, attribute, original) if own else (delattr, owner, attribute)
            stack.callback(*undo)
        yield


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """All kernels of a Chrome trace, or, when it has none, all outermost operators, by start."""
    events = [event for event in trace["traceEvents"] if "dur" in event]
    launched_at = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in LAUNCHES and "args" in e}
    work = [(launched_at.get(e["args"].get("correlation"), e["ts"]), e) for e in events if e.get("cat") in KERNELS]
    if not work:
        end = 0.0
        for event in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])):
            if event["ts"] >= end:
                end = event["ts"] + event["dur"]
                work.append((event["ts"], event))
    names = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: (e["ts"], -e["dur"]))
    spans, stack, next_name = [], [], 0
    for moment, event in sorted(work, key=lambda pair: pair[0]):
        while next_name < len(names) and names[next_name]["ts"] <= moment:
            stack.append(names[next_name])
            next_name += 1
            stack = [name for name in stack if name["ts"] + name["dur"] >= stack[-1]["ts"]]
        stack = [name for name in stack if name["ts"] + name["dur"] >= moment]
        part = next((name["name"] for name in reversed(stack) if name["name"] in PARTS), "other")
        call = next((name["ts"] for name in stack if name["name"].startswith(CALL)), None)
        launch = event.get("args", {}).get("correlation")
        spans.append(Span(event["name"], event["ts"], event["dur"], part, call, launch))
    return sorted(spans, key=lambda span: span.start_us)


def by_key(spans: list[Span], key: Callable[[Span], Any]) -> list[list[Span]]:
    found: dict[Any, list[Span]] = defaultdict(list)
    for span in spans:
        if key(span) is not None:
            found[key(span)].append(span)
    return list(found.values())


def with_parts(spans: list[Span], eager: list[Span]) -> list[list[Span]]:
    """The graph launches among `spans`, each kernel with the part it has in the eager calls.

    By place where a launch has as many kernels as an eager call, else by name.
    """
    calls = {len(call): call for call in by_key(eager, lambda span: span.call)}
    part_of_name = {span.name: span.part for span in eager}
    graphs = [launch for launch in by_key(spans, lambda span: span.launch) if len(launch) > 1]
    found = []
    for launch in graphs:
        same = calls.get(len(launch))
        parts = [s.part for s in same] if same else [part_of_name.get(s.name, "other") for s in launch]
        found.append(
            [
                Span(span.name, span.start_us, span.duration_us, part, launch[0].start_us, span.launch)
                for span, part in zip(launch, parts)
            ]
        )
    return found


def idle_share(spans: list[Span]) -> float:
    """Share of the time from the first kernel to the last in which none ran."""
    busy, end = 0.0, spans[0].start_us
    for span in spans:
        span_end = span.start_us + span.duration_us
        busy += max(0.0, span_end - max(end, span.start_us))
        end = max(end, span_end)
    return 1 - busy / (end - spans[0].start_us)


def summary(calls: list[list[Span]], spans: list[Span], num_steps: int) -> dict[str, float]:
    """Microseconds per step of each part, of gaps inside the calls and of everything; the idle share in percent.

    Kernels that start early wait for the one before, so a kernel counts from that one's end on.
    """
    figures = dict.fromkeys(PARTS, 0.0)
    gaps = 0.0
    for call in calls:
        end = call[0].start_us
        for span in call:
            gaps += max(0.0, span.start_us - end) / num_steps
            begin, end = max(span.start_us, end), max(span.start_us + span.duration_us, end)
            figures[span.part] += (end - begin) / num_steps
    figures = {part: value for part, value in figures.items() if value}
    whole = max(span.start_us + span.duration_us for span in spans) - spans[0].start_us
    return {**figures, "gaps": gaps, "step": whole / num_steps, "idle %": 100 * idle_share(spans)}


def profiled_steps(llm: LLM, batch: int, context: int, num_steps: int, *, names: bool) -> list[Span]:
    """The spans of `num_steps` decode steps of the engine, after a warm-up."""
    vocab = llm.core.model_config.vocab_size
    prompts = torch.randint(0, vocab, (batch, context), generator=torch.Generator().manual_seed(0)).tolist()
    max_tokens = llm.core.setup.max_model_len - context  # enough to keep the first going until the last has started
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    states, steps = llm.track(prompts, params)
    while min(state.num_output_tokens for state in states) < WARM_UP_STEPS:
        next(steps)
    with profiling(llm, names) as profiler:
        for _ in range(num_steps):
            next(steps)
    steps.close()
    return spans_from(profiler)


def profiled_prefills(llm: LLM, rows: int, length: int, num_steps: int, *, names: bool) -> list[Span]:
    """The spans of `num_steps` steps that each compute `rows` prompts of `length` tokens, after one."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, llm.core.model_config.vocab_size, (rows, length), generator=generator).tolist()

    def prefill() -> None:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)

    prefill()
    with profiling(llm, names) as profiler:
        for _ in range(num_steps):
            prefill()
    return spans_from(profiler)


@contextlib.contextmanager
def profiling(llm: LLM, names: bool) -> Iterator[profile]:
    """Records the GPU's work, or the CPU's; with `names`, launches under the names of their parts."""
    is_cuda = llm.core.setup.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    model = llm.core._executor.runner.model
    with annotated(model) if names else contextlib.nullcontext(), profile(activities=activities) as profiler:
        yield profiler
        if is_cuda:
            torch.cuda.synchronize()


def spans_from(profiler: profile) -> list[Span]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return spans_of(json.loads(path.read_text()))


def _split_pair(pair: str) -> list[str]:
    return pair.split("x") if pair else ["", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder with config.json, or 'demo'")
    parser.add_argument("--batch-sizes", default="1,16,256", help="rows of the decode steps (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each decoding request")
    parser.add_argument("--prefill", default="", help="prompts and their tokens in a step, as in 1x128,8x1024")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-custom-all-reduce", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        batches = [int(size) for size in args.batch_sizes.split(",") if size]
        prefills = [(int(rows), int(length)) for rows, length in map(_split_pair, args.prefill.split(",")) if rows]
    except ValueError:
        parser.error("--batch-sizes takes numbers as in 1,16 and --prefill pairs as in 1x128,8x1024")
    if not batches and not prefills:
        parser.error("nothing to profile: both --batch-sizes and --prefill are empty")
    num_rows = max([*batches, *(rows for rows, _ in prefills)])
    num_tokens = max([MAX_NUM_BATCHED_TOKENS, num_rows, *(rows * length for rows, length in prefills)])
    prefill_steps = -(-max(batches, default=0) * args.context // MAX_NUM_BATCHED_TOKENS)
    decode_len = args.context + WARM_UP_STEPS + args.steps + 8 + 2 * prefill_steps
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": args.tensor_parallel_size,
        "enable_custom_all_reduce": args.enable_custom_all_reduce,
        "dtype": args.dtype,
        "device": args.device,
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": num_tokens,
        "max_model_len": max([decode_len, *(length + 1 for _, length in prefills)]),
        "enable_prefix_caching": False,
    }
    profiles: dict[str, Callable[..., list[Span]]] = {
        f"batch {batch}, context {args.context}": partial(profiled_steps, batch=batch, context=args.context)
        for batch in batches
    }
    for rows, length in prefills:
        profiles[f"prefill of {rows} x {length}"] = partial(profiled_prefills, rows=rows, length=length)
    tables: dict[str, dict[str, dict[str, float]]] = {}
    with LLM(args.model, enforce_eager=True, **options) as llm:
        has_graphs = llm.core.setup.device.type == "cuda"
        eager = {name: run(llm, num_steps=args.steps, names=True) for name, run in profiles.items()}
        for name, spans in eager.items():
            tables[name] = {"eager": summary(by_key(spans, lambda span: span.call), spans, args.steps)}
    if has_graphs:
        with LLM(args.model, **options) as llm:
            for name, run in profiles.items():
                spans = run(llm, num_steps=args.steps, names=False)
                if calls := with_parts(spans, eager[name]):  # the largest steps have no graph
                    tables[name]["graph"] = summary(calls, spans, args.steps)
    for name, columns in tables.items():
        print(f"{name}: us per step")
        for part in dict.fromkeys(part for column in columns.values() for part in column):
            cells = "  ".join(f"{kind} {column.get(part, 0.0):10.1f}" for kind, column in columns.items())
            print(f"  {part:18s}{cells}")
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except QwenEngineError as error:
        sys.exit(f"error: {error}")
