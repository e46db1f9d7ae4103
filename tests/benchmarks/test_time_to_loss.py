"""The time to a loss: its arithmetic, and a training that goes on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks._launch import KEPT_MEMORY
from benchmarks.time_to_loss import rows_of, seconds_to
from tests.launch import REPOSITORY, horovodrun

WORKER = REPOSITORY / "benchmarks" / "time_to_loss_worker.py"


def result(curve: list[tuple[float, int, float]]) -> dict[str, object]:
    """What a training writes."""
    return {"curve": curve, "numel": 24_819_472, "digest": "abc"}


def test_a_loss_is_reached_between_two_measurements() -> None:
    curve = [(0.0, 0, 9.0), (10.0, 5, 7.0), (20.0, 9, 7.5), (30.0, 14, 5.0)]
    assert seconds_to(curve, 8.0) == pytest.approx(5.0)
    assert seconds_to(curve, 6.0) == pytest.approx(26.0)
    assert seconds_to(curve, 4.0) is None


def test_times_are_compared_at_the_loss_that_horovod_has_in_the_end() -> None:
    def run(factor: float) -> dict[str, object]:
        return result([(0.0, 0, 9.0), (100.0 / factor, 50, 5.0), (101.0, 99, 5.0)])

    found = {"horovod": [run(1.0)], "powersgd-2": [run(2.0)], "oktopk@0.01": [run(4.0)]}
    rows = list(rows_of("1gbit", found))
    times = [row for row in rows if row.metric.endswith("oktopk@0.01") and row.unit == "s"]
    assert [row.goal for row in times] == ["at least 3 ×", "at least 1.4 ×"]
    assert [row.ratio for row in times] == pytest.approx([4.0, 2.0])
    assert all(row.met for row in times)
    missed = {"horovod": [run(1.0)], "topk@0.01": [result([(0.0, 0, 9.0), (100.0, 50, 8.0)])]}
    assert any(
        row.metric.startswith("topk@0.01 never comes down") for row in rows_of("1gbit", missed)
    )


@pytest.mark.launches
def test_a_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    options = ("--checkpoint", tmp_path / "checkpoint", "--out", tmp_path / "out.json")
    options += ("--way", "oktopk@0.01", "--seed", 1, "--every-seconds", 0.5, "--save-seconds", 0)
    options += ("--width", 16, "--corpus-bytes", 2_000_000, "--warmup-steps", 4)
    horovodrun(2, WORKER, *options, "--seconds", 0.5, env=KEPT_MEMORY)
    first = json.loads((tmp_path / "out.json").read_text())
    until_s, at = first["curve"][-1][0] + 0.5, first["curve"][-1][1]
    done = horovodrun(2, WORKER, *options, "--seconds", until_s, env=KEPT_MEMORY)
    second = json.loads((tmp_path / "out.json").read_text())
    assert f"goes on from step {at}" in done.stderr
    assert second["curve"][: len(first["curve"])] == first["curve"]
    assert second["curve"][-1][0] >= until_s
    assert second["digest"] == first["digest"]
    assert second["curve"][-1][2] < second["curve"][0][2]
