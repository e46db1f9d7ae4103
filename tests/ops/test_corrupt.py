"""What came over a wire may be anything: refused, or taken, but never undefined.

The library alone is tested: on a CUDA device an index out of range stops the kernel. Under
`make sanitize` these are also the cases that once overflowed or passed null pointers.
"""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import DTYPES

LOW, HIGH = -(2**31), 2**31 - 1


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("middle", [LOW, -1, 10, 2**16 - 1, HIGH])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_merge_sum_of_streams_that_jump(library: NativeOps, world_size: int, middle: int) -> None:
    """Both ends of a stream are in range, what is between them may be anywhere."""
    numel = 2**18
    streams = [(int32(2**17, middle, numel - 1), torch.ones(3))] * world_size
    if world_size > 2 or middle == HIGH:
        with pytest.raises(ValueError, match="strictly ascending"):
            library.merge_sum(streams, numel)
    else:  # two cursors notice nothing, and stay in their room
        assert library.merge_sum(streams, numel)[0].numel() <= 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_nothing(library: NativeOps, dtype: torch.dtype) -> None:
    """An empty tensor has no address."""
    out = torch.empty(0, dtype=dtype)
    library.decode(out, int32(), torch.empty(0))
    with pytest.raises(ValueError, match="strictly ascending"):
        library.decode(out, int32(0), torch.ones(1))


@pytest.mark.parametrize("numel", [1000, 2**20, 2**21 + 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beyond", [LOW, -1, 0, 5, HIGH])
def test_decode_refuses_an_index_outside_wherever_it_stands(
    library: NativeOps, numel: int, dtype: torch.dtype, beyond: int
) -> None:
    outside = numel + beyond if 0 <= beyond < HIGH else beyond
    for indices in (int32(0, outside, 3), int32(0, 1, 2, outside, 5, 6, numel - 1)):
        with pytest.raises(ValueError, match="strictly ascending"):
            library.decode(torch.empty(numel, dtype=dtype), indices, torch.ones(indices.numel()))


@pytest.mark.parametrize("places", [(HIGH, -1), (5, LOW), (-1,), (LOW,), (3, 2)])
@pytest.mark.parametrize("start", [0, 1, 2**30])
def test_gap_encode_refuses_what_does_not_ascend(
    library: NativeOps, places: tuple[int, ...], start: int
) -> None:
    with pytest.raises(ValueError, match="strictly ascending"):
        library.gap_encode(int32(*places), start)
