"""An elastic job on real processes, through deaths and changes of hosts; books of whole numbers.

Commits that are apart are in tests/adapter/test_elastic.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import HOROVODRUN, launch_environment, python_command, run_in_group
from tests.rest import rest
from tests.workers.elastic_faults import Event, write_plan
from tests.workers.fault_matrix import TWO_LEVELS

pytestmark = [pytest.mark.launches, pytest.mark.slow, pytest.mark.timeout(300)]

A, B, C, D, E = "localhost", "127.0.0.1", "127.1", "127.0.1", "0x7f.1"
"""Names of this machine: to Horovod each one is a host. It does not take one back that failed."""


START_S = 60
"""What a message of Horovod's own may take. Those who wait for a worker that joins wait so long for
its start; whoever has waited in vain ends by SIGABRT."""

SHORT_S = 8
"""The same where nobody joins. A death within Horovod's own exchange leaves some waiting for it."""


def train_through(
    folder: Path,
    events: Sequence[Event],
    timeout_s: int = START_S,
    *,
    hosts: Sequence[str] = (A, B, C),
    slots: int = 1,
) -> str:
    """Run the job to its end; how many workers were there then."""
    (folder / "hosts").write_text("".join(f"{host}:{slots}\n" for host in hosts))
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
    script.chmod(0o755)
    write_plan(folder, events)
    workers = str(slots * len(hosts))
    command = [*HOROVODRUN, "--gloo", "-np", workers]
    command += ["--min-np", "1", "--host-discovery-script", str(script)]
    command += ["--network-interface", "lo", "--gloo-timeout-seconds", str(timeout_s)]
    command += python_command("elastic_faults.py", folder)
    environment = launch_environment({"PYTHONHASHSEED": "0"})
    if slots > 1:
        environment[TWO_LEVELS] = "1"
    done = run_in_group(command, env=environment, timeout=280, check=False)
    output = done.stdout + done.stderr
    print(output)
    report(folder)
    balanced = re.findall(r"BALANCED in a world of (\d), lost ([\d.e+]+)", output)
    assert balanced, output
    return str(balanced[0][0])


def report(folder: Path) -> None:
    worlds = [json.loads(line) for line in (folder / "worlds").read_text().splitlines()]
    deaths = sorted(file.stat().st_mtime for file in folder.glob("event-*"))
    for world in worlds:
        before = [at for at in deaths if at < world["stepped_at"]]
        since = world["stepped_at"] - before[-1] if before else 0.0
        print(f"{len(world['hosts'])} workers from step {world['step']}: {since:.1f} s after")


def test_two_deaths_in_a_row_and_a_worker_that_joins(tmp_path: Path) -> None:
    """The second one dies while the survivors reconnect; the one that joins dies in a commit."""
    events = [
        Event("between", [C], step=6),
        Event("connect", [B], how="exit"),
        Event("hosts", [A, D]),
        Event("world", size=2),
        Event("committed", [D]),
    ]
    assert train_through(tmp_path, events) == "1"


@rest
def test_all_but_one_fail_at_once(tmp_path: Path) -> None:
    events = [
        Event("between", [B, C], how="raise", step=10),
        Event("hosts", [A, D, E]),
        Event("world", size=3),
    ]
    assert train_through(tmp_path, events) == "3"


@rest
def test_hosts_that_leave_in_order(tmp_path: Path) -> None:
    events = [
        Event("hosts", [A, B], step=5),
        Event("world", size=2),
        Event("hosts", [A, B, D]),
        Event("world", size=3),
    ]
    assert train_through(tmp_path, events) == "3"


@rest
def test_deaths_around_a_commit_and_in_sync(tmp_path: Path) -> None:
    events = [Event("save", [C], step=8), Event("sync", [B])]
    assert train_through(tmp_path, events) == "1"


@rest
def test_deaths_in_an_exchange(tmp_path: Path) -> None:
    events = [Event("backward", [B], step=6), Event("backward", [C], step=10)]
    assert train_through(tmp_path, events, SHORT_S) == "1"


@rest
def test_the_death_of_rank_0(tmp_path: Path) -> None:
    events = [Event("committed", [A], step=8), Event("between", [B], how="exit")]
    assert train_through(tmp_path, events, SHORT_S) == "1"


def test_a_host_of_two_workers_dies(tmp_path: Path) -> None:
    """In two levels, of two hosts with two workers each; Horovod ends the dead one's neighbour."""
    events = [Event("between", [f"{B}:1"], step=6)]
    assert train_through(tmp_path, events, SHORT_S, hosts=[A, B], slots=2) == "2"
