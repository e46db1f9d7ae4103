"""A process that saves a checkpoint is killed at each of its operations on files, one by one.

    python tests/engine/checkpoint_kills.py FOLDER

Each time a child of this process saves; ranks are its threads. Prints how many were killed.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hvd_sparse.engine.checkpoint import load_checkpoint, save_checkpoint
from hvd_sparse.engine.state import EngineState
from hvd_sparse.transports import Transport, run_ranks

WORLD_SIZE = 2
OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir"}
"""What Python's audit calls them; a file's renaming comes after its content is on the disk."""


def gather_over(transport: Transport) -> Callable[[Any], list[Any]]:
    def gather(mine: Any) -> list[Any]:
        payload = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        received = transport.allgather((payload,), channel="checkpoint")
        return [pickle.loads(bytes(message.numpy())) for message in received]

    return gather


def state_of(step: int, rank: int) -> EngineState:
    return EngineState({"weight": torch.full((50,), 10.0 * step + rank)}, step=step)


def save(folder: Path, step: int) -> None:
    def worker(transport: Transport) -> None:
        rank, size = transport.rank, transport.world_size
        state = state_of(step, rank).as_dict()
        save_checkpoint(folder, lambda: state, rank, size, gather_over(transport))

    run_ranks(WORLD_SIZE, worker, timeout_s=60.0)


def loaded_step(folder: Path) -> int:
    """The step of the checkpoint that stands, which is whole on every rank."""

    def worker(transport: Transport) -> int:
        rank, size = transport.rank, transport.world_size
        state = load_checkpoint(folder, rank, size, gather_over(transport)).state
        expected = state_of(state["step"], rank).residual["weight"]
        assert torch.equal(state["residual"]["weight"], expected)
        return int(state["step"])

    steps = run_ranks(WORLD_SIZE, worker, timeout_s=60.0)
    assert len(set(steps)) == 1, steps
    return steps[0]


def die_at(operation: int, folder: Path) -> None:
    """Kill this process at its n-th operation on files of the folder."""
    left = [operation]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPERATIONS and str(arguments[0]).startswith(str(folder)):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(hook)


def in_a_child(action: Callable[[], object]) -> int:
    """Its status; whoever forks must have no threads, so every rank's are in children."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    before, after = 3, 4

    def die_in_a_save(operation: int) -> None:
        die_at(operation, folder)
        save(folder, after)

    def stands_whole() -> None:
        assert loaded_step(folder) in (before, after)

    def can_be_replaced() -> None:
        save(folder, after + 1)
        assert loaded_step(folder) == after + 1
        assert len(list(folder.iterdir())) == WORLD_SIZE + 1, list(folder.iterdir())

    kills = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        assert in_a_child(lambda: save(folder, before)) == 0
        status = in_a_child(lambda at=kills: die_in_a_save(at))
        for check in (stands_whole, can_be_replaced):
            assert in_a_child(check) == 0, (kills, check.__name__)
        if status == 0:
            break
        assert status == -signal.SIGKILL, status
        kills += 1
    print(f"KILLED {kills}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
