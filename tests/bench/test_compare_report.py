"""Comparing results, and the page and plots made of them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_results import ENGINE

from qwen_engine import cli
from qwen_engine.bench import report
from qwen_engine.bench.cli import parse_args
from qwen_engine.bench.compare import compare, direction
from qwen_engine.bench.figures import loads_of
from qwen_engine.bench.results import Check, read_result, write_result
from qwen_engine.bench.suites import SUITES, run_suites

Make = Callable[..., dict[str, Any]]
PNG = b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decode_tok_s", 1),
        ("hot_prefill_tok_s", 1),
        ("requests_per_s", 1),
        ("request_throughput", 1),
        ("request_goodput", 1),
        ("prefix_hit_rate", 1),
        ("prefill_speedup", 1),
        ("decode_tb_s_per_rank", 1),
        ("first_token_s", -1),
        ("decode_step_ms", -1),
        ("p99_itl_ms", -1),
        ("preemptions", -1),
        ("wrong", -1),
        ("perplexity", -1),
        ("arc_easy_acc_norm", 1),
        ("prefix_warm_s", -1),
        ("vllm_prefix_warm_s", 0),
        ("transformers_batch1_decode_tok_s", 0),
        ("floor_read_tb_s", 0),
        ("recorded_vllm_ready_s", 0),
        ("client_lag_p99_ms", 0),
        ("concurrency", 0),
        ("cached_token_share", 0),
        ("std_itl_ms", 0),
        ("hot_std_ttft_ms", 0),
        ("decode_flop_per_byte", 0),
    ],
)
def test_compare_knows_which_direction_is_better(name: str, expected: int):
    assert direction(name) == expected


@pytest.mark.parametrize(
    ("old", "new", "options", "code"),
    [
        ({"decode_tok_s": 100.0}, {"decode_tok_s": 97.5}, [], 0),
        ({"decode_tok_s": 100.0}, {"decode_tok_s": 96.5}, [], 1),
        ({"decode_tok_s": 100.0}, {"decode_tok_s": 96.5}, ["--tolerance", "4%"], 0),
        ({"decode_tok_s": 100.0}, {"decode_tok_s": 96.5}, ["--tolerance", "0.04"], 0),
        ({"decode_tok_s": 100.0}, {"decode_tok_s": 200.0}, [], 0),
        ({"decode_step_ms": 10.0}, {"decode_step_ms": 10.4}, [], 1),
        ({"decode_step_ms": 10.0}, {"decode_step_ms": 5.0}, [], 0),
        ({"preemptions": 0}, {"preemptions": 1}, [], 1),
        ({"concurrency": 16}, {"concurrency": 1}, [], 0),
        ({"decode_tok_s": 100.0}, {"decode_tok_s": None}, [], 1),
        ({"decode_tok_s": 100.0}, {}, [], 1),
        ({}, {"decode_tok_s": 100.0}, [], 0),
        ({"decode_tok_s": None}, {"decode_tok_s": 100.0}, [], 0),
        ({"decode_tok_s": None}, {"decode_tok_s": None}, [], 0),
    ],
)
def test_the_exit_code_tells_a_regression(old, new, options, code, tmp_path: Path, make_result: Make):
    paths = [write_result(make_result(metrics), tmp_path) for metrics in (old, new)]
    assert cli.main(["results", "compare", *map(str, paths), *options]) == code


def test_the_table_shows_old_new_and_change(tmp_path: Path, make_result: Make, capsys):
    metrics = ({"decode_tok_s": 100.0, "total_s": 2.0}, {"decode_tok_s": 80.0, "total_s": 1.0})
    paths = [write_result(make_result(values), tmp_path) for values in metrics]
    assert cli.main(["results", "compare", *map(str, paths)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"decode_tok_s +100 +80 +-20\.0 % +worse", out)
    assert re.search(r"total_s +2 +1 +-50\.0 % +better", out)


def test_a_new_failure_is_a_regression_and_other_settings_are_noted(tmp_path: Path, make_result: Make, capsys):
    good = write_result(make_result({}, engine_config=ENGINE), tmp_path)
    bad_result = make_result(
        {}, checks=[Check("pool whole", False, "7 of 8")], engine_config={**ENGINE, "enforce_eager": True}
    )
    bad = write_result(bad_result, tmp_path)
    assert cli.main(["results", "compare", str(good), str(bad)]) == 1
    out = capsys.readouterr().out
    assert "FAIL pool whole: 7 of 8" in out
    assert "enforce_eager was False, is True" in out
    assert cli.main(["results", "compare", str(bad), str(bad)]) == 0
    interrupted = write_result(make_result({}, interrupted=True), tmp_path)
    assert cli.main(["results", "compare", str(good), str(interrupted)]) == 1


def test_unreadable_input_is_one_line_and_exit_code_2(tmp_path: Path, make_result: Make, capsys):
    good = str(write_result(make_result({}), tmp_path))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\x89PNG\xff")
    (tmp_path / "other.json").write_text("[1]")
    for name, words in (
        ("missing.json", ": No such file or directory"),
        ("", ": Is a directory"),
        ("broken.json", " is no JSON, so no result"),
        ("binary.json", " is no JSON, so no result"),
        ("other.json", " is no result of a benchmark: it has no schema_version"),
    ):
        for args in ([good, str(tmp_path / name)], [str(tmp_path / name), good]):
            assert cli.main(["results", "compare", *args]) == 2
            (line,) = capsys.readouterr().err.strip().splitlines()
            assert line.startswith("error: ")
            assert str(tmp_path / name) + words in line
    assert cli.main(["results", "compare", good, good, "--tolerance", "much"]) == 2
    assert cli.main(["results", "report", "--results-dir", str(tmp_path / "nowhere")]) == 2


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.floats(0, 1))
def test_better_one_way_is_worse_the_other_way_or_within_tolerance(old: float, new: float, tolerance: float):
    (line,) = compare({"metrics": {"total_s": old}}, {"metrics": {"total_s": new}}, tolerance)
    if new == old:
        assert line.verdict == ""
    assert not (line.verdict == "worse" and new < old)
    assert not (line.verdict == "better" and new > old)


@pytest.fixture(scope="module")
def suite_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with real results, one of them failed, and a file of another program."""
    folder = tmp_path_factory.mktemp("results")
    suites = [SUITES["prefix-cache"], SUITES["high-concurrency"]]
    list(run_suites(suites, "demo", {"device": "cpu"}, scale=0.002, results_dir=folder))
    list(
        run_suites(
            suites[:1], "demo", {"device": "cpu", "enable_prefix_caching": False}, scale=0.002, results_dir=folder
        )
    )
    (folder / "other.json").write_text("{}")
    return folder


def test_the_report_stands_alone(suite_results: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    args = parse_args(["results", "report", "--results-dir", str(suite_results)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.run(args) == 0
    assert "no plots" in capsys.readouterr().out
    page = (suite_results / "README.md").read_text()
    assert "| demo on cpu, float32 | 2 × (65 + 2), cold |" in page
    assert re.search(r"\| 2 × \(65 \+ 2\), hot \| [\d.]+ \| – \|", page)
    assert "- *prefill, tok/s*: prompt tokens of all requests" in page
    assert "of the hot prompts' tokens came from the prefix cache" in page
    assert "enable_prefix_caching=False" in page
    assert "**Not all is well**: prefix-cache" in page
    assert "check failed**: prefix hit" in page
    assert "tensor_parallel_size 1" in page
    assert "[other.json](other.json)" in page
    for path in suite_results.glob("2*.json"):
        assert f"[{path.name}]({path.name})" in page
        assert json.loads(path.read_text())["command"] in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(row.count("|") > 4 for row in rows)


RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_report_has_figures_of_every_result_here(path: Path):
    result = read_result(path)
    page = report.render([report.Entry(path.name, result)], [], None)
    rows = [line for line in page.splitlines() if line.startswith(f"| {report.Entry('', result).setting} |")]
    if result["name"] != "compare":
        assert len(rows) == len(loads_of(result))
        assert all(re.search(r"\| [\d,.]+", row) for row in rows)
    assert "{}" not in page


def test_runs_are_in_the_order_of_their_numbers():
    texts = ["'max_concurrency', 256", "'max_concurrency', 16", "'max_concurrency', 1", "'label', 'x'"]
    assert sorted(texts, key=report._by_number) == ["'label', 'x'", *reversed(texts[:3])]


def test_the_report_has_plots_where_matplotlib_is(suite_results: Path):
    pytest.importorskip("matplotlib")
    assert cli.main(["results", "report", "--results-dir", str(suite_results)]) == 0
    page = (suite_results / "README.md").read_text()
    for name in ("decode-speed", "latency", "memory", "roofline"):
        assert f"](plots/{name}.png)" in page
        content = (suite_results / "plots" / f"{name}.png").read_bytes()
        assert content.startswith(PNG)
        assert len(content) < 200_000


def test_ticks_of_a_logarithmic_axis_are_told_apart_below_1():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from qwen_engine.bench.plots import _plain_ticks

    figure, axes = pyplot.subplots()
    axes.plot([0.7, 1.1], [0.0024, 0.0031])
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_ticks(axes)
    figure.canvas.draw()
    labels = [label.get_text() for label in axes.get_yticklabels(which="both") if label.get_text()]
    pyplot.close(figure)
    assert len(labels) == len(set(labels)) > 3


@pytest.mark.parametrize(
    ("load_format", "parameters", "weights"),
    [
        ("auto", {}, "weights of the checkpoint"),
        ("dummy", {}, "random weights"),
        ("auto", {"random_weights": True}, "random weights"),
    ],
)
def test_the_report_tells_random_weights_from_those_of_a_checkpoint(
    load_format: str, parameters: dict[str, Any], weights: str, tmp_path: Path, suite_results: Path
):
    result = json.loads(next(suite_results.glob("2*.json")).read_text())
    result["engine_config"]["load_format"] = load_format
    write_result({**result, "parameters": result["parameters"] | parameters}, tmp_path)
    entries, _ = report.load(tmp_path)
    assert f", {weights}, " in report.render(entries, [], None)


def test_only_the_newest_of_equal_runs_is_shown(tmp_path: Path, make_result: Make):
    for hour, speed in ((1, 111.0), (3, 333.0), (2, 222.0)):
        result = make_result({"decode_tok_s": speed}, created=f"2030-01-01T0{hour}:00:00+00:00")
        write_result(result, tmp_path)
    entries, _ = report.load(tmp_path)
    page = report.render(entries, [], None)
    assert "| 333 |" in page
    assert "222" not in page
    assert "2 older ones" in page
