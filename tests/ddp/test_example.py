"""The example for DDP, as its user starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import REPOSITORY, horovodrun

pytestmark = [pytest.mark.slow, pytest.mark.launches]


def test_it_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    for density in (0.05, 0.05, 0):
        done = horovodrun(
            2,
            REPOSITORY / "examples" / "ddp_language_model.py",
            *("--steps", 50, "--width", 16, "--length", 8, "--density", density),
            *("--checkpoint", tmp_path / str(density)),
            controller="torchrun",
        )
        assert "50 steps in" in done.stdout
        assert ("less than dense" in done.stdout) is (density > 0)
