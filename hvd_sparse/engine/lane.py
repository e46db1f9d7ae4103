"""Where a bucket's work runs: beside the training's own, on a device that has streams.

The training thread hands gradients over and takes results back by events; it never waits for the
device. The background thread does, for the counts and the entries that it is about to send.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Lane:
    """One bucket's stream on a CUDA device; on a CPU there is nothing to order.

    All memory that crosses is safe with torch's allocator: what the training's stream gave away is
    kept by the bucket until `hand_back`, and what the lane allocates is used again only by work
    that comes after a `hand_over`.

    Args:
        device: The gradients' device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def hand_over(self) -> None:
        """On the training thread: the lane's next work comes after all that was issued here."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def work(self) -> AbstractContextManager[object]:
        """On the background thread: what is issued inside runs in the lane."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def hand_back(self) -> None:
        """On the training thread: what is issued here next comes after all of the lane's work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
