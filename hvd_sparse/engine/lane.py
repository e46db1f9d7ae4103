"""The CUDA stream in which a bucket's work runs, beside the training's own.

The training thread hands gradients over and takes results back by events, and never waits for the
device. The background thread waits for the counts and the entries that it is about to send.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from hvd_sparse.streams import SparseStream

HIGH_PRIORITY = -1
"""Priority of a lane's stream: its kernels are short, and peers wait for what they find."""


class DeviceLane:
    """One bucket's stream on a CUDA device, and pinned memory for its entries on the host.

    On a CPU there is nothing to order and nothing to copy.

    All memory that crosses is safe with torch's allocator: what the training's stream gave away is
    kept by the bucket until `hand_back`, and what the lane allocates is used again only by work
    that comes after a `hand_over`.

    Args:
        device: The gradients' device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._givers: dict[torch.cuda.Stream, None] = {}
        self._room, self._nnz = SparseStream.empty(0), 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
            self._arrived = torch.cuda.Event()

    def expect(self) -> None:
        """On the training thread: the next `hand_over` includes what was issued here."""
        if self._stream is not None:
            self._givers[torch.cuda.current_stream(self._stream.device)] = None

    def hand_over(self) -> None:
        """On the training thread: the lane's next work waits for all streams that were noted."""
        if self._stream is not None:
            for giver in self._givers:  # one, unless the training has streams of its own
                self._stream.wait_stream(giver)
            self._givers.clear()

    def work(self) -> AbstractContextManager[object]:
        """On the background thread: a block whose work runs in the lane."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, stream: SparseStream) -> None:
        """In the lane: start to copy entries to the host, without waiting for the device."""
        if self._stream is None:
            return
        self._nnz = stream.nnz
        if self._nnz > self._room.nnz:
            self._room = _pinned(1 << (self._nnz - 1).bit_length())
        here = self._room.slice(0, self._nnz)
        here.indices.copy_(stream.indices, non_blocking=True)
        here.values.copy_(stream.values, non_blocking=True)
        self._arrived.record()

    def landed(self, stream: SparseStream) -> SparseStream:
        """On the background thread: wait for the entries that were sent; they are on the host.

        They stay there until the next `send`.
        """
        if self._stream is None:
            return stream
        self._arrived.synchronize()
        here = self._room.slice(0, self._nnz)
        return SparseStream(here.indices, here.values, stream.numel)

    def hand_back(self) -> None:
        """On the training thread: what is issued here next waits for all of the lane's work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _pinned(nnz: int) -> SparseStream:
    """Pinned memory for entries, to which the device copies by itself."""
    return SparseStream(
        torch.empty(nnz, dtype=torch.int32, pin_memory=True, device="cpu"),
        torch.empty(nnz, dtype=torch.float32, pin_memory=True, device="cpu"),
        0,
    )
