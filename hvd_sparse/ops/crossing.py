"""Between the host and a CUDA device: copies through pinned memory, and the wait for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def wait_for(device: torch.device) -> None:
    """Wait for what was issued to a CUDA device's current stream; the core is free meanwhile."""
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(device))
    done.synchronize()


def queued(tensor: Tensor) -> Tensor:
    """A copy in the host's pinned memory, to be read once the device was waited for.

    What is on the host is returned as it is.
    """
    if tensor.device.type != "cuda":
        return tensor
    here = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return here.copy_(tensor, non_blocking=True)


def moved(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of one device on another; themselves, where they are there.

    Only the way to the host is waited for, once for all of them.
    """
    source = tensors[0].device
    if source.type == device.type and device.index in (None, source.index):
        return tuple(tensors)
    if device.type == "cpu" and source.type == "cuda":
        here = tuple(map(queued, tensors))
        wait_for(source)
        return here
    if device.type == "cuda" and source.type == "cpu":
        tensors = [tensor.pin_memory() for tensor in tensors]
    return tuple(tensor.to(device, non_blocking=True) for tensor in tensors)


def drop_pinned() -> None:
    """Give pinned memory that nothing uses back to the system, where torch can."""
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # from 2.9 on
    if empty_host_cache is not None:
        empty_host_cache()
