"""Messages over a gloo group of torch.distributed that only this package uses.

It touches no global process group. `meeting` describes how the ranks learn each other's addresses,
and what listens.

Gloo accepts a message shorter than the posted buffer, but ends the whole process on a longer one.
The tags (see `framing`) keep a message from meeting a buffer shorter than its capacity.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import override

from hvd_sparse.errors import PeerLostError, TransportError, TransportTimeout
from hvd_sparse.transports.meeting import dist
from hvd_sparse.transports.point_to_point import PointToPointTransport, Request

_ABORT_TAG = (1 << 31) - 1  # above the tags of all messages
_SHORTEST_WAIT = timedelta(milliseconds=1)  # gloo takes 0 for its own default
LONGEST_WAIT = timedelta(days=3650)

CONNECTING_S = 5.0
"""Connecting may take at least this long: on a busy host, ranks begin seconds apart."""


class GlooTransport(PointToPointTransport):
    """One rank of a gloo group.

    The ranks meet in `store`, a `torch.distributed.Store`. `host` is the IPv4 address where the
    others reach this rank.

    Raises:
        TransportError: Not all ranks connected within the timeout, or within `CONNECTING_S` where
            that is longer.
    """

    name = "gloo"

    def __init__(
        self, rank: int, world_size: int, store: Any, *, host: str, timeout_s: float
    ) -> None:
        super().__init__(rank, world_size, timeout_s)
        self.host = host
        self._store = store  # torch holds its C++ part only, and would call what is gone
        try:
            # The group's options have no public name in torch.
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=max(timeout_s, CONNECTING_S))
            options._threads = 1
            # At once, not when first used: the store is of no use later.
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
            self._group = dist.ProcessGroupGloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise TransportError(
                f"rank {rank} could not connect the {world_size} ranks over {host}: {error}"
            ) from error

    @override
    def close(self) -> None:
        if self._open:
            self.abort()
        super().close()
        self._group = None

    def _isend(self, peer: int, message: torch.Tensor, tag: int) -> Request:
        try:
            return _Pending(self, peer, None, self._group.send([message], peer, tag))
        except RuntimeError as error:
            raise self.error_of(error, peer) from error

    def _irecv(self, peer: int, capacity: int, tag: int) -> Request:
        buffer = self._buffers.take(capacity)
        try:
            return _Pending(self, peer, buffer, self._group.recv([buffer], peer, tag))
        except RuntimeError as error:
            raise self.error_of(error, peer) from error

    def _abort_connections(self) -> None:
        # ProcessGroupGloo.abort leaves pending waits alone. A receive that times out closes all
        # connections of its group: the peers see them closed, and so do this rank's other waits.
        group = self._group
        if group is None:
            return
        for peer in range(self.world_size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    scratch = torch.empty(1, dtype=torch.uint8, device="cpu")
                    group.recv([scratch], peer, _ABORT_TAG).wait(_SHORTEST_WAIT)

    def error_of(self, error: RuntimeError, peer: int) -> TransportError:
        """What a failure in gloo means; only its text tells failures apart."""
        reason = str(error).partition("\n")[0].partition(". This is typically")[0]
        if "imed out" in reason:
            return TransportTimeout(
                f"rank {self.rank}: rank {peer} did not answer within {self.timeout_s:g} s"
            )
        return PeerLostError(f"rank {self.rank} lost the connection to rank {peer}: {reason}")


@dataclass(eq=False, slots=True)
class _Pending:
    """One of gloo's sends or receives; holds the receive's buffer (gloo holds the send's)."""

    _transport: GlooTransport
    _peer: int
    _buffer: torch.Tensor | None
    _work: Any

    def wait(self, deadline: float) -> torch.Tensor | None:
        remaining = LONGEST_WAIT
        if deadline != math.inf:
            remaining = max(timedelta(seconds=deadline - time.monotonic()), _SHORTEST_WAIT)
        try:
            self._work.wait(remaining)
        except RuntimeError as error:
            raise self._transport.error_of(error, self._peer) from error
        return self._buffer
