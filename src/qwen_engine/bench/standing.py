"""Where the engine stands: each figure beside vLLM's of the same run, the machine's floor and the targets.

`benchmarks/compare.py` writes results named "compare", whose metrics are `<figure>`, `vllm_<figure>`,
`floor_<figure>`, `target_<figure>`, `stretch_<figure>`, `recorded_<figure>` and `recorded_vllm_<figure>`;
`parameters.figures` has the label of each figure, `parameters.recorded` who holds the recorded one. A floor is what the
machine's memory and arithmetic allow at best; of a figure where more is better it is the most.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_engine.bench.compare import direction
from qwen_engine.bench.output import number

NAME = "compare"
LEGEND = (
    "*× vLLM*: how many times as fast (or as large) as vLLM in the same run, above 1 is better; in brackets against "
    "what vLLM 0.24.0 reached in an earlier run on the same machine. *Floor*: what the device's memory bandwidth and "
    "arithmetic allow at best, from the model's shape. *Best recorded*: of vLLM, SGLang, nano-vllm and mini-sglang."
)
HEADINGS = (
    "figure",
    "ours",
    "vLLM",
    "× vLLM",
    "floor",
    "% of floor",
    "best recorded",
    "target",
    "stretch",
    "reached",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure and what it is held against; None where it was not measured or is not known."""

    figure: str
    label: str
    ours: float | None
    vllm: float | None
    vllm_recorded: float | None
    floor: float | None
    recorded: float | None
    recorded_by: str
    target: float | None
    stretch: float | None

    @property
    def speedup(self) -> float | None:
        """How many times as good as vLLM in the same run; above 1 is better."""
        return self._gain(self.ours, self.vllm)

    @property
    def speedup_over_recorded(self) -> float | None:
        """The same against vLLM's recorded figure, where the same run has none."""
        return self._gain(self.ours, self.vllm_recorded) if self.vllm is None else None

    @property
    def share_of_floor(self) -> float | None:
        """The part of what the machine allows, 1 at best."""
        return self._gain(self.ours, self.floor)

    @property
    def vllm_share_of_floor(self) -> float | None:
        """The same of vLLM in the same run."""
        return self._gain(self.vllm, self.floor)

    @property
    def reached(self) -> str:
        """Which of its aims the figure meets: "stretch", "target" or "no"; "" without an aim or a figure."""
        gains = [self._gain(self.ours, aim) for aim in (self.target, self.stretch)]
        if gains[0] is None:
            return ""
        return "stretch" if (gains[1] or 0) >= 1 else "target" if gains[0] >= 1 else "no"

    def _gain(self, value: float | None, base: float | None) -> float | None:
        """How many times as good a value is as the base."""
        if not value or not base:
            return None
        return value / base if direction(self.figure) > 0 else base / value

    def cells(self) -> list[str]:
        """What HEADINGS name, as text."""
        share, earlier = self.share_of_floor, self.speedup_over_recorded
        vllm, times = number(self.vllm), "–" if self.speedup is None else f"{self.speedup:.2f}"
        if earlier is not None:
            vllm, times = f"({number(self.vllm_recorded)})", f"({earlier:.2f})"
        recorded = "–" if self.recorded is None else f"{number(self.recorded)} ({self.recorded_by})"
        return [
            self.label,
            number(self.ours),
            vllm,
            times,
            number(self.floor),
            "–" if share is None else f"{100 * share:.0f}",
            recorded,
            number(self.target),
            number(self.stretch),
            self.reached or "–",
        ]


def rows_of(result: Mapping[str, Any]) -> list[Row]:
    """A row for each figure that either engine has."""
    metrics, parameters = result["metrics"], result["parameters"]
    rows = []
    for figure, label in parameters["figures"].items():
        of = {kind: metrics.get(f"{kind}_{figure}") for kind in ("vllm", "floor", "recorded", "target", "stretch")}
        row = Row(
            figure,
            label,
            metrics.get(figure),
            vllm_recorded=metrics.get(f"recorded_vllm_{figure}"),
            recorded_by=parameters["recorded"].get(figure, ""),
            **of,
        )
        if row.ours is not None or row.vllm is not None:
            rows.append(row)
    return rows


def newest_rows(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows of all results, oldest first; of each figure the newest, whole: a ratio is of one run."""
    found: dict[str, Row] = {}
    for result in results:
        found |= {row.figure: row for row in rows_of(result)}
    return list(found.values())


def summarize(rows: Sequence[Row]) -> str:
    """The rows in one sentence."""
    parts = []
    same_run = [row.speedup for row in rows if row.speedup is not None]
    earlier = [row.speedup_over_recorded for row in rows if row.speedup_over_recorded is not None]
    for gains, whose in ((same_run, "vLLM in the same run"), (earlier, "what vLLM reached in an earlier run")):
        if gains:
            spread = f"median × {statistics.median(gains):.2f}, worst × {min(gains):.2f}, best × {max(gains):.2f}"
            num_better = sum(gain > 1 for gain in gains)
            parts.append(f"better than {whose} in {num_better} of {len(gains)} figures ({spread})")
    if not parts:
        parts.append("not compared with vLLM")
    for kind, figure in (("decode steps", "_decode_step_ms"), ("prefill", "_prefill_tok_s")):
        shares = [row.share_of_floor for row in rows if row.figure.endswith(figure) and row.share_of_floor is not None]
        if shares:
            ends = dict.fromkeys(f"{100 * share:.0f}" for share in (min(shares), max(shares)))
            parts.append(f"{kind} at {' to '.join(ends)} % of the floor")
    aims = [row for row in rows if row.reached]
    if aims:
        num_reached = sum(row.reached != "no" for row in aims)
        parts.append(f"{num_reached} of {len(aims)} targets reached")
    return ", ".join(parts) + "."


def text_table(rows: Sequence[Row]) -> list[str]:
    """The rows as aligned text under HEADINGS."""
    cells = [list(HEADINGS), *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for line in cells:
        padded = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        lines.append("  ".join([line[0].ljust(widths[0]), *padded]))
    return lines
