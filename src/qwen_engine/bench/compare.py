"""Compare two results metric by metric. The exit code is 1 if the new one is worse by more than the tolerance, if a
check fails that passed, or if a figure is gone; 2 if one of them cannot be read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_engine.bench.output import fraction, number
from qwen_engine.bench.results import device_label, read_result
from qwen_engine.errors import shown

USAGE = "OLD NEW [options]"
# Of a metric's name, phases in front and all: what tells that more is better, or less. Others are no judgement.
_HIGHER = re.compile(
    r"(_tok_s|_per_s|throughput|goodput|hit_rate|speedup|_t(b|flop)_s_per_rank|kv_cache_tokens|_gb_per_s|_acc|_acc_norm|_exact_match)$"
)
_LOWER = re.compile(r"(_s|_ms|_bytes|preemptions|^failed|num_failed|^wrong|perplexity|error_(mean|max))$")
# Figures of other programs, of the load generator and of the hardware: no judgement of this engine.
_NOT_OURS = ("vllm_", "transformers_", "client_lag", "floor_", "target_", "stretch_", "recorded_")


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of both results. verdict: "better", "worse", "gone", "new" or "" for no judgement."""

    name: str
    old: float | None
    new: float | None
    change: float | None
    verdict: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, help="the result to measure against")
    parser.add_argument("new", type=Path, help="the result in question")
    parser.add_argument("--tolerance", default="3%", metavar="SHARE", help="how much worse a figure may be")


def run(args: argparse.Namespace) -> int:
    """`results compare`: the table on stdout, the verdict as exit code."""
    tolerance = fraction(args.tolerance)
    old, new = read_result(args.old), read_result(args.new)
    lines = compare(old, new, tolerance)
    failures = new_failures(old, new)
    sys.stdout.write("\n".join([*differences(old, new), *table(lines), *failures]) + "\n")
    num_worse = sum(line.verdict in ("worse", "gone") for line in lines)
    if num_worse or failures:
        sys.stdout.write(f"{num_worse} figures worse by more than {100 * tolerance:g} %, {len(failures)} failures\n")
        return 1
    sys.stdout.write(f"no regression beyond {100 * tolerance:g} %\n")
    return 0


def direction(name: str) -> int:
    """1 where a larger figure is better, -1 where a smaller one is, 0 where neither can be said."""
    if name.startswith("std_") or "_std_" in name or name.startswith(_NOT_OURS):
        return 0
    if _HIGHER.search(name):
        return 1
    return -1 if _LOWER.search(name) else 0


def compare(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> list[Line]:
    """A line for every metric of either result, in the order of the old one. tolerance: a share, 0.03 is 3 %."""
    before, after = old["metrics"], new["metrics"]
    return [_line(name, before.get(name), after.get(name), tolerance) for name in {**before, **after}]


def _line(name: str, old: float | None, new: float | None, tolerance: float) -> Line:
    sign = direction(name)
    if old is None or new is None:
        verdict = "" if old is None and new is None else "new" if old is None else "gone" if sign else ""
        return Line(name, old, new, None, verdict)
    change = (new - old) / abs(old) if old else None
    # From zero no share can be told, yet leaving it is a change.
    gain = sign * (new - old if change is None else change)
    limit = 0.0 if change is None else tolerance
    verdict = "worse" if gain < -limit else "better" if gain > limit else ""
    return Line(name, old, new, change, verdict)


def new_failures(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What failed in the new result: checks that the old one passed or did not have, and a run that was interrupted."""
    failed_before = {check["name"] for check in old["checks"] if not check["passed"]}
    failures = [
        f"FAIL {check['name']}: {check['detail']}"
        for check in new["checks"]
        if not check["passed"] and check["name"] not in failed_before
    ]
    if new["status"] == "interrupted" and old["status"] != "interrupted":
        failures.append("FAIL the new run was interrupted")
    return failures


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Notes on what else differs, so that a change is not laid at the engine's door."""
    notes = []
    sides = [
        ("benchmark", old["name"], new["name"]),
        ("device", device_label(old), device_label(new)),
        *((key, (old[group] or {}).get(key), (new[group] or {}).get(key)) for group, key in _settings(old, new)),
    ]
    for what, before, after in sides:
        if before != after:
            notes.append(f"note: {what} was {shown(before)}, is {shown(after)}")
    notes += [f"note: of the old run: {note}" for note in old["notes"]]
    return notes + [f"note: of the new run: {note}" for note in new["notes"]]


def _settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (group, key)
        for group in ("engine_config", "model_config", "parameters", "libraries")
        for key in sorted({*(old[group] or {}), *(new[group] or {})} - {"prompt_seed"})
    ]


def table(lines: list[Line]) -> list[str]:
    """The lines as aligned text under a header."""
    width = max([len("metric"), *(len(line.name) for line in lines)])
    rows = [f"{'metric':{width}}  {'old':>12}  {'new':>12}  {'change':>9}"]
    for line in lines:
        change = "" if line.change is None else f"{100 * line.change:+.1f} %"
        row = f"{line.name:{width}}  {number(line.old):>12}  {number(line.new):>12}  {change:>9}  {line.verdict}"
        rows.append(row.rstrip())
    return rows
