"""The plots of a report, as PNG. Only `report` imports this, and only where matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from qwen_engine.bench.output import load_prefixes
from qwen_engine.bench.results import device_label
from qwen_engine.bench.roofline import CEILINGS

if TYPE_CHECKING:
    from qwen_engine.bench.report import Entry

GIB = 1 << 30
_MARKERS = "osD^vPX*"


def draw_all(entries: Sequence[Entry]) -> Iterator[tuple[str, str, bytes]]:
    """(name, caption, PNG) of every plot for which there is data."""
    for draw in (_decode_speed, _distributions, _memory, _roofline):
        plot = draw(entries)
        if plot is not None:
            name, caption, figure = plot
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=90)
            yield name, caption, buffer.getvalue()


Plot = tuple[str, str, Figure]


def _decode_speed(entries: Sequence[Entry]) -> Plot | None:
    """Decode speed against how many requests run at once, a line for each model and device."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    for entry in entries:
        for label, prefix, metrics in _loads(entry):
            concurrency, speed = metrics.get(f"{prefix}concurrency"), metrics.get(f"{prefix}decode_tok_s")
            if concurrency and speed:
                points.setdefault(entry.setting, []).append((concurrency, speed, label))
    if not points:
        return None
    figure, axes = _figure("requests at once", "decode, tokens per second")
    for marker, (setting, values) in zip(_MARKERS * len(points), points.items()):
        values.sort()
        xs, ys, _ = zip(*values)
        axes.plot(xs, ys, marker, markersize=7, label=setting)
        for x, y, label in values:
            axes.annotate(label, (x, y), textcoords="offset points", xytext=(7, -3), fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0.25, y=0.15)
    _plain_ticks(axes)
    axes.legend(fontsize=8)
    return "decode-speed", "Decode speed against the number of requests that run at once", figure


def _distributions(entries: Sequence[Entry]) -> Plot | None:
    """Cumulative distributions of time to first token and of the gaps between outputs."""
    drawn = [entry for entry in entries if entry.result["distributions"]]
    if not drawn:
        return None
    figure = Figure(figsize=(10, 5), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2), ("ttft_s", "itl_s"), ("time to first token, ms", "between two tokens, ms")
    ):
        for entry in drawn:
            for key, values in entry.result["distributions"].items():
                if values and key.endswith(name):
                    load = _load_name(entry, key.removesuffix(name))
                    share = np.linspace(0, 100, len(values))
                    axes.plot(1e3 * np.asarray(values), share, label=f"{load}, {entry.setting}")
        _label(axes, label, "% of requests" if name == "ttft_s" else "% of gaps")
        axes.set_xscale("log")
        _plain_ticks(axes)
    _legend_below(figure, axes)
    return (
        "latency",
        "Time to first token and between tokens: the share that is at most so long",
        figure,
    )


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
        if not memory["gpus"]:
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


def _roofline(entries: Sequence[Entry]) -> Plot | None:
    """Decode steps below the roof of their device: speed of arithmetic against operations for each byte."""
    points: dict[str, list[tuple[float, float]]] = {}
    devices: set[str] = set()
    for entry in entries:
        for label, prefix, metrics in _loads(entry):
            x, y = metrics.get(f"{prefix}decode_flop_per_byte"), metrics.get(f"{prefix}decode_tflop_s_per_rank")
            if x and y:
                points.setdefault(f"{label}, {entry.setting}", []).append((x, y))
                devices.add(device_label(entry.result).split("x")[0])
    if not points:
        return None
    figure, axes = _figure("operations per byte of memory traffic", "TFLOP/s per rank")
    for marker, (name, values) in zip(_MARKERS * len(points), points.items()):
        axes.plot(*zip(*values), marker, markersize=7, label=name)
    known = [device for device in sorted(devices) if device in CEILINGS]
    for device in known:
        ceiling = CEILINGS[device]
        xs = np.geomspace(0.5, 1000, 200)
        roof = np.minimum(xs * ceiling.bytes_s, ceiling.flop_s) / 1e12
        label = f"{device}: {ceiling.bytes_s / 1e12:.2f} TB/s, {ceiling.flop_s / 1e12:.0f} TFLOP/s"
        axes.plot(xs, roof, color="black", linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_ticks(axes)
    _legend_below(figure, axes)
    roofs = "below the measured limits of the device" if known else "(no limits are known for these devices)"
    return "roofline", f"Decode steps {roofs}", figure


def _loads(entry: Entry) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(label, prefix of its metrics, metrics) of each load of a result."""
    metrics = entry.result["metrics"]
    return [(_load_name(entry, prefix), prefix, metrics) for prefix in load_prefixes(metrics)]


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


def _plain_ticks(axes: Axes) -> None:
    """Numbers such as 60 and 200, not powers, on logarithmic axes."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.4)))


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
