"""Large pages for the vectors that every step reads and writes whole."""

from __future__ import annotations

import ctypes
import mmap

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
