"""Some ranks of a transport as a world of their own.

A group's calls have numbers of their own, since another group may make more of them or fewer: the
ranks of a group make the same calls in the same order, and so do all ranks in what they call
together. Two groups of one kind are disjoint, and groups of two kinds share one rank at most, so
that no two messages are taken for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_sparse.cost_model import Work
from hvd_sparse.errors import HvdSparseError
from hvd_sparse.transports.framing import NUMBER_BITS, Context, Payload
from hvd_sparse.transports.point_to_point import PointToPointTransport
from hvd_sparse.transports.transport import Handle, Traffic, Transport, check_peers


class GroupTransport(Transport):
    """A view of a transport: its ranks are places in the group, and it has nothing else of its own.

    Traffic, context, timeouts and failures are the transport's, and errors name its ranks.

    Args:
        transport: Has more ranks.
        ranks: Those of the group in their order, this rank among them.
        kind: Place of the kind of groups, from 1; a rank is in one group of each.
    """

    def __init__(self, transport: PointToPointTransport, ranks: Sequence[int], kind: int) -> None:
        self._whole = transport
        super().__init__(ranks.index(transport.rank), len(ranks), transport.timeout_s)
        self.name = transport.name
        self.ranks = tuple(ranks)
        self._buffers = transport._buffers
        self._calls = kind << NUMBER_BITS

    @property
    def traffic(self) -> Traffic:
        """That of the whole transport."""
        return self._whole.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        del traffic  # the whole transport has its own

    @property
    def context(self) -> Context:
        """That of the whole transport."""
        return self._whole.context

    @context.setter
    def context(self, context: Context) -> None:
        self._whole.context = context

    @property
    def failure(self) -> HvdSparseError | None:  # type: ignore[override]
        """That of the whole transport."""
        return self._whole.failure

    def exchange(
        self, payload: Payload | None, dst: int | None, src: int | None, *, channel: str
    ) -> Handle:
        """See `Transport.exchange`."""
        check_peers(self.rank, self.world_size, payload, dst, src)
        to, of = (None if peer is None else self.ranks[peer] for peer in (dst, src))
        theirs = self._whole.renumber(self._calls)
        try:
            return self._whole.exchange(payload, to, of, channel=channel)
        finally:
            self._calls = self._whole.renumber(theirs)

    def expect(self, nbytes: int, *, channel: str) -> None:
        """See `Transport.expect`."""
        self._whole.expect(nbytes, channel=channel)

    def worked(self, work: Work) -> None:
        """See `Transport.worked`."""
        self._whole.worked(work)

    def abort(self, reason: object = None) -> None:
        """See `Transport.abort`: of all ranks, in the group or not."""
        self._whole.abort(reason)

    def close(self) -> None:
        """Does nothing: who has made the whole transport closes it."""
