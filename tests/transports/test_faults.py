"""Ranks that are busy, stopped, of another release, or that fail, over real processes."""

from __future__ import annotations

import re

import pytest

from tests.launch import Controller, horovodrun
from tests.rest import rest

pytestmark = [pytest.mark.timeout(240), pytest.mark.launches, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "controller"),
    [("gloo", "gloo"), ("mpi", "mpi"), pytest.param("horovod", "gloo", marks=rest)],
)
def test_faults(name: str, controller: Controller) -> None:
    # MPI says that the processes ended without it, which they mean to.
    done = horovodrun(
        3, "transport_faults.py", name, controller=controller, timeout=200.0, check=False
    )
    output = done.stdout + done.stderr
    assert len(re.findall(f"faults over {name} passed", output)) == 3, output
    assert re.search(r"rank [12] has waited [\d.]+ s for .*busy elsewhere", output), output
