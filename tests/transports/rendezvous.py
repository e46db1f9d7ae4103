"""A stand-in for `ProcessGroupNCCL`, with threads for devices, that is as strict as NCCL may be.

Each rank's groups run one after the other. A send ends when the peer has received it, and both must
name the same size. Nothing tells a peer of an abort. What stands where nothing was sent is noise.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import torch

POLL_S = 0.01


@dataclass
class Parcel:
    data: torch.Tensor
    taken: threading.Event = field(default_factory=threading.Event)


class Work:
    """One group of messages."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.done = threading.Event()

    def is_completed(self) -> bool:
        if self.error is not None:
            raise RuntimeError(self.error)
        return self.done.is_set()


class RendezvousWorld:
    """What the ranks' groups share."""

    def __init__(self, world_size: int) -> None:
        ways = [(a, b) for a in range(world_size) for b in range(world_size)]
        self.parcels: dict[tuple[int, int], queue.Queue[Parcel]] = {w: queue.Queue() for w in ways}
        self.end = threading.Barrier(world_size)

    def connect(
        self, store: object, rank: int, world_size: int, device: torch.device
    ) -> RendezvousGroup:
        """Takes the place of `connect_nccl`."""
        del store, device
        return RendezvousGroup(self, rank, world_size)


class RendezvousGroup:
    """One rank's end."""

    def __init__(self, world: RendezvousWorld, rank: int, world_size: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world_size
        self.aborted = threading.Event()
        self.shut_down = False
        self.bytes_sent = 0
        self._calls: queue.Queue[tuple[list, list, Work]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
    ) -> Work:
        assert len(output_split_sizes) == len(input_split_sizes) == self.world_size
        assert sum(output_split_sizes) == output.numel()
        assert sum(input_split_sizes) == input.numel()
        sends = [(to, part) for to, part in enumerate(input.split(input_split_sizes)) if len(part)]
        parts = output.split(output_split_sizes)
        receives = [(source, part) for source, part in enumerate(parts) if len(part)]
        assert sends or receives
        work = Work()
        self._calls.put((sends, receives, work))
        return work

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        each = [input.numel()] * self.world_size
        return self.alltoall_base(output, input.repeat(self.world_size), each, each)

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        """Waits for the peers, as NCCL does."""
        self.world.end.wait()
        self.shut_down = True

    def _run(self) -> None:
        while not self.aborted.is_set() and not self.shut_down:
            try:
                sends, receives, work = self._calls.get(timeout=POLL_S)
            except queue.Empty:
                continue
            parcels = [(to, Parcel(part)) for to, part in sends]
            for to, parcel in parcels:
                self.bytes_sent += parcel.data.numel()
                self.world.parcels[self.rank, to].put(parcel)
            if all(self._receive(source, buffer, work) for source, buffer in receives) and all(
                self._is_taken(parcel) for _, parcel in parcels
            ):
                work.done.set()
            elif work.error is None:
                work.error = "the group was aborted"

    def _receive(self, source: int, buffer: torch.Tensor, work: Work) -> bool:
        while not self.aborted.is_set():
            try:
                parcel = self.world.parcels[source, self.rank].get(timeout=POLL_S)
            except queue.Empty:
                continue
            if parcel.data.numel() != buffer.numel():
                work.error = f"{parcel.data.numel()} bytes came for {buffer.numel()}"
                return False
            buffer.copy_(parcel.data)
            parcel.taken.set()
            return True
        return False

    def _is_taken(self, parcel: Parcel) -> bool:
        while not self.aborted.is_set():
            if parcel.taken.wait(POLL_S):
                return True
        return False
