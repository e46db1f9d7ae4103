"""How the ranks of a gloo or NCCL group learn each other's addresses, and what listens meanwhile.

Gloo needs no server. Each rank puts one entry into a store, its addresses, and then reads everyone
else's. `MeetingStore` does that by one allgather over Horovod: nothing listens for it, and nothing
is left of it once the group is connected. What listens is gloo itself: one TCP port per rank and
group, bound to the rank's chosen address (`network`; on one host, 127.0.0.1), until `close`. It
gives a connection to a pair of ranks only while they connect; a stranger who connects later costs
one descriptor and is heard no further.

NCCL asks a store for as long as the group lives, and not all ranks ask alike. So it gets a
`TCPStore`, which rank 0 binds to its chosen address, until `close`. A stranger on that network who
finds the port can write to the store, but has to guess the prefix of its keys, 16 random bytes that
went over Horovod.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from hvd_sparse.errors import TransportError

dist: Any = torch.distributed  # its type hints leave out what is used here

BACKLOG = 1024
"""Connections that may wait to be accepted: more than the ranks of one group in practice."""

ROUNDS = 4
"""Allgathers that one key may take; gloo needs one."""


class MeetingStore(dist.Store):  # type: ignore[misc]
    """A store whose entries go to all ranks by allgather, as soon as one is asked for.

    Every rank writes what it has to tell, and then asks for what the others wrote: the first
    question for a key that is not there starts an allgather of all that was written since the last.
    All ranks therefore have to take turns in the same way, as they do in gloo's full mesh.

    Args:
        allgather: Gives every rank's object to every rank, in order; collective.
    """

    def __init__(self, allgather: Callable[[dict[str, bytes]], list[dict[str, bytes]]]) -> None:
        super().__init__()
        self._allgather = allgather
        self._entries: dict[str, bytes] = {}
        self._new: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Writes an entry; the others see it after the next round."""
        self._new[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """An entry of any rank; collective where it is not here yet."""
        self.wait([key])
        return self._entries[key]

    def check(self, keys: list[str]) -> bool:
        """Whether the entries are here."""
        return all(key in self._entries for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Fetches the entries; the allgather has a timeout of its own.

        Raises:
            TransportError: Nobody wrote them.
        """
        for _ in range(ROUNDS):
            if self.check(keys):
                return
            new, self._new = self._new, {}
            for entries in self._allgather(new):
                self._entries.update(entries)
        missing = [key for key in keys if key not in self._entries]
        if missing:
            raise TransportError(f"no rank has written {missing} while the ranks met")


def listen(address: str) -> socket.socket:
    """A TCP socket that listens on some port of one address.

    Raises:
        TransportError: The address cannot be bound.
    """
    try:
        return socket.create_server((address, 0), backlog=BACKLOG)
    except OSError as error:
        raise TransportError(f"cannot listen on {address}: {error}") from error


def serve_store(address: str, timeout_s: float) -> tuple[Any, int]:
    """Starts a `TCPStore` that listens on one address only, on rank 0.

    Args:
        address: IPv4 address of the interface to listen on.
        timeout_s: Seconds after which a question to the store gives up.

    Returns:
        The store, and the port that it listens on.

    Raises:
        TransportError: The address cannot be bound.
    """
    listener = listen(address)
    port: int = listener.getsockname()[1]
    descriptor = listener.detach()  # the store's from here on: it closes it
    store = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=descriptor,
    )
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> Any:
    """Connects to rank 0's store.

    Raises:
        TransportError: It cannot be reached within the timeout.
    """
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise TransportError(f"cannot reach rank 0's store at {host}:{port}: {error}") from error
