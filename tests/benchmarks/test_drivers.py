"""Benchmarks in a short form: they run, report, and go on where they were stopped."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planner, training
from benchmarks.convergence_tasks import FashionMnist
from benchmarks.report import Row, comparison, promises, write_report
from tests.launch import REPOSITORY, launch_environment, run_in_group
from tests.rest import rest

LIMIT_S = 240


def benchmark(name: str, path: Path, *arguments: str) -> Any:
    """A benchmark's report."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path), *arguments]
    run_in_group(command, env=launch_environment({"PWD": str(REPOSITORY)}), timeout=LIMIT_S)
    return json.loads(path.read_text())


def metrics_of(report: Any) -> dict[str, Any]:
    return {row["metric"]: row for row in report["rows"]}


@pytest.mark.launches
def test_reductions_through_the_optimizer(tmp_path: Path) -> None:
    arguments = ("--cases", "tiny", "--ranks", "2", "--launches", "1", "--repeats", "4")
    arguments += ("--seconds", "2")
    rows = metrics_of(benchmark("allreduce", tmp_path / "report.json", *arguments))
    for way in ("horovod", "horovod-fp16", "gloo", "ddp-bf16", "powersgd-2", "oktopk@0.01"):
        assert rows[f"{way}, through the optimizer"]["value"] > 0


def test_a_report_becomes_tables() -> None:
    row = {"case": "vgg16, 1gbit", "metric": "step, oktopk@0.01", "value": 194.2, "unit": "ms"}
    row |= {"ratio": 3.11, "baseline": "horovod: 604 ms"}
    goal = row | {"metric": "step of the best", "goal": "at least 3 ×", "met": True}
    goal |= {"spread": [190.0, 201.4], "launches": 3}
    assert list(comparison([row, goal])) == [
        "|  | vgg16, 1gbit |",
        "| --- | --- |",
        "| oktopk@0.01 | 194 ms, 3.1 × |",
        "",
    ]
    assert list(promises([row, goal]))[2:] == [
        "| vgg16, 1gbit | step of the best | 194 ms (190 to 201), 3.1 × | horovod: 604 ms "
        "| at least 3 × | yes |",
        "",
    ]


def test_a_report_has_a_row_a_line_and_leaves_defaults_out(tmp_path: Path) -> None:
    rows = [
        Row("α", "step", 1503.041234, "ms", ratio=2 / 3, spread=(1392.26, 1538.0), launches=3),
        Row("α", "cases", 22, "cases", goal="at least 20", met=True),
    ]
    write_report("planner", rows, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert text.splitlines()[1:3] == [
        '{"case": "α", "metric": "step", "value": 1503.0, "unit": "ms", "ratio": 0.66667, '
        '"spread": [1392.3, 1538.0], "launches": 3},',
        '{"case": "α", "metric": "cases", "value": 22, "unit": "cases", "goal": "at least 20", '
        '"met": true}',
    ]
    report = json.loads(text)
    assert report["benchmark"] == "planner"
    assert len(report["rows"]) == 2


RESULTS = REPOSITORY / "benchmarks" / "results"
PAGES = ("results.md", "convergence.md", "hierarchical.md")
PUBLISHED = re.compile(r"(?<!:)benchmarks/results/([\w.-]+\.jsonl?)")


def test_pages_and_published_reports_name_each_other() -> None:
    pages = "\n".join((REPOSITORY / "docs" / page).read_text() for page in PAGES)
    published = {
        path.name for kind in ("*.json", "convergence*.jsonl") for path in RESULTS.glob(kind)
    }
    assert set(PUBLISHED.findall(pages)) == published


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_a_published_report_says_where_it_comes_from(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["command"].startswith(f"python -m benchmarks.{report['benchmark']} ")
    assert (REPOSITORY / "benchmarks" / f"{report['benchmark']}.py").exists()
    assert path.read_text(encoding="utf-8").count("\n") == len(report["rows"]) + 2
    assert all({"case", "metric", "value", "unit"} <= row.keys() for row in report["rows"])


def test_published_reports_stay_small() -> None:
    reports = [path.read_bytes() for path in RESULTS.glob("*.json")]
    assert sum(report.count(b"\n") for report in reports) <= 3000
    assert sum(map(len, reports)) <= 300_000


def test_tools_do_not_import_benchmarks() -> None:
    sources = {path: path.read_text() for path in (REPOSITORY / "tools").rglob("*.py")}
    assert len(sources) > 10
    importing = re.compile(r"^\s*(?:from|import) benchmarks\b", re.MULTILINE)
    assert not [path for path, source in sources.items() if importing.search(source)]


@pytest.mark.launches
def test_steps_of_training(tmp_path: Path) -> None:
    ways = ("horovod", "asleep", "dgc@0.01", "planned@0.01", "topk@0.01/float16+gap")
    arguments = ("--models", "tiny", "--launches", "1", "--turns", "3", "--turn-seconds", "0.02")
    arguments += ("--seconds", "2", "--plot", str(tmp_path / "plot"), "--ways", *ways)
    metrics = metrics_of(benchmark("training", tmp_path / "report.json", *arguments))
    for way in ("alone", *ways):
        assert any(metric.startswith(f"step, {way}") for metric in metrics)
    assert any(metric.startswith("planned@0.01 over the fastest") for metric in metrics)
    for way in ("dgc@0.01", "topk@0.01/float16+gap"):
        assert 0 <= metrics[f"exchanges hidden behind backward, {way}"]["value"] <= 100
    assert "exchanges hidden behind backward, asleep" not in metrics  # it has none
    assert (tmp_path / "plot-loopback-2ranks.png").stat().st_size > 0

    launch = json.loads((tmp_path / "report.jsonl").read_text())["result"]
    rows = {row.metric: row for row in planner.rows_of("tiny", planner.median_launch([launch]))}
    for metric in ("planned step", "predicted step, by its trial", "step, uncompressed"):
        assert rows[metric].value > 0


@rest
@pytest.mark.launches
def test_ways_in_launches_of_their_own(tmp_path: Path) -> None:
    """Their rows are those of one launch; a thread's share is a part of the processor's time."""
    arguments = ("--models", "tiny", "--launches", "1", "--turns", "3", "--turn-seconds", "0.02")
    arguments += ("--seconds", "2", "--apart", "--tuned", "--ways", "topk@0.01")
    metrics = metrics_of(benchmark("training", tmp_path / "report.json", *arguments))
    for way in ("alone", "topk@0.01"):
        whole = metrics[f"processor time of a worker in a step, {way}"]["value"]
        assert 0 < metrics[f"of it in threads: training, {way}"]["value"] <= whole
    ms = {way: metrics[f"step, {way}"]["value"] for way in ("alone", "topk@0.01")}
    assert ms["alone"] < 10 <= ms["topk@0.01"] + 0.5, "tuned, a step waits for Horovod's cycle"


@pytest.mark.launches
@pytest.mark.netlab
def test_a_host_counts_its_bytes(tmp_path: Path) -> None:
    arguments = ("--models", "tiny", "--launches", "1", "--turns", "3", "--turn-seconds", "0.02")
    arguments += ("--seconds", "2", "--netlab", "1gbit", "--ways", "horovod", "topk@0.01")
    rows = metrics_of(benchmark("training", tmp_path / "report.json", *arguments))
    dense_mb = rows["sent by a host in a step, horovod"]["value"]
    assert 4e-6 * 99_360 < dense_mb < 8e-6 * 99_360
    assert rows["sent by a host in a step, topk@0.01"]["value"] < dense_mb / 5


@pytest.mark.parametrize(
    ("way", "why"), [("ddp-fp8", "unknown way 'ddp-fp8'"), ("oktopk", "as in oktopk@0.01")]
)
def test_an_unknown_way_is_refused(
    way: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["training", "--json", "report.json", "--ways", way])
    with pytest.raises(SystemExit, match="2"):
        training.main()
    assert why in capsys.readouterr().err


@pytest.mark.launches
@pytest.mark.skipif(not FashionMnist.folder.is_dir(), reason="dataset-fashion-mnist is missing")
def test_accuracy_over_time(tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--steps", "4", "--points", "2", "--plot", str(tmp_path / "plot"))
    arguments += ("--ways", "horovod", "topk@0.01")
    metrics = metrics_of(benchmark("time_to_accuracy", tmp_path / "report.json", *arguments))
    for way in ("horovod", "topk@0.01"):
        assert 5 < metrics[f"accuracy in the end, {way}"]["value"] <= 100
        assert metrics[f"time of the training, {way}"]["value"] > 0
    assert "baseline" in metrics["time of the training, topk@0.01"]
    assert (tmp_path / "plot-loopback.png").stat().st_size > 10_000
