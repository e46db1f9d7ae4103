"""Launches of benchmarks: which are the same job."""

from __future__ import annotations

from benchmarks._launch import Job, Launcher, Variables, cycle_time


def test_a_launch_with_other_variables_is_another_job() -> None:
    def key(environment: Variables = ()) -> str:
        return Job("case", Launcher(None), 2, 1, "script.py", ("--lr", "1"), environment).key

    keys = [key(), key(cycle_time(5)), key(cycle_time(10))]
    assert len(set(keys)) == len(keys)
    assert key() == key()
