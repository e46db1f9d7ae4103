"""The adapter under the unmodified horovodrun: real processes, gloo and MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import WORKERS, Controller, horovodrun
from tests.workers.adapter_equalities import SCENARIOS

CONTROLLERS = [
    "gloo",
    pytest.param(
        "mpi", marks=pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
    ),
]


@pytest.mark.timeout(360)
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("method", ["topk", "oktopk"])
def test_a_lossless_exchange_trains_to_the_same_weights(
    controller: Controller, world_size: int, method: str
) -> None:
    done = horovodrun(
        world_size, "adapter_equalities.py", "--method", method, controller=controller, timeout=300
    )
    for name in SCENARIOS:
        assert f"EQUAL {name}" in done.stdout


@pytest.mark.parametrize("transport", ["horovod", "gloo"])
def test_every_transport_can_be_asked_for(transport: str) -> None:
    done = horovodrun(
        2,
        "adapter_equalities.py",
        *("--only", "average", "process_sets", "num_groups"),
        env={"HVD_SPARSE_TRANSPORT": transport},
        timeout=120,
    )
    assert done.stdout.count("EQUAL") == 3


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_what_cannot_work_is_refused_by_name(controller: Controller) -> None:
    done = horovodrun(2, "adapter_refusals.py", controller=controller, timeout=120)
    for op in ("Min", "Max", "Product", "Adasum"):
        assert f"REFUSED op=hvd.{op} " in done.stdout
    assert "REFUSED second optimizer" in done.stdout


def test_a_rank_that_waits_leaves_its_processor_alone() -> None:
    """Horovod's own wait takes all of one: a share of 1."""
    done = horovodrun(2, "adapter_waiting.py", timeout=120)
    shares = [line.split()[-1] for line in done.stdout.splitlines() if "SHARE" in line]
    assert len(shares) == 6
    assert all(float(share) < 0.3 for share in shares), done.stdout


def test_join_is_refused_and_no_rank_hangs() -> None:
    done = horovodrun(3, "adapter_join.py", timeout=90, check=False)
    assert done.returncode != 0
    assert "hvd.join() cannot be used" in done.stdout + done.stderr


def test_an_impossible_transport_says_why() -> None:
    done = horovodrun(
        2,
        "adapter_equalities.py",
        *("--only", "average"),
        env={"HVD_SPARSE_TRANSPORT": "mpi"},
        timeout=90,
        check=False,
    )
    assert done.returncode != 0
    assert "HVD_SPARSE_TRANSPORT" in done.stdout + done.stderr


@pytest.mark.parametrize("elastic", ["", "1"])
def test_a_process_of_its_own(elastic: str) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKERS / "adapter_alone.py")],
        env={**os.environ, "HOROVOD_ELASTIC": elastic, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TRAINED" in done.stdout


def test_elastic_recovers_with_its_residuals() -> None:
    done = horovodrun(
        2,
        "adapter_elastic.py",
        hosts="localhost:1,127.0.0.1:1",
        options=["--min-np", "1", "--network-interface", "lo"],
        timeout=150,
    )
    assert "RECOVERED world 1" in done.stdout
