"""Launches that a benchmark has done, and those that it has still to do."""

from __future__ import annotations

from benchmarks._jobs import Job
from benchmarks._launch import Launcher


def test_a_launch_with_other_variables_is_another_job() -> None:
    def key(*environment: tuple[str, str]) -> str:
        return Job("case", Launcher(None), 2, 1, "script.py", ("--lr", "1"), environment).key

    keys = [key(), key(("HOROVOD_CYCLE_TIME", "5")), key(("HOROVOD_CYCLE_TIME", "10"))]
    assert len(set(keys)) == len(keys)
    assert key() == key()
