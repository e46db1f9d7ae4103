"""What the report says: of warm-ups, dense steps, plans, ranks, gaps and other compressions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_sparse import Recorder
from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.lab.report import figures
from hvd_sparse.lab.report.log import Plan, Recording, read_runs
from hvd_sparse.lab.report.page import report_page
from hvd_sparse.lab.report.summary import curves, slowest_rank, with_holes
from hvd_sparse.methods import METHODS
from hvd_sparse.recording.recorder import Budget
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import LocalWorld, run_ranks
from tests.plans import AllDense
from tests.recordings import page_of, record

NUMEL = 2000
SPECS = [TensorSpec(f"layer{i}.weight", (NUMEL,), "torch.float32") for i in range(2)]


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "covers", lambda self, cost_s: True)


def take_steps(engine: Engine, steps: int) -> None:
    """As the adapter takes them: dense tensors are Horovod's."""
    for _ in range(steps):
        engine.begin_step()
        sparse = [spec for spec in SPECS if engine.takes(spec)]
        for spec in sparse:
            engine.submit(spec, torch.randn(NUMEL))
        engine.scale = 1.0
        for spec in sparse:
            engine.result(spec.name)


def text_of_page(path: Path) -> str:
    """The page without its style and figures."""
    return re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page_of(path), flags=re.DOTALL)


def cells(page: str, title: str) -> list[list[str]]:
    """The rows of the table below a heading."""
    (body,) = re.findall(rf"<h2>{title}</h2>.*?<table>(.*?)</table>", page, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("<tr>")[1:]]


def test_a_run_of_warm_up_dense_steps_and_two_plans(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    arguments: dict[str, Any] = {"bucket_numel": NUMEL, "warmup_steps": 4}

    def worker(transport: Transport) -> None:
        engine = Engine(AllDense(), Recorder(path) if transport.rank == 0 else None)
        engine.connect(transport)
        take_steps(engine, 3)
        topk = METHODS["topk"](density=0.01, collective="topk_allgather", **arguments)
        engine.reassign(topk.make())
        take_steps(engine, 6)
        engine.reassign(AllDense())
        take_steps(engine, 5)
        engine.reassign(METHODS["oktopk"](density=0.05, wire="float16+gap").make())
        take_steps(engine, 2)
        assert engine.stats().steps == 16
        engine.disconnect()

    run_ranks(2, worker, timeout_s=60.0)
    (run,) = read_runs(path)
    assert [(p.step, len(p.buckets), sum(s["steps"] for s in p.steps)) for p in run.plans] == [
        *((0, 0, 3), (3, 0, 0), (3, 2, 6), (9, 0, 5), (14, 0, 0), (14, 1, 2)),
    ]
    assert [bucket["k"] for bucket in run.plans[2].buckets] == [20, 20]  # not the warm-up's 500
    page = text_of_page(path)
    rows = [(row[0], row[3]) for row in cells(page, "Plans")[1:]]
    assert rows == [
        ("1–3", "all dense"),
        ("4–9", "topk at density 0.01, wire float32, exchanged by topk_allgather"),
        ("10–14", "all dense"),
        ("15–16", "oktopk at density 0.05, wire float16+gap, exchanged by oktopk"),
    ]
    assert "Compressed by oktopk at density 0.05" in page
    assert re.search(
        r"<h1>Sent [\d.]+ × fewer bytes than dense in 8 of 16 steps; a step takes [\d.]+ ms, ", page
    )
    assert "<p>16 steps, 8 of them with all tensors dense; " in page
    of_run = curves(run)
    assert of_run.start.tolist() == list(range(16))
    assert np.isnan(of_run.figures["bytes_sent"][[0, 2, 9, 13]]).all()
    assert of_run.figures["bytes_sent"][3] > 4 * of_run.figures["bytes_sent"][8] > 0
    bucket = dict(zip(*cells(page, "Buckets"), strict=True))
    assert (bucket["compressor, wire"], bucket["collective"]) == ("oktopk, float16+gap", "oktopk")
    assert (bucket["target"], bucket["wanted"]) == ("0.05", "0.05")


def test_a_run_of_dense_steps_only(tmp_path: Path) -> None:
    engine = Engine(AllDense(), Recorder(tmp_path / "run.jsonl"))
    engine.connect(LocalWorld(1).transport(0))
    take_steps(engine, 4)
    engine.disconnect()
    page = text_of_page(tmp_path / "run.jsonl")
    assert "nothing: all dense" in page
    assert cells(page, "Plans")[1:] == [["1–4", "0", "0", "all dense"]]


@pytest.mark.parametrize("buckets", [1, 100])
def test_a_page_of_one_bucket_and_of_many(tmp_path: Path, buckets: int, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    record(path, steps=4, buckets=buckets)
    page = page_of(path)
    assert page.count("<svg") == 6
    assert f"layer{buckets - 1}.weight" in page
    assert "4 steps" in capsys.readouterr().out


def test_two_compressions_with_one_file_are_told_apart(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    engines = [
        Engine(METHODS[name](density=0.1).make(), Recorder(path)) for name in ("topk", "mstopk")
    ]
    for engine in engines:
        engine.connect(LocalWorld(1).transport(0))
    for _ in range(3):
        for engine in engines:
            take_steps(engine, 1)
    for engine in engines:
        engine.disconnect()
    page = text_of_page(path)
    assert "another compression at the same time: --run 1" in capsys.readouterr().out
    assert "Another compression of the same process at the same time: run 1." in page
    assert [row[-1].partition(" ")[0] for row in cells(page, "Runs")[1:]] == ["topk", "mstopk"]


def compared(*exchange_s: list[float]) -> Recording:
    ranks = [{"steps": 64, "exchange_s": each, "stage_s": each} for each in exchange_s]
    return Recording({"world_size": len(exchange_s[0])}, ranks=ranks)


@pytest.mark.parametrize(
    ("exchange_s", "slowest"),
    [
        ([[3.8, 3.7]] * 5, None),  # as much as such figures vary
        ([[19.2, 21.7]] * 5, None),
        ([[3.8, 1.7]] * 5, 1),
        ([[3.8, 1.7], [1.7, 3.8], [3.8, 1.6]] * 2, 1),
        ([[9.0, 1.7], [1.7, 3.8], [1.8, 3.8]], None),  # one outlier is no slow rank
        ([[2.0, 2.1, 1.0, 1.1]], 2),
        ([[2.0, 2.0, 2.0]], None),
        ([[0.0, 0.0]], None),
        ([[1.0]], None),
    ],
)
def test_a_slow_rank_is_named_where_it_clearly_is_one(
    exchange_s: list[list[float]], slowest: int | None
) -> None:
    assert slowest_rank(compared(*exchange_s)) == slowest


def recorded(path: Path) -> Recording:
    """A run of 64 steps of two ranks."""

    def worker(transport: Transport) -> None:
        engine = Engine(METHODS["topk"](density=0.1).make(), Recorder(path))
        engine.connect(transport)
        take_steps(engine, 64)
        engine.disconnect()

    run_ranks(2, worker, timeout_s=60.0)
    (run,) = read_runs(path)
    return run


def test_without_a_slow_rank_none_is_named(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run.jsonl")
    assert [(line["step"], line["steps"]) for line in run.ranks] == [(64, 64)]
    run.ranks[0]["exchange_s"] = [3.7, 3.8]
    page = report_page([run], run)
    assert "The others wait" not in page
    assert "all spend between 57.8 and 59.4 ms per step in exchanges" in page


def test_what_is_saved_counts_steps_and_not_plans(tmp_path: Path) -> None:
    """A plan of a few steps, each a line of its own, and one of a thousand steps in one line."""
    run = recorded(tmp_path / "run.jsonl")
    (bucket, *_), line = run.plans[0].buckets, run.plans[0].steps[0]
    line = {key: value[:1] if isinstance(value, list) else value for key, value in line.items()}
    run.plans = [Plan(0, [{**bucket, "numel": 1000}]), Plan(10, [{**bucket, "numel": 1_000_000}])]
    run.plans[0].steps += [
        {**line, "step": i + 1, "steps": 1, "bytes_sent": [80]} for i in range(10)
    ]
    run.plans[1].steps += [{**line, "step": 1010, "steps": 1000, "bytes_sent": [80_000_000]}]
    assert re.search(r"Sent (49|50)(\.\d)? × fewer bytes than dense", report_page([run], run))


def test_nothing_is_drawn_where_nothing_was_recorded() -> None:
    steps, values = with_holes([1, 2, 3, 50, 51, 52], [1.0] * 6)
    assert steps == [1, 2, 3, 50, 50, 51, 52]
    assert np.isnan(values).tolist() == [False] * 3 + [True] + [False] * 3
    for spaced in ([1, 2, 4, 6, 10, 14, 22, 30], [1, 50], [64, 128, 192], [7], []):
        assert with_holes(spaced, [1.0] * len(spaced)) == (spaced, [1.0] * len(spaced))


@pytest.mark.parametrize("high", [3.0, 60.0, 7e3])
def test_ticks_are_plain_numbers(high: float) -> None:
    def draw(axes: Any) -> None:
        axes.plot([0, 1, 2], [1.0, 2.0, high])
        axes.set_yscale("log")
        figures._finish(axes, "MB", legend=False, from_zero=False)

    labels = re.findall(r"<text[^>]*>(.*?)</text>", figures.svg("ticks", draw), re.DOTALL)
    texts = [re.sub(r"<[^>]*>|\s", "", label) for label in labels]
    numbers = [float(text) for text in texts if text not in ("step", "MB")]
    assert len(numbers) >= 3 + 3
    assert not [text for text in texts if "×" in text or "$" in text or "^" in text]


def test_what_the_budget_left_out_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(Budget, "covers", lambda self, cost_s: False)
    engine = Engine(METHODS["topk"](density=0.1).make(), Recorder(path))
    engine.connect(LocalWorld(1).transport(0))
    take_steps(engine, 5)
    engine.reassign(METHODS["topk"](density=0.2).make())
    take_steps(engine, 2)
    engine.disconnect()
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    kinds = [(line["kind"], line["step"]) for line in lines[1:]]
    assert kinds == [("plan", 0), ("steps", 5), ("plan", 5), ("plan", 5), ("steps", 7)]
