"""Some ranks of a transport as a world of their own.

A group numbers its own calls, since other groups may make more or fewer. The ranks of a group make
the same calls in the same order, and so do all ranks in what they call together. Two groups of one
kind are disjoint, and groups of two kinds share at most one rank, so that no two messages are
mistaken for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from hvd_sparse.errors import HvdSparseError
from hvd_sparse.transports.framing import Context, Payload
from hvd_sparse.transports.point_to_point import PointToPointTransport
from hvd_sparse.transports.supervised import NUMBER_BITS
from hvd_sparse.transports.transport import Handle, Transport, check_peers


class GroupTransport(Transport):
    """A view of a transport in which ranks are places in the group.

    Traffic, context, timeouts and failures are the whole transport's; errors name its ranks.
    `kind` numbers the kinds of groups from 1; a rank is in one group of each.
    """

    def __init__(self, transport: PointToPointTransport, ranks: Sequence[int], kind: int) -> None:
        self._whole = transport
        super().__init__(ranks.index(transport.rank), len(ranks), transport.timeout_s)
        self.name, self.traffic = transport.name, transport.traffic
        self.ranks = tuple(ranks)
        self._buffers = transport._buffers
        self._calls = kind << NUMBER_BITS
        transport._made.clear()  # those of a former group have the same numbers

    @property
    def context(self) -> Context:
        return self._whole.context

    @context.setter
    def context(self, context: Context) -> None:
        self._whole.context = context

    @property
    def failure(self) -> HvdSparseError | None:  # type: ignore[override]
        return self._whole.failure

    @override
    def exchange(
        self, payload: Payload | None, dst: int | None, src: int | None, *, channel: str
    ) -> Handle:
        check_peers(self.rank, self.world_size, payload, dst, src)
        to, of = (None if peer is None else self.ranks[peer] for peer in (dst, src))
        theirs = self._whole.renumber(self._calls)
        try:
            return self._whole.exchange(payload, to, of, channel=channel)
        finally:
            self._calls = self._whole.renumber(theirs)

    @override
    def abort(self, reason: object = None) -> None:
        self._whole.abort(reason)

    @override
    def close(self) -> None:
        """Does nothing: the owner of the whole transport closes it."""
