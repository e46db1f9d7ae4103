"""Launches of benchmarks: which are the same job, and which still have to run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planner
from benchmarks._launch import Job, Jobs, Launcher, Variables, cycle_time
from benchmarks.models import MODELS
from benchmarks.ways import check_names

CASE = ("case", "loopback", 2)


class Told(Launcher):
    """Runs nothing: a launch has the next of some results, or fails for None."""

    def __init__(self, *results: int | None) -> None:
        super().__init__(None)
        self.results = list(results)

    def run(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        result = self.results.pop(0)
        if result is None:
            raise subprocess.TimeoutExpired("horovodrun", 1.0)
        return {"result": result}


def test_a_launch_with_other_variables_is_another_job() -> None:
    def key(environment: Variables = ()) -> str:
        return Job("case", Launcher(None), 2, 1, "script.py", ("--lr", "1"), environment).key

    keys = [key(), key(cycle_time(5)), key(cycle_time(10))]
    assert len(set(keys)) == len(keys)
    assert key() == key()


def test_the_same_command_runs_what_is_missing(tmp_path: Path) -> None:
    def jobs(*results: int | None) -> Jobs:
        at = Told(*results)
        return Jobs(
            tmp_path / "report.json", [Job("case", at, 2, n, "script.py", ()) for n in (1, 2, 3)]
        )

    first = jobs(1, None, 3)
    first.run(60, timeout_s=1.0)
    assert first.results() == {CASE: [{"result": 1}, {"result": 3}]}
    with pytest.raises(SystemExit, match="1 launches are missing"):
        first.exit_where_missing()
    late = jobs()
    late.run(0, timeout_s=1.0)  # no time
    assert [job.launch for job in late.missing] == [2]
    again = jobs(2)
    again.run(60, timeout_s=1.0)
    assert again.results() == {CASE: [{"result": 1}, {"result": 2}, {"result": 3}]}
    again.exit_where_missing()


def test_the_planners_cases_are_models_and_ways() -> None:
    assert check_names([*planner.WAYS.values()]) == ""
    assert {model for model, *_ in planner.LISTS} | {*planner.MODELS} <= {*MODELS}
