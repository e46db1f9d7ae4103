"""Messages between the ranks' devices, which begin and end in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class DeviceGroup:
    """Pairwise exchanges over a backend of torch.distributed.

    An exchange is an all-to-all with one split at most: NCCL makes one group of its send and its
    receive, in one launch, and leaves out what is empty. A rank that has neither need not call.

    Args:
        group: The backend, `ProcessGroupNCCL` or one that behaves like it: calls run in their
            order, and a send waits for the peer's receive of the same size.
        world_size: P.
        device: Where the backend works, this rank's own.
    """

    def __init__(self, group: Any, world_size: int, device: torch.device) -> None:
        self._group = group
        self._world_size = world_size
        self._device = device
        # Two, so that no message waits on its way up for another one on its way down.
        on_device = device.type == "cuda"
        self._up = torch.cuda.Stream(device) if on_device else None
        self._down = torch.cuda.Stream(device) if on_device else None

    def start(
        self,
        outgoing: tuple[int, torch.Tensor, int] | None,
        incoming: tuple[int, torch.Tensor] | None,
    ) -> Transfer:
        """Queues a send, a receive, or both at once; the host waits for nothing.

        Args:
            outgoing: The peer, a message in host memory that nobody changes any more, and how many
                bytes are sent: the message and then anything.
            incoming: The peer, and a `host_buffer` for as many bytes as it sends.
        """
        to_peers, from_peers = [0] * self._world_size, [0] * self._world_size
        with _in(self._up):
            if outgoing is None:
                sent = self._empty(0)
            else:
                dst, message, sent_bytes = outgoing
                to_peers[dst] = sent_bytes
                sent = self._empty(sent_bytes)
                sent[: message.numel()].copy_(message, non_blocking=True)
            if incoming is None:
                arrived = self._empty(0)
            else:
                src, buffer = incoming
                from_peers[src] = buffer.numel()
                arrived = buffer if self._up is None else self._empty(buffer.numel())
            work = self._group.alltoall_base(arrived, sent, from_peers, to_peers)
        end = None
        if self._down is not None:
            with _in(self._down):
                work.wait()  # of the stream, not of the host
                if incoming is not None:
                    incoming[1].copy_(arrived, non_blocking=True)
                end = self._down.record_event()
        return Transfer(work, end, (sent, arrived, outgoing, incoming))

    def all_to_all(
        self, sent: torch.Tensor, to_peers: list[int], from_peers: list[int]
    ) -> tuple[torch.Tensor, Transfer]:
        """Queues an exchange of what is on the devices behind the current stream's work.

        Args:
            sent: uint8 `(n,)` on the device, what goes to rank 0 first.
            to_peers: Its bytes for each rank; at least one is above 0.
            from_peers: The bytes that each rank sends.

        Returns:
            What comes, on the device: the current stream waits for it.
        """
        arrived = self._empty(sum(from_peers))
        work = self._group.alltoall_base(arrived, sent, from_peers, to_peers)
        self._let_stream_wait(work)
        return arrived, self._transfer(work, sent, arrived)

    def allgather(
        self, sent: torch.Tensor, header_bytes: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Transfer]:
        """Queues as many bytes of every rank for all of them; otherwise like `all_to_all`.

        Args:
            sent: uint8 `(n,)` on the device, n above 0.
            header_bytes: How many of the first bytes go on to the host, behind the exchange.

        Returns:
            What comes, `(P, n)`, and in host memory its first bytes, `(P, header_bytes)`; the
            transfer is through when both are there.
        """
        P = self._world_size
        arrived = self._empty(P * sent.numel())
        work = self._group._allgather_base(arrived, sent)
        self._let_stream_wait(work)
        arrived = arrived.view(P, -1)
        headers = arrived[:, :header_bytes]
        if self._up is not None:
            on_host = self.host_buffer(P * header_bytes).view(P, header_bytes)
            headers = on_host.copy_(headers, non_blocking=True)
        return (arrived, headers), self._transfer(work, sent, arrived, headers)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8 `(nbytes,)`, into which a device can copy while nobody waits."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._down is not None)

    def abort(self) -> None:
        """Ends what is under way, on this rank; the peers' parts of it do not end by this."""
        self._group.abort()

    def shutdown(self) -> None:
        """Ends the connections in order; may wait until the peers do."""
        self._group.shutdown()

    def _let_stream_wait(self, work: Any) -> None:
        """Let the current stream wait for an exchange; the host does not."""
        if self._up is not None:
            work.wait()

    def _transfer(self, work: Any, *kept: torch.Tensor) -> Transfer:
        """An exchange, with what the current stream has queued behind it."""
        end = None
        if self._up is not None:
            end = torch.cuda.current_stream(self._device).record_event()
        return Transfer(work, end, kept)

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class Transfer:
    """An exchange on its way; keeps its memory until it is let go."""

    __slots__ = ("_end", "_kept", "_work")

    def __init__(self, work: Any, end: torch.cuda.Event | None, kept: object) -> None:
        self._work = work
        self._end = end
        self._kept = kept

    def is_through(self) -> bool:
        """Whether what came is in host memory and what goes may be let go.

        Raises:
            RuntimeError: The backend, or the device, has failed.
        """
        through = self._work.is_completed() if self._end is None else self._end.query()
        return bool(through)


def _in(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
