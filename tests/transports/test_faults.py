"""Ranks that are busy, stopped, of another release, or that fail, over real processes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import horovod.torch as hvd
import pytest
import torch

from hvd_sparse._version import __version__
from hvd_sparse.errors import HvdSparseError, PeerLostError, PlanError, TransportTimeout
from hvd_sparse.transports import Context, Transport
from hvd_sparse.transports import connect as handshake
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport
from tests.asleep import meet
from tests.launch import Controller, horovodrun
from tests.lean import start_lean
from tests.rest import rest

TIMEOUT_S = 4.0

MARGIN_S = 10.0
"""What a busy machine may add."""

Make = Callable[[], Transport]


def error_of(action: Callable[[], object]) -> HvdSparseError:
    """What an action raises, in good time."""
    start = time.monotonic()
    try:
        action()
    except HvdSparseError as error:
        took_s = time.monotonic() - start
        report(f"{type(error).__name__} after {took_s:.1f} s: {error}")
        assert took_s < TIMEOUT_S + MARGIN_S
        return error
    raise AssertionError("nothing was raised")


def closed(transport: Transport) -> None:
    """Closes a transport that has failed, which must not take long either."""
    start = time.monotonic()
    transport.close()
    assert time.monotonic() - start < MARGIN_S


def busy_rank(make: Make) -> None:
    """Rank 0 is busy for twice the timeout; nothing happens."""
    transport = make()
    if hvd.rank() == 0:
        time.sleep(2 * TIMEOUT_S)
    assert transport.allreduce_sum(torch.ones(1), channel="c").item() == 3
    transport.close()


def first_cause(make: Make) -> None:
    """Rank 1 fails while the others wait, not all of them for it."""
    transport = make()
    transport.allreduce_sum(torch.ones(1), channel="c")
    meet("cause")
    if hvd.rank() == 1:
        transport.abort(ValueError("of rank 1"))
    error = error_of(
        lambda: transport.exchange(None, None, (hvd.rank() + 1) % 3, channel="c").wait()
    )
    assert isinstance(error, PeerLostError)
    assert "rank 1 aborted the transport: ValueError('of rank 1')" in str(error)
    closed(transport)


class Unspeakable(ValueError):
    def __repr__(self) -> str:
        raise AttributeError("a mistake in the user's code")


def cause_without_words(make: Make) -> None:
    transport = make()
    if hvd.rank() == 1:
        transport.abort(Unspeakable())
    error = error_of(lambda: transport.allgather((), channel="c"))
    assert "rank 1 aborted the transport: Unspeakable" in str(error)
    closed(transport)


def different_calls(make: Make) -> None:
    """Rank 1 expects other sizes than it gets, as after `reassign` on it alone."""
    transport = make()
    content = (torch.zeros(100_000, dtype=torch.uint8),)
    transport.context = Context("layer", 3)
    transport.allgather(content, channel="c")
    if hvd.rank() == 1:
        transport.context = Context("other", 0)
    error = error_of(lambda: transport.allgather(content, channel="c"))
    assert "the ranks make different calls" in str(error), error
    assert isinstance(error, PlanError), error
    closed(transport)


def other_release(make: Make) -> None:
    """Rank 1 runs another release."""
    if hvd.rank() == 1:
        handshake.__version__ = "9.9"
    error = error_of(make)
    assert isinstance(error, PlanError)
    assert "9.9 (protocol" in str(error)
    if hvd.rank() == 1:
        handshake.__version__ = __version__
    meet("release")


def stopped_rank(make: Make) -> None:
    """Rank 2 is stopped: the others give it up, and once it goes on, it learns that."""
    transport = make()
    parts = transport.allgather((torch.tensor([os.getpid()]),), channel="pids")
    pids = [int(part.view(torch.int64)) for part in parts]
    transport.context = Context("layer", 8)
    meet("stop")
    if hvd.rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)

    def go_on() -> None:
        for _ in range(100):  # rank 2 may find that the others had sent it all of the first
            transport.allreduce_sum(torch.ones(1), channel="c")
            time.sleep(0.05)

    error = error_of(go_on)
    if hvd.rank() < 2:
        assert "rank 2 did not answer within 4 s" in str(error), error
        assert "(bucket 'layer', step 8)" in str(error), error
    closed(transport)
    if hvd.rank() == 0:
        time.sleep(1.0)
        os.kill(pids[2], signal.SIGCONT)
    meet("stopped")


def tensor_of_one_rank(make: Make) -> None:
    """Rank 1 waits for Horovod, with a tensor that no other rank has; the others exchange."""
    transport = make()
    meet("tensor")
    if hvd.rank() == 1:
        with transport.waiting:
            while transport.failure is None:
                time.sleep(0.02)
        assert isinstance(transport.failure, PlanError)
    else:
        error = error_of(lambda: transport.allreduce_sum(torch.ones(1), channel="c"))
        assert isinstance(error, PlanError), error
        assert "rank 1 has given Horovod a tensor that not all ranks have" in str(error), error
    closed(transport)


def late_in_mpi(make: Make) -> None:
    """Rank 1 does not come to MPI's part of connecting, which has no bound of its own."""
    if sys.argv[1] != "mpi":
        return

    def late(*arguments: object) -> NoReturn:
        time.sleep(TIMEOUT_S + MARGIN_S / 2)
        raise PeerLostError("late")

    if hvd.rank() == 1:
        handshake._connect = late  # type: ignore[assignment]
        with pytest.raises(PeerLostError, match="late"):
            make()
        return
    error = error_of(make)
    assert isinstance(error, TransportTimeout), error
    assert "MPI did not connect the ranks within 4 s" in str(error)


def rank_without_compression(make: Make) -> None:
    """Rank 1 never connects."""
    if hvd.rank() == 1:
        time.sleep(TIMEOUT_S + MARGIN_S / 2)
        return
    error = error_of(make)
    assert isinstance(error, TransportTimeout)
    assert "each rank needs a compression" in str(error)


def report(text: str) -> None:
    sys.stdout.write(f"rank {hvd.rank()}: {text}\n")
    sys.stdout.flush()


def main() -> NoReturn:
    name = sys.argv[1]
    start_lean()
    hvd.init()
    world = HorovodBootstrap()

    def make() -> Transport:
        transport = create_transport(name, world, TIMEOUT_S)
        assert transport.name == name
        return transport

    faults = (busy_rank, first_cause, cause_without_words, different_calls, other_release)
    faults += (tensor_of_one_rank,)
    for fault in (*faults, stopped_rank, late_in_mpi, rank_without_compression):
        report(f"-- {fault.__name__}")
        start = time.monotonic()
        fault(make)
        report(f"{fault.__name__} took {time.monotonic() - start:.1f} s")
    report(f"faults over {name} passed")
    meet("passed")  # the slowest has said so, too
    os._exit(0)  # what rank 1 left pending would keep Horovod


pytestmark = [pytest.mark.timeout(240), pytest.mark.launches, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "controller"),
    [
        ("gloo", "gloo"),
        pytest.param("mpi", "mpi", marks=rest),
    ],
)
def test_faults(name: str, controller: Controller) -> None:
    # MPI says that the processes ended without it, which they mean to.
    done = horovodrun(
        3, "transports/test_faults.py", name, controller=controller, timeout=200.0, check=False
    )
    output = done.stdout + done.stderr
    assert len(re.findall(f"faults over {name} passed", output)) == 3, output
    assert re.search(r"rank [12] has waited [\d.]+ s for .*busy elsewhere", output), output


if __name__ == "__main__":
    main()
