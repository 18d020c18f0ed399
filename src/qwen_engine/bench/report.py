"""Write README.md and plots of all results in a folder: what was run, on what, when, by which command, and the figures.

Of results of one benchmark, model and device the newest speaks; older ones are counted. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_engine.bench import standing
from qwen_engine.bench.figures import LOAD_FIGURES, cell, figures_of, legend, loads_of, remarks
from qwen_engine.bench.output import add_results_dir_argument, number
from qwen_engine.bench.results import ResultError, device_label, model_label, read_result, write_atomically
from qwen_engine.config import EngineConfig

# Options that are not repeated with each figure: others tell the same, or they do not matter to speed.
_TOLD_ELSEWHERE = {
    "model",
    "device",
    "dtype",
    "tensor_parallel_size",
    "load_format",
    "skip_tokenizer_init",
    "max_model_len",
    "seed",
}
PLOT_FOLDER = "plots"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """A result and the file it came from."""

    file: str
    result: Mapping[str, Any]

    @property
    def model(self) -> str:
        return model_label(self.result)

    @property
    def setting(self) -> str:
        """Model, device, and the engine's options that are not the default, as a reader names them."""
        engine, parameters = self.result["engine_config"] or {}, self.result["parameters"]
        parts = [f"{self.model} on {device_label(self.result)}"]
        if engine.get("dtype"):
            parts.append(engine["dtype"])
        if "url" in parameters:
            parts.append(parameters["label"] or parameters["url"])
        if engine.get("tensor_parallel_size", 1) > 1:
            parts.append(f"TP={engine['tensor_parallel_size']}")
        for option in dataclasses.fields(EngineConfig):
            value = engine.get(option.name, option.default)
            if option.name not in _TOLD_ELSEWHERE and value != option.default:
                parts.append(f"{option.name}={value}")
        return ", ".join(parts)

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for results of which only the newest counts."""
        parameters = self.result["parameters"]
        skipped = ("prompt_seed", "stall_timeout_s", "purpose")
        settings = {key: value for key, value in parameters.items() if key not in skipped}
        return self.result["name"], self.setting, repr(sorted(settings.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_results_dir_argument(parser)


def run(args: argparse.Namespace) -> int:
    """`results report`: README.md and plots in the results' own folder."""
    entries, others = load(args.results_dir)
    if not entries:
        raise ResultError(f"no results in {args.results_dir}")
    plots = write_plots(newest(entries), args.results_dir)
    path = args.results_dir / "README.md"
    write_atomically(path, render(entries, others, plots).encode())
    without = "" if plots is not None else " (no plots: matplotlib is not installed; pip install 'qwen-engine[report]')"
    sys.stdout.write(f"{path}: {len(entries)} results, {len(plots or ())} plots{without}\n")
    return 0


def load(folder: Path) -> tuple[list[Entry], list[str]]:
    """All results of a folder by age, oldest first, and the names of JSON files that are none."""
    if not folder.is_dir():
        raise ResultError(f"{folder} is no folder; --results-dir says where the results are")
    entries, others = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            entries.append(Entry(path.name, read_result(path)))
        except ResultError:
            others.append(path.name)
    return sorted(entries, key=lambda entry: entry.result["created"]), others


def newest(entries: Sequence[Entry]) -> list[Entry]:
    """The last entry of each key, by benchmark and setting."""
    latest = {entry.key: entry for entry in entries}
    return sorted(latest.values(), key=lambda entry: [_by_number(part) for part in entry.key])


def _by_number(text: str) -> list[tuple[int, str]]:
    """Sorts like text, but the numbers in it like numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def render(entries: Sequence[Entry], others: Sequence[str], plots: Sequence[tuple[str, str]] | None) -> str:
    """The Markdown page. plots: (file, caption) of each."""
    shown = newest(entries)
    parts = [_head(shown, len(entries)), *_standings(entries)]
    for name in dict.fromkeys(entry.result["name"] for entry in shown if entry.result["name"] != standing.NAME):
        parts.append(_section(name, [entry for entry in shown if entry.result["name"] == name]))
    if plots:
        parts.append("## Plots\n\n" + "\n\n".join(f"![{caption}]({file})\n\n{caption}." for file, caption in plots))
    parts.append(_runs(shown))
    if others:
        parts.append("Other files here, of other programs: " + ", ".join(f"[{name}]({name})" for name in others) + ".")
    return "\n\n".join(parts) + "\n"


def _head(shown: Sequence[Entry], num_entries: int) -> str:
    bad = [entry for entry in shown if entry.result["status"] != "completed"]
    settings = "; ".join(dict.fromkeys(entry.setting for entry in shown))
    verdict = "All completed, all their checks passed."
    if bad:
        names = ", ".join(f"{entry.result['name']} ({entry.setting}): {entry.result['status']}" for entry in bad)
        verdict = f"**Not all is well**: {names}."
    older = num_entries - len(shown)
    return (
        "# Results\n\n"
        "Written by `python -m qwen_engine results report` from the JSON files beside it; do not edit.\n\n"
        f"{len(shown)} results of {settings}"
        + (f" ({older} older ones of the same runs are not shown)" if older else "")
        + f". {verdict}\n\n"
        "Prompts are random tokens, new in every run, and outputs greedy with end-of-sequence ignored, unless a table "
        "says otherwise. A load is requests × (prompt + output tokens), all sent at once. Where a table has no other "
        f"legend:\n\n{legend(LOAD_FIGURES)}"
    )


def _standings(entries: Sequence[Entry]) -> list[str]:
    """Every setting beside vLLM, floors and targets; of each figure the newest of all its runs."""
    settings: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if entry.result["name"] == standing.NAME:
            settings.setdefault(entry.setting, []).append(entry.result)
    if not settings:
        return []
    tables = {setting: standing.newest_rows(results) for setting, results in sorted(settings.items())}
    overview = [f"- **{setting}**: {standing.summarize(rows)}" for setting, rows in tables.items()]
    parts = ["## Standing", "\n".join(overview), standing.LEGEND]
    for setting, rows in tables.items():
        results = settings[setting]
        table = [list(standing.HEADINGS), ["---"] * len(standing.HEADINGS), *(row.cells() for row in rows)]
        parts += [f"### {setting}", "\n".join(map(_row, table))]
        last = results[-1]
        commit = f", commit {_short(last['git_commit'])}" if last["git_commit"] else ""
        read, matmul = (number(last["metrics"].get(f"floor_{name}")) for name in ("read_tb_s", "tflop_s"))
        parts.append(
            f"Last measured {last['created'][:10]}{commit}; floors at {read} TB/s and {matmul} TFLOP/s a device."
        )
        parts += [f"- {note}" for note in last["notes"]]
        failed = [check for check in last["checks"] if not check["passed"]]
        parts += [f"**Check failed**: {check['name']}: {check['detail']}" for check in failed]
    return parts


_PURPOSES = {
    "validate": "the engine against Transformers on the same weights",
    "long-context": "one prompt near the end of a context that YaRN has extended",
    "load": "a checkpoint of random weights from disk",
    "throughput": "many requests at once",
    "latency": "one batch, repeated",
    "startup": "fresh processes until the model is ready",
    "serve": "load on a server over HTTP",
    "sampling-cost": "a decode step with each kind of sampling parameters",
    "deterministic": "what the option `deterministic` costs",
    "interruption": "a long prompt that comes while others write",
    "server-cost": "what text and HTTP add to the engine",
    "lm-eval": "tasks of the lm-evaluation-harness",
}


def _section(name: str, entries: Sequence[Entry]) -> str:
    purpose = _PURPOSES.get(name) or entries[0].result["parameters"].get("purpose")
    figures = figures_of(name)
    lines = [f"## {name}" + (f": {purpose}" if purpose else ""), ""]
    headings = ["setting", "load", *(figure.label for figure in figures), "status"]
    lines += [_row(headings), _row(["---"] * len(headings))]
    for entry in entries:
        for load in loads_of(entry.result):
            cells = [cell(entry.result["metrics"], figure, load) for figure in figures]
            lines.append(_row([entry.setting, load.label, *cells, _status(entry.result)]))
    if figures is not LOAD_FIGURES and any(figure.meaning for figure in figures):
        lines += ["", legend(figures)]
    for entry in entries:
        lines += [line for remark in remarks(entry.result) for line in ("", f"{entry.setting}: {remark}")]
        for check in entry.result["checks"]:
            if not check["passed"]:
                lines += ["", f"**{entry.setting}: check failed**: {check['name']}: {check['detail']}"]
        lines += [line for note in entry.result["notes"] for line in ("", f"{entry.setting}: {note}.")]
    return "\n".join(lines)


def _status(result: Mapping[str, Any]) -> str:
    num_passed = sum(check["passed"] for check in result["checks"])
    checks = f", {num_passed}/{len(result['checks'])} checks" if result["checks"] else ""
    return result["status"] + checks


def _runs(shown: Sequence[Entry]) -> str:
    lines = ["## What was run", ""]
    for entry in shown:
        result = entry.result
        device = result["device"]
        libraries = ", ".join(f"{name} {version}" for name, version in result["libraries"].items() if version)
        gpus = [f"{gpu['used_bytes'] / GIB:.1f} GiB" for gpu in result["memory"]["gpus"] if gpu.get("used_bytes")]
        kv_tokens = result["memory"].get("kv_cache_tokens")
        facts = [
            result["created"].replace("T", " ").replace("+00:00", " UTC"),
            (f"{device['count']} × " if device["count"] else "")
            + (device["name"] or "a device that is not known")
            + (f" (driver {device['driver']})" if device["driver"] else ""),
            _shape(entry),
            f"KV cache of {kv_tokens:,} tokens" if kv_tokens else None,
            f"GPU memory in use {' + '.join(gpus)}" if gpus else None,
            f"commit {_short(result['git_commit'])}" if result["git_commit"] else None,
            libraries,
        ]
        lines += [
            f"- [{entry.file}]({entry.file}): {'; '.join(fact for fact in facts if fact)}\n\n"
            f"  ```\n  {result['command']}\n  ```",
        ]
    return "\n".join(lines)


def _shape(entry: Entry) -> str | None:
    """The model in a few words."""
    model, engine = entry.result["model_config"], entry.result["engine_config"]
    if model is None or engine is None:
        return None
    is_random = engine["load_format"] == "dummy" or entry.result["parameters"].get("random_weights")
    weights = "random weights" if is_random else "weights of the checkpoint"
    return (
        f"{entry.model}: {model['num_layers']} layers, hidden size {model['hidden_size']}, heads {model['num_heads']}/"
        f"{model['num_kv_heads']} of {model['head_dim']}, {engine['dtype']}, {weights}, "
        f"tensor_parallel_size {engine['tensor_parallel_size']}, max_model_len {engine['max_model_len']}"
    )


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write_plots(entries: Sequence[Entry], folder: Path) -> list[tuple[str, str]] | None:
    """Plots of what the entries hold, as (file relative to `folder`, caption); None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from qwen_engine.bench.plots import draw_all

    (folder / PLOT_FOLDER).mkdir(exist_ok=True)
    drawn = []
    for name, caption, content in draw_all(entries):
        file = f"{PLOT_FOLDER}/{name}.png"
        write_atomically(folder / file, content)
        drawn.append((file, caption))
    return drawn


def _short(commit: str) -> str:
    name, _, state = commit.partition("-")
    return f"{name[:12]}-{state}" if state else name[:12]
