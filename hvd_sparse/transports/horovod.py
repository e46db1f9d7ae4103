"""Messages over Horovod's own operations: this needs nothing but Horovod, and has its latency.

An exchange is an alltoall in which each rank has at most one non-empty split. Horovod tells the
sizes of what arrives, so these messages have no header and need no capacity.

Horovod negotiates each operation by its name, and remembers shapes by name in a cache that dense
gradients need too. Names repeat after `NAMES` operations, so that they do not fill it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from hvd_sparse.errors import PeerLostError, PlanError, TransportError, TransportTimeout
from hvd_sparse.transports.framing import Payload, flatten, payload_nbytes
from hvd_sparse.transports.horovod_handles import Pauses
from hvd_sparse.transports.supervised import Awaiting, Call, SupervisedTransport
from hvd_sparse.transports.transport import ALIGNMENT, Done, Handle, check_peers

NAMES = 32
"""Names, and so the most operations in flight."""

SPIN_S = 50e-6
"""Spin this long before sleeping; Horovod looks for work once a millisecond."""


class HorovodTransport(SupervisedTransport):
    """One rank of a Horovod process set.

    `traffic` counts payloads as if they went straight to each peer. A wait gives up after
    `timeout_s`; the operation stays with Horovod, whose `shutdown` ends it. `label` is a part of
    the operations' names: the same on all ranks, new for each transport.
    """

    name = "horovod"

    def __init__(
        self, rank: int, world_size: int, *, process_set: Any, timeout_s: float, label: str
    ) -> None:
        super().__init__(rank, world_size, timeout_s)
        import horovod.torch as hvd

        self.hvd = hvd
        self._process_set = process_set
        self._label = label
        self._started = 0
        self.named: dict[str, _Operation] = {}
        self._others = tuple(peer for peer in range(world_size) if peer != rank)
        self.awaited: tuple[str, float] | None = None

    def exchange(
        self, payload: Payload | None, dst: int | None, src: int | None, *, channel: str
    ) -> Handle:
        """`Transport.exchange`; even a rank that neither sends nor receives takes part."""
        nbytes = check_peers(self.rank, self.world_size, payload, dst, src)
        own = flatten((payload or ()) if dst is not None else (), self._buffers)
        if self.world_size == 1:
            self._raise_failure()
            return Done(own if src is not None else None)
        splits = [0] * self.world_size
        if dst is None or dst == self.rank:
            operation = self._alltoall(torch.empty(0, dtype=torch.uint8, device="cpu"), splits)
        else:
            splits[dst] = nbytes
            operation = self._alltoall(own, splits)
            self.traffic.sent(nbytes)
        return _Exchange(self, operation, src, own if src == self.rank else None)

    def all_to_all(self, payloads: Sequence[Payload], *, channel: str) -> list[torch.Tensor]:
        """`Transport.all_to_all`, in one operation."""
        P, r = self.world_size, self.rank
        if len(payloads) != P:
            raise ValueError(f"all_to_all takes a payload per rank, {P}, got {len(payloads)}")
        own = flatten(payloads[r], self._buffers)
        if P == 1:
            self._raise_failure()
            return [own]
        others = [() if rank == r else payload for rank, payload in enumerate(payloads)]
        splits = [payload_nbytes(payload) for payload in others]
        operation = self._alltoall(
            flatten([t for payload in others for t in payload], self._buffers), splits
        )
        self.traffic.sent(sum(splits), P - 1)
        output, received_splits = operation.wait()
        self.traffic.received(output.numel(), P - 1)
        parts = output.split(received_splits.tolist())
        received = [part.clone() if part.data_ptr() % ALIGNMENT else part for part in parts]
        received[r] = own
        return received

    def allgather(self, payload: Payload, *, channel: str) -> list[torch.Tensor]:
        """`Transport.allgather`, in one operation."""
        return self.all_to_all([payload] * self.world_size, channel=channel)

    @override
    def close(self) -> None:
        super().close()
        self.named.clear()

    @override
    def awaiting(self) -> Awaiting | None:
        awaited = self.awaited
        if awaited is None:
            return None
        name, since = awaited
        return Awaiting(self._others, since, f"all ranks to come to {name} ({self.context})")

    @override
    def call_made(self, number: int) -> Call | None:
        return None  # Horovod itself compares what the ranks do in its operations

    @override
    def calls_made(self) -> int:
        return self._started

    def _abort_connections(self) -> None:
        """Does nothing: Horovod cannot end an operation, and the waits here look at `failure`."""

    def _alltoall(self, data: torch.Tensor, splits: list[int]) -> _Operation:
        self._raise_failure()
        name = f"hvd_sparse.{self._label}.alltoall.{self._started % NAMES}"
        self._started += 1
        before = self.named.get(name)
        if before is not None:
            before.wait()
        sizes = torch.tensor(splits, dtype=torch.int32, device="cpu")
        try:
            handle = self.hvd.alltoall_async(data, sizes, name=name, process_set=self._process_set)
        except (RuntimeError, ValueError) as error:  # HorovodInternalError is a RuntimeError
            self.raise_first(self.error_of(error), None, f"it began {name}")
        operation = self.named[name] = _Operation(self, handle, name)
        return operation

    def error_of(self, error: Exception) -> TransportError:
        return PeerLostError(f"rank {self.rank}: Horovod failed: {error}")


@dataclass(eq=False)
class _Operation:
    """One of Horovod's handles, until its outcome is known."""

    _transport: HorovodTransport
    _handle: int | None
    name: str
    _outcome: Any = None

    def wait(self) -> Any:
        """What Horovod's `synchronize` returns, within the transport's timeout."""
        if self._handle is not None:
            try:
                self._poll(self._handle)
                self._outcome = self._transport.hvd.synchronize(self._handle)
            except RuntimeError as error:  # TransportError and HorovodInternalError are among them
                transport = self._transport
                lost = error if isinstance(error, TransportError) else transport.error_of(error)
                transport.raise_first(lost, None, f"it waited for {self.name}")
            finally:
                self._transport.awaited = None
            self._handle = None
            self._transport.named.pop(self.name, None)
        return self._outcome

    def _poll(self, handle: int) -> None:
        transport = self._transport
        now = time.monotonic()
        deadline = transport.deadline_from(now)
        transport.awaited = (self.name, now)
        pauses = Pauses(SPIN_S)
        while not transport.hvd.poll(handle):
            if transport.failure is not None:
                raise PeerLostError(f"rank {transport.rank}: {transport.failure}")
            if time.monotonic() >= deadline:
                raise TransportTimeout(
                    f"rank {transport.rank}: {self.name} did not end within "
                    f"{transport.timeout_s:g} s; not all ranks have come to it"
                )
            pauses.pause()


@dataclass(eq=False)
class _Exchange(Handle):
    """What an exchange receives from one rank."""

    _transport: HorovodTransport
    _operation: _Operation | None
    _src: int | None
    _arrived: torch.Tensor | None

    def wait(self) -> torch.Tensor | None:
        if self._operation is not None:
            output, splits = self._operation.wait()
            self._operation = None
            if self._src is not None and self._arrived is None:
                sizes = splits.tolist()
                if sum(sizes) != sizes[self._src]:
                    raise PlanError(
                        f"rank {self._transport.rank} expects a message from rank {self._src} "
                        f"only, got bytes by rank: {sizes}"
                    )
                self._transport.traffic.received(sizes[self._src])
                self._arrived = output
        return self._arrived
