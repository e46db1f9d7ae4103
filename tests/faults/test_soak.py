"""A short form of `make soak`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.soak import RANKS, STEPS_BETWEEN
from tests.launch import launch_environment, run_in_group
from tests.rest import rest

STEPS = 240

GROWTH = 0.05
"""Of memory: the statistics have a history of 1,024 steps, which is filling still."""

pytestmark = [rest, pytest.mark.launches, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_training_goes_on_among_faults(tmp_path: Path) -> None:
    """Whatever can be survived is, and the books balance to the last bit."""
    file = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", str(STEPS)]
    command += ["--growth", str(GROWTH), "--json", str(file)]
    done = run_in_group(command, env=launch_environment(), timeout=500)
    summary = json.loads(file.read_text())
    assert summary["complaints"] == [], done.stdout
    assert summary["imbalance"] == 0
    assert all(summary["faults"][name] >= 1 for name in STEPS_BETWEEN), summary
    assert summary["recordings_given_up"] == 1
    assert len(summary["end"]["resident"]) == RANKS
