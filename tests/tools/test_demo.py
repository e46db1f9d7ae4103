"""`make demo`: what its table says, and that it runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.demo import Run, in_words, plot, table

REPOSITORY = Path(__file__).resolve().parents[2]


def run_of(place: str, compression: str, step_s: float, step_bytes: float) -> Run:
    return Run(
        place=place,
        epochs=2,
        compression=compression,
        world_size=2,
        numel=1000,
        test_loss=0.2,
        test_accuracy=0.975,
        loss=[1.0] * 10 + [0.5] * 10,
        step_s=[step_s] * 20,
        step_bytes=[step_bytes] * 20,
        host_bytes=20 * step_bytes,
    )


def test_each_run_is_compared_with_the_dense_one_of_its_place(tmp_path: Path) -> None:
    runs = [
        run_of("slow", "none", 0.4, 4e5),
        run_of("slow", "topk density=0.01", 0.05, 1e4),
        run_of("fast", "none", 0.04, 4e5),
        run_of("fast", "topk density=0.01", 0.02, 1e4),
    ]
    text = table(runs)
    rows = [line.split() for line in text.splitlines()[2:6]]
    assert [row[:2] for row in rows] == [[run.place, run.label] for run in runs]
    assert " ".join(rows[0][2:]) == "400.0 ms 4.00 s 8.0 s 1.0 x 400.0 1.0 x 8.0 0.5000 97.50%"
    assert " ".join(rows[1][2:]) == "50.0 ms 0.50 s 1.0 s 8.0 x 10.0 40.0 x 0.2 0.5000 97.50%"
    assert " ".join(rows[3][2:]) == "20.0 ms 0.20 s 0.4 s 2.0 x 10.0 40.0 x 0.2 0.5000 97.50%"
    assert 'Sparse is --compression "topk density=0.01"' in text
    plot(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("rate", "words"), [("100mbit", "100 Mb/s"), ("1gbit", "1 Gb/s"), ("2.5gbit", "2.5 Gb/s")]
)
def test_a_rate_in_words(rate: str, words: str) -> None:
    assert in_words(rate) == words


def demo(folder: Path, *arguments: str) -> tuple[str, list[Run]]:
    """What the demo prints, and its runs."""
    command = [sys.executable, "-m", "tools.demo", "--epochs", "1", "--output", folder, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "digits.png").is_file()
    assert (folder / "table.txt").read_text() in done.stdout
    return done.stdout, [Run(**run) for run in json.loads((folder / "runs.json").read_text())]


@pytest.mark.slow
@pytest.mark.netlab
def test_between_hosts_it_shows_time_and_bytes(tmp_path: Path) -> None:
    said, (dense, sparse) = demo(tmp_path, "--rate", "200mbit")
    assert "2 hosts, 200 Mb/s" in said
    assert "No network lab" not in said
    assert dense.training_s > sparse.training_s
    for run in (dense, sparse):
        # What the steps have sent by their own count, and what starts a training.
        assert run.host_bytes is not None
        counted = sum(run.step_bytes)
        assert counted < run.host_bytes < 1.2 * counted + 4 * 4 * run.numel


@pytest.mark.slow
def test_on_loopback_it_says_what_it_cannot_show(tmp_path: Path) -> None:
    said, runs = demo(tmp_path, "--loopback", "--np", "2")
    assert said.count("it cannot show the gain in time") == 2
    assert [run.place for run in runs] == ["loopback, 2 workers"] * 2
    assert [run.host_bytes for run in runs] == [None, None]
