"""What connected transports do when a rank fails; each runs on three ranks that are threads."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hvd_sparse.errors import PeerLostError, TransportError, TransportTimeout

Launch = Callable[..., list[Any]]
"""Runs a function of a transport on all ranks, with `timeout_s` for all or by rank."""


def times_out_and_tells_the_others(launch: Launch) -> str:
    """Rank 2 is silent: rank 0 gives up after its timeout, and rank 1 at once because it did.

    Returns:
        What rank 1 says.
    """
    errors: dict[int, TransportError] = {}

    def rank(t: Any) -> None:
        start = time.monotonic()
        if t.rank < 2:
            with pytest.raises(TransportError) as caught:
                t.exchange(None, None, 2 if t.rank == 0 else 0, channel="c").wait()
            errors[t.rank] = caught.value
            with pytest.raises(type(caught.value), match="of no more use"):
                t.exchange(None, None, 2, channel="c")
        else:
            while len(errors) < 2:
                time.sleep(0.02)
        assert time.monotonic() - start < 6.0

    launch(3, rank, timeout_s=[0.5, 30.0, 30.0])
    assert isinstance(errors[0], TransportTimeout)
    assert "rank 2 did not answer within 0.5 s" in str(errors[0])
    assert isinstance(errors[1], PeerLostError)
    return str(errors[1])


def aborts_from_another_thread(launch: Launch) -> list[str]:
    """All ranks wait in a circle for what nobody sends, until rank 0's timer aborts.

    Returns:
        What each rank says.
    """

    def rank(t: Any) -> str:
        if t.rank == 0:
            threading.Timer(0.2, t.abort).start()
        start = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            t.exchange(None, None, (t.rank + 1) % 3, channel="c").wait()
        assert time.monotonic() - start < 5.0
        return str(caught.value)

    return launch(3, rank, timeout_s=30.0)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """A block in which this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
