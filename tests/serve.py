"""A rank that stays: it does what the tests ask for, one scenario after the other.

`tests.ranks` is the other end, and says what it asks.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from multiprocessing.connection import Client
from typing import Any

import torch

from tests.lean import start_lean
from tests.ranks import Done, Scenario

ALL_BUT_RANK_0: list[Any] = []
"""Made with the world. With dynamic sets Horovod's threads starve each other on a lock."""


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def done(scenario: Scenario) -> Done:
    """What the scenario prints and returns on this rank, or the traceback of what it raises."""
    function, arguments, env = scenario
    said = io.StringIO()
    result, error = None, ""
    with environment(env), redirect_stdout(said), warnings.catch_warnings():
        try:
            result = function(*arguments)
        except BaseException:
            error = traceback.format_exc()
    gc.collect()  # lest what it leaves behind is destroyed in the middle of the next one
    return Done(said.getvalue(), result, error)


def start_horovod() -> tuple[int, Callable[[], None]]:
    """This rank, and what ends its world."""
    import horovod.torch as hvd

    start_lean()
    size = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
    ALL_BUT_RANK_0.extend([hvd.ProcessSet(range(1, size))] if size > 1 else [])
    hvd.init(process_sets=ALL_BUT_RANK_0)
    return hvd.rank(), hvd.shutdown


def start_torch() -> tuple[int, Callable[[], None]]:
    """The same under torchrun, where Horovod cannot be imported."""
    sys.modules["horovod"] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank(), torch.distributed.destroy_process_group


def serve(address: str) -> None:
    rank, end = start_torch() if "TORCHELASTIC_RUN_ID" in os.environ else start_horovod()
    faulthandler.register(signal.SIGUSR1)
    with Client(address, "AF_UNIX") as tests:
        tests.send((rank, os.getpid()))
        while (scenario := tests.recv()) is not None:
            tests.send(done(scenario))
    end()


if __name__ == "__main__":
    # Not this module's own function: scenarios import the module under its name.
    from tests import serve as module

    module.serve(sys.argv[1])
