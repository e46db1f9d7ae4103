"""Several runs in one file: restarts, elastic worlds, processes at the same time, torn lines."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_sparse import Recorder
from hvd_sparse.cli.main import FAILED, main
from hvd_sparse.collectives import TopkAllgather
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.lab.report.log import read_runs
from hvd_sparse.recording.recorder import Budget
from hvd_sparse.selectors import ReusedThreshold
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import LocalWorld, run_ranks

NUMEL = 400
SPEC = TensorSpec("w", (NUMEL,), "torch.float32")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "covers", lambda self, cost_s: True)


def new_engine(recorder: Recorder) -> Engine:
    return Engine(Method(0.05, NUMEL, ReusedThreshold, TopkAllgather, "test"), recorder)


def take_steps(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.submit(SPEC, torch.randn(NUMEL))
        engine.scale = 1.0
        engine.result("w")


def train(transport: Transport, path: Path, steps: int) -> None:
    engine = new_engine(Recorder(path))
    engine.connect(transport)
    take_steps(engine, steps)
    engine.disconnect()


def record(path: Path, steps: int, world_size: int = 2) -> None:
    run_ranks(world_size, lambda t: train(t, path, steps))


def report(path: Path, capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["report", str(path), "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_restart_keeps_what_is_there(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 3)
    before = path.read_text()
    record(path, 5, world_size=1)
    assert path.read_text().startswith(before)
    assert [len(run.steps) for run in read_runs(path)] == [3, 5]
    assert [run.run["world_size"] for run in read_runs(path)] == [2, 1]
    assert report(path, capsys)["steps"] == 5
    assert report(path, capsys, "--run", "1")["steps"] == 3
    page = path.with_suffix(".html").read_text()
    assert "1 (this one)" in page
    assert page.count("UTC</td>") == 4
    assert main(["report", str(path)]) == 0
    assert "5 steps (run 2 of 2)" in capsys.readouterr().out
    for number in ("0", "3", "-1"):
        assert main(["report", str(path), "--run", number]) == FAILED
        assert f"run must be from 1 to 2, got {number}" in capsys.readouterr().err


def test_a_trace_is_of_one_run(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 3)
    record(path, 5)
    events = []
    for number in (1, 2):
        assert main(["trace", str(path), "--json", "--run", str(number)]) == 0
        events.append(json.loads(capsys.readouterr().out)["events"])
    names = 1 + 3  # of the process and its rows
    assert events[0] - names == 3 * (events[1] - names) / 5


def test_a_run_that_has_just_begun(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 2)
    record(path, 0)  # no plan and so no run
    assert len(read_runs(path)) == 1
    lines = path.read_text().splitlines()
    other = json.dumps({**json.loads(lines[0]), "id": "other"})
    path.write_text("\n".join([*lines, other, ""]))
    assert main(["report", str(path)]) == FAILED
    assert "no step yet; the file has 2 runs, choose one by --run" in capsys.readouterr().err
    assert report(path, capsys, "--run", "1")["steps"] == 2


def test_ranks_that_meet_anew_begin_a_run(tmp_path: Path, capsys: Any) -> None:
    """In one process: 3 ranks; rank 0 is lost, and what was rank 1 is the new world's rank 0."""
    recorders = [Recorder(tmp_path / "run.jsonl") for _ in range(3)]
    engines = [new_engine(recorder) for recorder in recorders]

    def before(transport: Transport) -> None:
        engines[transport.rank].connect(transport)
        take_steps(engines[transport.rank], 4)

    def after(transport: Transport) -> None:
        engines[transport.rank + 1].connect(transport)
        take_steps(engines[transport.rank + 1], 3)
        engines[transport.rank + 1].disconnect()

    run_ranks(3, before)
    run_ranks(2, after)
    first, second = read_runs(tmp_path / "run.jsonl")
    assert (first.run["world_size"], second.run["world_size"]) == (3, 2)
    assert [line["step"] for line in first.steps] == [1, 2, 3, 4]
    assert [line["step"] for line in second.steps] == [5, 6, 7]  # the process's own count goes on
    assert all(line["at_s"] < 60 for line in second.steps)
    assert report(tmp_path / "run.jsonl", capsys)["steps"] == 3


def test_a_rank_that_is_rank_0_no_more_writes_no_more(tmp_path: Path) -> None:
    scalars: list[int] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            scalars.append(global_step)

    engine = new_engine(Recorder(tmp_path / "run.jsonl", tensorboard=Writer()))
    others = [new_engine(Recorder()) for _ in range(2)]

    def before(transport: Transport) -> None:
        chosen = engine if transport.rank == 0 else others[0]
        chosen.connect(transport)
        take_steps(chosen, 2)

    def after(transport: Transport) -> None:
        chosen = engine if transport.rank == 1 else others[1]
        chosen.connect(transport)
        take_steps(chosen, 2)

    run_ranks(2, before)
    run_ranks(2, after)
    (only,) = read_runs(tmp_path / "run.jsonl")
    assert len(only.steps) == 2
    assert set(scalars) == {1, 2}


def test_runs_at_the_same_time_are_told_apart(tmp_path: Path) -> None:
    """Two compressions of one process, or a process that its launcher takes for dead."""
    path = tmp_path / "run.jsonl"
    engines = [new_engine(Recorder(path)) for _ in range(2)]
    for engine in engines:
        engine.connect(LocalWorld(1).transport(0))
    for _ in range(4):
        for engine in engines:
            take_steps(engine, 1)
    for engine in engines:
        engine.disconnect()
    runs = read_runs(path)
    assert [[line["step"] for line in run.steps] for run in runs] == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("cut", range(1, 400, 37))
def test_a_line_that_is_cut_off_costs_only_itself(tmp_path: Path, cut: int, capsys: Any) -> None:
    """A process is killed in the middle of a line, and started again."""
    path = tmp_path / "run.jsonl"
    record(path, 4)
    path.write_bytes(path.read_bytes()[:-cut])
    (torn,) = read_runs(path)
    assert torn.torn_lines == (1 if cut > 1 else 0)
    record(path, 3)
    first, second = read_runs(path)
    assert first.torn_lines == torn.torn_lines
    assert len(first.steps) == len(torn.steps)
    assert (second.torn_lines, len(second.steps)) == (0, 3)
    found = report(path, capsys, "--run", "1")
    assert found["torn_lines"] == torn.torn_lines
    page = path.with_suffix(".html").read_text()
    assert ("are cut off" in page) == (torn.torn_lines > 0)


def test_a_first_line_that_is_cut_off_costs_its_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 2)
    path.write_text(path.read_text()[20:])
    record(path, 3)
    (second,) = read_runs(path)
    assert (second.torn_lines, len(second.steps)) == (1, 3)


def test_zeros_of_a_crash_are_torn_lines(tmp_path: Path) -> None:
    """What file systems leave where the power went away."""
    path = tmp_path / "run.jsonl"
    record(path, 2)
    with path.open("ab") as file:
        file.write(b"\0" * 4096)
    record(path, 2)
    first, second = read_runs(path)
    assert (first.torn_lines, second.torn_lines) == (1, 0)


def test_runs_of_an_older_version_are_left_out(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"run","version":1,"rank":0}\n{"kind":"plan","step":0,"buckets":[]}\n')
    assert main(["report", str(path)]) == FAILED
    assert re.search(r"run.jsonl:1: version must be \d+, got 1\n", capsys.readouterr().err)
    record(path, 2)
    assert [len(run.steps) for run in read_runs(path)] == [2]


def test_the_file_stays_small_over_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousandth of the entries, a thousand steps stand for a million."""
    monkeypatch.setattr("hvd_sparse.recording.recorder.ENTRIES_BEFORE_THINNING", 20)
    path = tmp_path / "run.jsonl"
    method = Method(0.05, 10, partial(ReusedThreshold, 8), TopkAllgather, "test")
    engine = Engine(method, Recorder(path))
    engine.connect(LocalWorld(1).transport(0))
    spec = TensorSpec("w", (10,), "torch.float32")
    sizes = []
    for step in range(1, 1001):
        engine.submit(spec, torch.ones(10))
        engine.scale = 1.0
        engine.result("w")
        if step in (10, 100, 1000):
            sizes.append(path.stat().st_size)
    engine.disconnect()
    (run,) = read_runs(path)
    kinds = [len(run.steps), len(run.plans[0].residuals), len(run.ranks)]
    assert all(10 <= lines < 200 for lines in kinds), kinds
    assert sizes[2] - sizes[1] < 5 * (sizes[1] - sizes[0])
