"""Sums of vectors in shared memory: C++ against the reference."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse import ops
from hvd_sparse.ops import reference
from hvd_sparse.ops.native import ISA_NAMES
from tests.ops.cases import assert_same
from tests.ops.conftest import switched_to


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("isa", ISA_NAMES)
def test_native_gives_the_references_bits(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    with switched_to(isa, 2) as native:
        for numel in (0, 1, 15, 2048, 2049, 100_003, 1_200_003):
            for count in (1, 2, 5):
                vectors = [
                    torch.randn(numel, generator=generator).mul_(30.0).to(dtype)
                    for _ in range(count)
                ]
                if numel > 3:
                    vectors[0][1], vectors[-1][2], vectors[0][3] = float("inf"), -0.0, 6e-8
                out, expected = torch.full((numel,), 9.0), torch.empty(numel)
                native.sum_vectors(out, vectors)
                reference.sum_vectors(expected, vectors)
                assert_same(out, expected, f"{count} of {numel}")


@pytest.mark.parametrize("isa", ISA_NAMES)
def test_small_halves_count_where_denormals_are_flushed(isa: str) -> None:
    halves = torch.tensor([0, 1, 0x200, 0x3FF, 0x400], dtype=torch.int16)
    vector, out = halves.view(torch.float16).neg(), torch.empty(len(halves))
    expected = 0.0 + vector.float()  # sums begin with 0.0
    with switched_to(isa, 1) as native:
        try:
            assert torch.set_flush_denormal(True)
            native.sum_vectors(out, [vector])
        finally:
            torch.set_flush_denormal(False)
    assert_same(out, expected)


def test_numbers_are_posted() -> None:
    host = ops.on_host()
    places = list(torch.zeros(3, dtype=torch.int64).split(1))
    assert host.posted(places, 0)
    for place in places:
        assert not host.posted(places, 4)
        host.post(place, 4)
    assert host.posted(places, 4)
    assert not host.posted(places, 5)
