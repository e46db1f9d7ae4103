"""The CUDA stream in which a bucket's work runs, beside the training's own.

The training thread hands gradients over and takes results back by events, and never waits for the
device. The background thread waits for the gradients, and for the counts and the entries that it is
about to send.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from hvd_sparse import ops
from hvd_sparse.engine.stats import StepStats
from hvd_sparse.errors import UnsupportedError
from hvd_sparse.streams import SparseStream

HIGH_PRIORITY = -1
"""Priority of a lane's stream: its kernels are short, and peers wait for what they find."""


class DeviceLane:
    """One bucket's stream on a CUDA device, and the way of its entries to the host.

    On a CPU there is nothing to order and nothing to copy.

    All memory that crosses is safe with torch's allocator: what the training's stream gave away is
    kept by the bucket until `hand_back`, and what the lane allocates is used again only by work
    that comes after a `hand_over`. Torch keeps pinned memory until a copy from it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._givers: dict[torch.cuda.Stream, None] = {}
        self._given: list[torch.cuda.Event] = []
        self._here: tuple[torch.Tensor, ...] | None = None
        self._most_k = 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
            self._began, self._arrived = (
                torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2)
            )

    def expect(self) -> None:
        """On the training thread: the next `hand_over` includes what was issued here."""
        if self._stream is not None:
            self._givers[torch.cuda.current_stream(self._stream.device)] = None

    def hand_over(self) -> None:
        """On the training thread: the lane's next work begins after what those streams have now."""
        if self._stream is not None:
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    "a CUDA graph that captures backward() would replay it without the exchange: "
                    "capture the forward pass alone"
                )
            for giver in self._givers:  # one, unless the training has streams of its own
                self._given.append(giver.record_event(torch.cuda.Event(blocking=True)))
            self._givers.clear()

    def work(self) -> AbstractContextManager[object]:
        """On a background thread: a block whose work runs in the lane.

        Waits until the device has what was handed over, and gives it no work before: what waits in
        its queues keeps other lanes' copies waiting.
        """
        for given in self._given:
            given.synchronize()
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin(self) -> None:
        """In the lane: what is timed begins."""
        if self._stream is not None:
            self._began.record()

    def shrink(self, k: int) -> None:
        """Drop pinned memory where far fewer entries are sent from now on, as after a warm-up."""
        if self._stream is not None and 2 * k < self._most_k:
            self._most_k = k
            drop = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
            if drop is not None:  # older releases of torch keep it
                drop()
        self._most_k = max(self._most_k, k)

    def send(self, stream: SparseStream, *, to_host: bool) -> None:
        """In the lane: end what is timed, and start to copy entries to the host, if they go there.

        The device is not waited for.
        """
        if self._stream is not None:
            self._here = tuple(map(ops.queued, stream.payload())) if to_host else None
            self._arrived.record()

    def landed(self, stream: SparseStream, stats: StepStats) -> SparseStream:
        """On the background thread: wait for what was sent; the entries, there and on the host.

        The time of the selection becomes the device's, without what the host has waited.
        """
        if self._stream is None:
            return stream
        self._arrived.synchronize()
        stats.accumulate_select_s = self._began.elapsed_time(self._arrived) / 1e3
        here, self._here = self._here, None
        return stream if here is None else SparseStream(here[0], here[1], stream.numel, twin=stream)

    def hand_back(self) -> None:
        """On the training thread: what is issued here next waits for all of the lane's work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._given.clear()
