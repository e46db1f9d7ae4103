"""Memory: large pages under vectors that last, and copies between the host and a CUDA device."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
"""Of a large page on x86-64, and of one on arm64 with 4 KiB base pages."""
LEAST_BYTES = 2 * PAGE_BYTES
"""Below, a vector may not hold a whole large page; it fits into the caches' own tables, too."""


def new_vector(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for a vector that lives as long as training, `(numel,)`; not written yet.

    On a CPU it has large pages, where the system gives any.
    """
    vector = torch.empty(numel, dtype=dtype, device=device)
    if device.type == "cpu":
        ask_for_large_pages(vector)
    return vector


def ask_for_large_pages(vector: Tensor) -> None:
    """Ask Linux for pages of 2 MiB under a vector on a CPU, before anything is written to it.

    A pass over pages of 4 KiB looks up an address every 1024 elements, and waits for it. Where the
    system has none to give, or never gives them, the pages are those that it has.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is None or vector.nbytes < LEAST_BYTES:
        return
    begin = -(-vector.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    end = (vector.data_ptr() + vector.nbytes) // PAGE_BYTES * PAGE_BYTES
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(begin, end - begin, advice)  # advice: a refusal changes nothing


def zero_vector(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A `new_vector` of zeros."""
    return new_vector(numel, dtype, device).zero_()


def wait_for(device: torch.device) -> None:
    """Wait for what was issued to a CUDA device's current stream; the core is free meanwhile."""
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(device))
    done.synchronize()


def queued(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, to be read after a wait; what is on the host, as it is."""
    if tensor.device.type != "cuda":
        return tensor
    here = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return here.copy_(tensor, non_blocking=True)


def moved(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of one device on another; only the way to the host is waited for, once for all."""
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
