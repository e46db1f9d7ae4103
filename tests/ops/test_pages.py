"""Long vectors lie on large pages, where the system gives them to who asks."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from hvd_sparse.memories import ErrorFeedback, MomentumCorrection
from hvd_sparse.ops.pages import LEAST_BYTES, PAGE_BYTES, new_vector, zero_vector

CPU = torch.device("cpu")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def asks_for_large_pages(vector: torch.Tensor) -> bool:
    """Whether the middle of a vector lies in a mapping that was advised so: `hg` of its flags."""
    middle = vector.data_ptr() + vector.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in rest
    return False


@pytest.mark.skipif(not SETTING.exists(), reason="a kernel without transparent large pages")
def test_what_a_memory_holds_lies_on_large_pages() -> None:
    numel = 5 * PAGE_BYTES // 4
    for memory in (ErrorFeedback(numel, CPU), MomentumCorrection(numel, CPU, 0.9)):
        for _ in range(3):
            memory.accumulate([torch.ones(numel)], numel).accumulate()
            for tensor in memory.tensors().values():
                assert asks_for_large_pages(tensor)
    # A tensor of torch's may lie where one of ours has been.
    unasked = torch.frombuffer(mmap.mmap(-1, 4 * numel), dtype=torch.float32)
    assert not asks_for_large_pages(unasked)


def test_any_length_and_type() -> None:
    for numel in (0, 1, LEAST_BYTES // 4 - 1, LEAST_BYTES // 4, LEAST_BYTES // 4 + 7):
        for dtype in (torch.float32, torch.bfloat16):
            assert new_vector(numel, dtype, CPU).shape == (numel,)
            zeros = zero_vector(numel, dtype, CPU)
            assert zeros.dtype is dtype
            assert not zeros.any()
