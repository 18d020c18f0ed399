"""The Grafana dashboard asks for metrics that the server has."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest
from fault_tools import ROOT
from scripted import MODEL

BOARD = json.loads((ROOT / "launch" / "grafana" / "dashboard.json").read_text())
LABELS = {"model_name", "engine", "finished_reason", "block_size", "cache_dtype"}
SCRAPED = {"instance"}
"""Labels that Prometheus adds."""


def expressions() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]


@pytest.fixture(scope="module")
def exported(scripted) -> set[str]:
    """Names of the series that a server has once it has answered, without their prefix."""
    scripted.write("A few tokens.")
    scripted.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=20)
    with urllib.request.urlopen(scripted.url + "/metrics") as answer:
        return set(re.findall(r"^qwen_engine:(\w+)\{", answer.read().decode(), re.MULTILINE))


def shown() -> set[str]:
    variables = [str(item["query"]) for item in BOARD["templating"]["list"]]
    return set(re.findall(r"\$\{prefix\}:(\w+)", "\n".join([*expressions(), *variables])))


def metrics_of(series: set[str]) -> set[str]:
    """The metrics that series belong to."""
    return {re.sub(r"(_total)?(_(bucket|sum|count|created|total))?$", "", name) for name in series}


def test_every_metric_on_the_dashboard_is_exported(exported):
    assert len(shown()) > 20
    assert shown() - exported == set()


def test_every_metric_that_is_exported_is_on_the_dashboard(exported):
    assert metrics_of(exported) - metrics_of(shown()) == set()


def test_expressions_are_whole_and_use_known_labels_and_variables():
    variables = {item["name"] for item in BOARD["templating"]["list"]} | {"__rate_interval"}
    for expression in expressions():
        for left, right in ("()", "{}", "[]"):
            assert expression.count(left) == expression.count(right), expression
        assert set(re.findall(r"\$\{?(\w+)", expression)) <= variables
        assert set(re.findall(r"(\w+)=~?\"", expression)) <= LABELS | SCRAPED
        for group in re.findall(r"by \(([\w, ]+)\)", expression):
            assert set(group.split(", ")) <= LABELS | SCRAPED | {"le"}


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
