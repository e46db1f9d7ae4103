"""An elastic job on real processes, through deaths and changes of hosts; books of whole numbers.

Commits that are apart are in tests/adapter/test_elastic.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

import hvd_sparse
from tests.faults.test_matrix import TWO_LEVELS
from tests.launch import HOROVODRUN, launch_environment, python_command, run_in_group
from tests.lean import start_lean
from tests.rest import rest
from tools.ledger import Ledger

COMMIT_EVERY = 4
STEP_S = 0.02
TIMEOUT_S = 10.0
STEPS_AFTER = 8
"""Steps from the last event on."""


@dataclass(frozen=True)
class Event:
    """What happens next.

    Attributes:
        phase: Where in a step: "backward", "between", "connect" (the first step of a new world),
            "save" and "committed" (before and after a commit is kept), "sync"; or "hosts", which
            changes the hosts there are; or "world", which waits for a world of `size`.
        hosts: Whom it happens to; with "hosts", who is there from then on. In two levels a worker
            is called by its host and its local rank, as in `localhost:1`.
        how: "kill", "exit" or "raise".
        step: From which step of this history on.
        size: Of the world.
    """

    phase: str
    hosts: Sequence[str] = ()
    how: str = "kill"
    step: int = 0
    size: int = 0


def write_plan(folder: Path, events: Sequence[Event]) -> None:
    (folder / "plan.json").write_text(json.dumps([asdict(event) for event in events]))


class Plan:
    """The events of a job, as one of its workers sees them."""

    def __init__(self, folder: Path) -> None:
        self.host = os.environ["HOROVOD_HOSTNAME"]
        if TWO_LEVELS in os.environ:
            self.host += f":{os.environ['HOROVOD_LOCAL_RANK']}"
        self._folder = folder
        self._events = [Event(**event) for event in json.loads((folder / "plan.json").read_text())]

    def _marker(self, place: int, host: str = "") -> Path:
        return self._folder / f"event-{place}-{host}"

    def _happened(self, place: int) -> bool:
        event = self._events[place]
        hosts = [""] if event.phase in ("hosts", "world") else event.hosts
        return all(self._marker(place, host).exists() for host in hosts)

    def place(self) -> int:
        """Of the next event; their number when all have happened."""
        places = range(len(self._events))
        return next((place for place in places if not self._happened(place)), len(self._events))

    @property
    def done(self) -> bool:
        return self.place() == len(self._events)

    def at(self, phase: str, step: int) -> None:
        """Let happen what is to happen to this worker here."""
        place = self.place()
        if place == len(self._events):
            return
        event = self._events[place]
        if event.phase == "hosts" and hvd.rank() == 0 and phase == "between" and step >= event.step:
            write(self._folder / "hosts", "".join(f"{host}:1\n" for host in event.hosts))
            self._marker(place).touch()
        if event.phase == "world" and hvd.rank() == 0 and event.size == hvd.size():
            self._marker(place).touch()
        if event.phase == phase and step >= event.step and self.host in event.hosts:
            self._fail(place, event.how)

    def _fail(self, place: int, how: str) -> NoReturn:
        """The last one whom the event happens to is the one that dies last."""
        if how == "raise":
            self._marker(place, self.host).touch()
            raise ValueError("a failure of the script's own")
        self._marker(place, self.host).touch()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)


def write(path: Path, text: str) -> None:
    """Whole or not at all: the discovery script reads it meanwhile."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3000))
        self.second = nn.Parameter(torch.zeros(40, 50))
        self.bias = nn.Parameter(torch.zeros(30))


class Books(Ledger):
    """A ledger that a worker writes down with each commit."""

    def __init__(self, folder: Path, host: str, model: nn.Module) -> None:
        super().__init__(model.named_parameters())
        self._folder, self._host = folder, host

    def _file(self, host: str, step: int) -> Path:
        return self._folder / f"books-{host}-{step}.pt"

    def write(self, step: int, residual: dict[str, Tensor]) -> None:
        page = {"fed": self.fed, "residual": {**self.nothing(), **residual}}
        torch.save(page, self._folder / f"{self._host}.partial")
        (self._folder / f"{self._host}.partial").rename(self._file(self._host, step))

    def turn_back(self, step: int) -> None:
        """This worker is at a step of its own past, or begins there."""
        page = self._page(self._host, step)
        self.fed = self.nothing() if page is None else page["fed"]

    def _page(self, host: str, step: int) -> dict[str, Any] | None:
        file = self._file(host, step)
        return torch.load(file, weights_only=True) if file.exists() else None

    def of_the_dead(self, worlds: Sequence[dict[str, Any]]) -> tuple[dict[str, Tensor], float]:
        """What workers that are gone have brought into the weights, and the L1 norm they held."""
        applied, held = self.nothing(), 0.0
        for before, after in pairwise(worlds):
            for host in set(before["hosts"]) - set(after["hosts"]):
                page = self._page(host, after["step"])
                if page is None:  # it came after the last commit
                    continue
                for name in applied:
                    applied[name] += page["fed"][name] - page["residual"][name]
                    held += float(page["residual"][name].double().abs().sum())
        return applied, held


class State(hvd.elastic.TorchState):  # type: ignore[misc]
    """One in which workers can die at any point of a commit and of `sync`."""

    def __init__(self, plan: Plan, *arguments: Any, **parts: Any) -> None:
        object.__setattr__(self, "_plan", plan)
        super().__init__(*arguments, **parts)

    def save(self) -> None:
        self._plan.at("save", self.step)
        super().save()

    def check_host_updates(self) -> None:
        self._plan.at("committed", self.step)
        super().check_host_updates()

    def sync(self) -> None:
        self._plan.at("sync", self.step)
        super().sync()


def gradient(step: int, host: str, name: str, like: Tensor) -> Tensor:
    seed = hash((step, host, name)) % (1 << 30)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, like.shape, generator=generator).float()


def train_on(folder: Path) -> None:
    """Train through all events, and balance the books."""
    plan = Plan(folder)
    model = Model()
    compression = hvd_sparse.Compression.oktopk(
        model.named_parameters(),
        density=0.02,
        dense_below=100,
        timeout_s=TIMEOUT_S,
        hierarchical=TWO_LEVELS in os.environ,
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Sum,
    )
    books = Books(folder, plan.host, model)
    log = folder / "worlds"

    def one_step(step: int) -> None:
        optimizer.zero_grad()
        product = torch.zeros(())
        for name, p in model.named_parameters():
            own = gradient(step, plan.host, name, p)
            books.feed({name: own})
            term = (p * own).sum()
            if name == "second":  # its gradient comes before that of the first
                term.register_hook(lambda _: plan.at("backward", step))
            product = product + term
        product.backward()
        optimizer.step()

    @hvd.elastic.run
    def train(state: State) -> None:
        hosts = hvd.allgather_object(plan.host, name="elastic.hosts")
        world = {"step": state.step, "hosts": hosts, "at": time.time()}
        books.turn_back(state.step)
        assert state.step == 0 or hvd.rank() > 0 or books.fed["first"].any()
        plan.at("connect", state.step)
        one_step(state.step)
        state.step += 1
        if hvd.rank() == 0:
            with log.open("a") as file:
                file.write(json.dumps({**world, "stepped_at": time.time()}) + "\n")
        until = None
        while until is None or state.step < until:
            time.sleep(STEP_S)
            plan.at("between", state.step)
            one_step(state.step)
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                books.write(state.step, compression.state_dict()["residual"])
                state.commit()
                if until is None and hvd.broadcast_object(plan.done, name="elastic.done"):
                    until = state.step + STEPS_AFTER

    state = State(plan, model, optimizer, compression=compression, step=0)
    train(state)
    balance(compression, books, [json.loads(line) for line in log.read_text().splitlines()])


def balance(compression: Any, books: Books, worlds: list[dict[str, Any]]) -> None:
    """What living and dead have brought is what the weights have, and the residuals hold."""
    dead, lost_l1 = books.of_the_dead(worlds)
    assert books.lost(compression.state_dict()["residual"], departed=dead) == 0.0
    stats = compression.stats()
    assert stats.dropped_l1 == 0.0
    if all(books._host in world["hosts"] for world in worlds):  # who came later knows less
        assert stats.lost_l1 == lost_l1, (stats.lost_l1, lost_l1)
        print(f"BALANCED in a world of {hvd.size()}, lost {lost_l1:g}", flush=True)


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
    command += python_command("faults/test_elastic.py", folder)
    environment = launch_environment({"PYTHONHASHSEED": "0"})
    if slots > 1:
        environment[TWO_LEVELS] = "1"
    done = run_in_group(command, env=environment, timeout=280, check=False)
    output = done.stdout + done.stderr
    print(output)
    report(folder)
    balanced = re.findall(r"BALANCED in a world of (\d), lost ([\d.e+]+)", output)
    assert balanced, output
    assert "AssertionError" not in output, output
    return str(balanced[0][0])


def report(folder: Path) -> None:
    worlds = [json.loads(line) for line in (folder / "worlds").read_text().splitlines()]
    deaths = sorted(file.stat().st_mtime for file in folder.glob("event-*"))
    for world in worlds:
        before = [at for at in deaths if at < world["stepped_at"]]
        since = world["stepped_at"] - before[-1] if before else 0.0
        print(f"{len(world['hosts'])} workers from step {world['step']}: {since:.1f} s after")


@rest
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


if __name__ == "__main__":
    start_lean()
    hvd.init()
    train_on(Path(sys.argv[1]))
