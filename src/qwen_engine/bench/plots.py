"""The plots of a report, as PNG. Only `report` imports this, and only where matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from qwen_engine.bench import standing
from qwen_engine.bench.output import load_prefixes
from qwen_engine.bench.results import device_label
from qwen_engine.bench.roofline import CEILINGS

if TYPE_CHECKING:
    from qwen_engine.bench.report import Entry

GIB = 1 << 30
_MARKERS = "osD^vPX*"
Plot = tuple[str, str, Figure]


@dataclass(frozen=True, slots=True)
class _Load:
    """A measured load: of the engine in a setting or of vLLM beside it, and its figures under their own names."""

    setting: str
    vllm: str | None
    metrics: Mapping[str, float]


def draw_all(entries: Sequence[Entry]) -> Iterator[tuple[str, str, bytes]]:
    """(name, caption, PNG) of every plot for which there is data."""
    for draw in (_standing, _decode_speed, _roofline, _serving, _distributions, _memory):
        plot = draw(entries)
        if plot is not None:
            name, caption, figure = plot
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=90)
            yield name, caption, buffer.getvalue()


def _standing(entries: Sequence[Entry]) -> Plot | None:
    """Decode steps and prefill as shares of the floor, ours above vLLM's."""
    settings: dict[str, list[Any]] = {}
    for entry in sorted(entries, key=lambda entry: entry.result["created"]):
        if entry.result["name"] == standing.NAME:
            settings.setdefault(entry.setting, []).append(entry.result)
    tables = {
        setting: [row for row in standing.newest_rows(results) if row.floor and row.label.endswith(_SPEEDS)]
        for setting, results in settings.items()
    }
    tables = {setting: rows for setting, rows in sorted(tables.items()) if rows}
    if not tables:
        return None
    counts = [len(rows) for rows in tables.values()]
    figure = Figure(figsize=(9, 1.2 * len(tables) + 0.36 * sum(counts)), layout="constrained")
    panels = figure.subplots(len(tables), 1, squeeze=False, height_ratios=counts, sharex=True)[:, 0]
    for axes, (setting, rows) in zip(panels, tables.items()):
        places = np.arange(len(rows))[::-1]
        for offset, color, name, values in (
            (0.2, "tab:blue", "qwen-engine", [row.share_of_floor for row in rows]),
            (-0.2, "tab:gray", "vLLM, same run", [row.vllm_share_of_floor for row in rows]),
        ):
            axes.barh(places + offset, [100 * (value or 0) for value in values], height=0.38, color=color, label=name)
        axes.set_yticks(places, [row.label.split(", ")[0] for row in rows], fontsize=8)
        axes.axvline(100, color="black", linewidth=1)
        axes.set_title(setting, fontsize=9, loc="left")
        axes.grid(alpha=0.3, axis="x")
    panels[-1].set_xlabel("% of what the device's memory and arithmetic allow")
    _legend_below(figure, panels[0])
    return "standing", "How near the floor decode steps and prefill are, beside vLLM", figure


_SPEEDS = ("decode step, ms", "prefill, tok/s")


def _decode_speed(entries: Sequence[Entry]) -> Plot | None:
    """Decode speed against how many requests run at once; a colour for each model and device, vLLM hollow."""
    loads = [load for load in _loads(entries) if load.metrics.get("decode_tok_s")]
    if not loads:
        return None
    figure, axes = _figure("requests at once", "decode, tokens per second")
    for index, (setting, own) in enumerate(_by_setting(loads).items()):
        for vllm in dict.fromkeys(load.vllm for load in own):
            points = [(x.metrics["concurrency"], x.metrics["decode_tok_s"]) for x in own if x.vllm == vllm]
            label = setting if vllm is None else f"{vllm}, the same"
            fill = "full" if vllm is None else "none"
            axes.plot(
                *zip(*points),
                _MARKERS[index % len(_MARKERS)],
                color=f"C{index}",
                markersize=7,
                fillstyle=fill,
                label=label,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plain_ticks(axes)
    _legend_below(figure, axes)
    return (
        "decode-speed",
        "Decode speed against the number of requests that run at once (points of one colour differ in context length)",
        figure,
    )


def _serving(entries: Sequence[Entry]) -> Plot | None:
    """What users feel against what the server gives, a line for each server."""
    servers: dict[str, list[tuple[float, float, float, str]]] = {}
    for entry in entries:
        metrics, parameters = entry.result["metrics"], entry.result["parameters"]
        figures = [metrics.get(name) for name in ("output_throughput", "p99_ttft_ms", "p99_itl_ms")]
        if entry.result["name"] == "serve" and None not in figures:
            servers.setdefault(entry.setting, []).append((*figures, _rate(parameters)))
    if not servers:
        return None
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, column, label in zip(panels, (1, 2), ("p99 time to first token, ms", "p99 between two tokens, ms")):
        for index, (server, points) in enumerate(servers.items()):
            points.sort()
            axes.plot(
                [point[0] for point in points],
                [point[column] for point in points],
                "-" + _MARKERS[index % len(_MARKERS)],
            )
            axes.lines[-1].set_label(server)
            for point in points:
                axes.annotate(
                    point[3], (point[0], point[column]), textcoords="offset points", xytext=(6, 5), fontsize=7
                )
        _label(axes, "output tokens per second", label)
        axes.set_yscale("log")
        _plain_ticks(axes)
    _legend_below(figure, panels[0])
    return (
        "serving",
        "Latency against throughput of servers under load; beside each point, requests sent a second",
        figure,
    )


def _distributions(entries: Sequence[Entry]) -> Plot | None:
    """Cumulative distributions of time to first token and of the gaps between outputs, a row for each model."""
    models: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.result["distributions"]:
            models.setdefault(f"{entry.model} on {device_label(entry.result)}", []).append(entry)
    if not models:
        return None
    figure = Figure(figsize=(12, 0.6 + 3.4 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for row, (model, own) in zip(panels, models.items()):
        for axes, name, what in zip(row, ("ttft_s", "itl_s"), ("time to first token, ms", "between two tokens, ms")):
            for entry in own:
                for key, values in entry.result["distributions"].items():
                    if values and key.endswith(name):
                        share = np.linspace(0, 100, len(values))
                        label = _distribution_label(entry, key.removesuffix(name), model)
                        axes.plot(1e3 * np.asarray(values), share, label=label)
            _label(axes, what, "% of requests" if name == "ttft_s" else "% of gaps")
            axes.set_xscale("log")
            axes.set_title(model, fontsize=9, loc="left")
            _plain_ticks(axes)
        row[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return "latency", "Time to first token and between tokens: the share that is at most so long", figure


def _distribution_label(entry: Entry, prefix: str, model: str) -> str:
    rest = entry.setting.removeprefix(model).lstrip(", ")
    parameters = entry.result["parameters"]
    load = f"serve, {_rate(parameters)}" if "request_rate" in parameters else _load_name(entry, prefix)
    return f"{load}, {rest}" if rest else load


def _rate(parameters: Mapping[str, Any]) -> str:
    rate = parameters["request_rate"]
    return "all at once" if rate == "inf" else f"{rate:g}/s"


def _roofline(entries: Sequence[Entry]) -> Plot | None:
    """Decode steps below the roof of their device: speed of arithmetic against operations for each byte."""
    figures = ("decode_flop_per_byte", "decode_tflop_s_per_rank")
    loads = [load for load in _loads(entries) if all(load.metrics.get(name) for name in figures)]
    if not loads:
        return None
    figure, axes = _figure("operations per byte of memory traffic", "TFLOP/s per rank")
    for index, (setting, own) in enumerate(_by_setting(loads).items()):
        axes.plot(
            *zip(*((load.metrics[x], load.metrics[y]) for load in own for x, y in [figures])),
            _MARKERS[index % len(_MARKERS)],
        )
        axes.lines[-1].set(label=setting, markersize=7)
        for load in own:
            point = [load.metrics[name] for name in figures]
            count = f"{load.metrics['concurrency']:g}"
            axes.annotate(count, point, textcoords="offset points", xytext=(6, -8), fontsize=7)
    devices = sorted({device_label(entry.result).split("x")[0] for entry in entries} & set(CEILINGS))
    for device in devices:
        ceiling = CEILINGS[device]
        xs = np.geomspace(0.5, 1000, 200)
        roof = np.minimum(xs * ceiling.bytes_s, ceiling.flop_s) / 1e12
        label = f"{device}: {ceiling.bytes_s / 1e12:.2f} TB/s, {ceiling.flop_s / 1e12:.0f} TFLOP/s, measured"
        axes.plot(xs, roof, color="black", linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_ticks(axes)
    _legend_below(figure, axes)
    roofs = "(no limits are known for these devices)"
    if devices:
        roofs = "below the limits of the device, as benchmarks/kernels.py measured them"
    return "roofline", f"Decode steps {roofs}; beside each point, requests at once", figure


def _memory(entries: Sequence[Entry]) -> Plot | None:
    """What each rank's memory holds: the KV cache, and the rest."""
    bars: dict[str, tuple[float, float]] = {}
    for entry in entries:
        memory = entry.result["memory"]
        kv_bytes = memory.get("kv_cache_bytes_per_rank")
        if kv_bytes is None:
            continue
        for gpu in memory["gpus"]:
            if gpu.get("used_bytes"):
                rest = max(0, gpu["used_bytes"] - kv_bytes)
                bars[f"{entry.setting}\nGPU {gpu['index']}"] = (rest / GIB, kv_bytes / GIB)
        if not memory["gpus"] and memory["host_peak_bytes"]:
            bars[entry.setting] = (memory["host_peak_bytes"] / GIB, 0.0)
    if not bars:
        return None
    figure, axes = _figure("GiB", "", height=1.4 + 0.45 * len(bars))
    rest, kv = (np.array(values) for values in zip(*bars.values()))
    names = list(bars)
    axes.barh(names, rest, height=0.5, label="weights, workspaces, process", color="tab:blue")
    if kv.any():
        axes.barh(names, kv, height=0.5, left=rest, label="KV cache", color="tab:orange")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return "memory", "Memory in use while the engine runs (on a CPU: the most that the process had resident)", figure


def _loads(entries: Sequence[Entry]) -> list[_Load]:
    """Every measured load of the results; of vLLM too, where it ran beside the engine."""
    found = []
    for entry in entries:
        metrics = entry.result["metrics"]
        for prefix in load_prefixes(metrics):
            own = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
            if own.get("concurrency"):
                vllm = f"vLLM {entry.result['libraries'].get('vllm') or ''}".rstrip()
                found.append(_Load(entry.setting, vllm if prefix.startswith("vllm_") else None, own))
    return found


def _by_setting(loads: Sequence[_Load]) -> dict[str, list[_Load]]:
    settings: dict[str, list[_Load]] = {}
    for load in loads:
        settings.setdefault(load.setting, []).append(load)
    return settings


def _load_name(entry: Entry, prefix: str) -> str:
    """The benchmark, its phase and how many requests run at once."""
    concurrency = entry.result["metrics"].get(f"{prefix}concurrency")
    count = f" × {concurrency:g}" if concurrency else ""
    return f"{entry.result['name']} {prefix.rstrip('_')}".rstrip() + count


def _figure(x_label: str, y_label: str, height: float = 5.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.subplots()
    _label(axes, x_label, y_label)
    return figure, axes


def _legend_below(figure: Figure, axes: Axes) -> None:
    """Outside of the axes, where it hides no point, however many there are."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)


class _PlainLogFormatter(LogFormatter):
    """Labels the ticks that matplotlib would, with numbers that tell them apart also below 1."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _plain_ticks(axes: Axes) -> None:
    """Numbers such as 60 and 200, not powers, on logarithmic axes."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(_PlainLogFormatter(labelOnlyBase=False, minor_thresholds=(1.2, 0.4)))


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
