"""What ranks tell each other before they connect: a token, and where their watches are asked."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_sparse.errors import TransportError
from hvd_sparse.transports.handshake import Gatherer
from hvd_sparse.transports.network import Endpoint, HostReport, choose_endpoints

logger = logging.getLogger("hvd_sparse")


@dataclass(frozen=True)
class Introduction:
    """What ranks must know of each other before they connect.

    Attributes:
        token: 16 random bytes in hexadecimal, another one for each transport. Not a counter: in an
            elastic job, the ranks have made different numbers of transports.
        listener: Where this rank's watch is asked, or None where there is none.
        addresses: Where the ranks' watches are asked, in order.
    """

    token: str
    listener: socket.socket | None
    addresses: list[tuple[str, int] | None]

    def close(self) -> None:
        """Stops to listen."""
        if self.listener is not None:
            self.listener.close()


def endpoints_of(chosen: str, hosts: Sequence[HostReport]) -> list[Endpoint] | None:
    """The ranks' addresses; None where they share no network, and the transport needs none."""
    try:
        return choose_endpoints(hosts)
    except TransportError as error:
        if chosen in ("gloo", "nccl"):
            raise
        logger.warning("peers that stop will end waits only by timeout_s: %s", error)
        return None


def introduce(world: Gatherer, endpoints: list[Endpoint] | None, timeout_s: float) -> Introduction:
    """Begins to listen, and gathers where the others do; collective.

    Args:
        world: The ranks.
        endpoints: Their addresses, or None where there will be no watch.
        timeout_s: Seconds until the ranks that have not come are given up.

    Raises:
        TransportError: A rank cannot listen; on all of them.
    """
    listener, port = None, None
    if endpoints is not None and world.size > 1:
        from hvd_sparse.transports.meeting import listen

        try:
            listener = listen(endpoints[world.rank].address)
            port = listener.getsockname()[1]
        except TransportError as error:  # the peers wait for word of it
            port = str(error)
    mine = (secrets.token_hex(16), port)
    try:
        every = gather(world, "hvd_sparse.introduction", timeout_s, mine)
        for rank, (_, theirs) in enumerate(every):
            if isinstance(theirs, str):
                raise TransportError(f"rank {rank} {theirs}")
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    addresses = [
        None if endpoints is None or theirs is None else (endpoints[rank].address, theirs)
        for rank, (_, theirs) in enumerate(every)
    ]
    return Introduction(every[0][0], listener, addresses)


def gather(world: Gatherer, name: str, timeout_s: float, obj: Any) -> list[Any]:
    """Every rank's object; a world of one needs no word."""
    return [obj] if world.size == 1 else world.allgather_object(obj, name, timeout_s)
