"""The other ways out of the accumulator: by partition, by hash, by group."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.ops import Accumulation, Momentum
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import INF, NUMELS, cut, generator, same_as_reference, vectors

A, B = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
GROUPS = ((1, 512), (5, 512), (512, 512), (3, 100), (1, 1), (20, 1000))


@pytest.mark.parametrize("numel", NUMELS)
def test_partition(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for start, stop in ((0, numel), (0, 0), (numel // 3, numel // 2), (numel // 2, numel)):
            for threshold in (0.0, 1.5):
                same_as_reference(
                    native,
                    "partition_select",
                    residual,
                    [gradient],
                    threshold,
                    start,
                    stop,
                    what=name,
                )
        same_as_reference(
            native,
            "partition_select",
            residual,
            cut(gradient, 7),
            1.5,
            numel // 5,
            numel // 2,
            what=name,
        )


@pytest.mark.parametrize("numel", NUMELS)
def test_hash(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for slots, slots_per_bucket in ((1, 1), (100, 1), (96, 8), (2 * numel + 8, 1)):
            same_as_reference(
                native,
                "hash_select",
                residual,
                [gradient],
                1.5,
                slots,
                slots_per_bucket,
                A,
                B,
                what=name,
            )
        for a, b in ((1, 0), (2**64 - 1, 2**64 - 1)):
            same_as_reference(
                native, "hash_select", residual, cut(gradient, 7), 0.0, 500, 5, a, b, what=name
            )


@pytest.mark.parametrize("numel", NUMELS)
def test_group(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for k, group_numel in GROUPS:
            if group_numel < 10 and numel > 10_000:
                continue  # slow in the reference, and nothing new
            same_as_reference(
                native,
                "accumulate_group_topk",
                residual,
                [gradient],
                k,
                group_numel,
                what=name,
            )
        pieces = cut(torch.nan_to_num(gradient, INF, INF, -INF), 7)
        same_as_reference(native, "accumulate_group_topk", residual, pieces, 5, 512, what=name)


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_momentum(native: NativeOps, nesterov: bool) -> None:
    numel = 2**18 + 3
    residual, gradient, buffer = torch.randn(3, numel, generator=generator())
    gradient[::10_007] = INF
    for op, arguments in (
        ("partition_select", (3.0, 1000, numel // 2)),
        ("hash_select", (3.0, 4000, 1, A, B)),
        ("accumulate_group_topk", (5, 512)),
    ):
        same_as_reference(
            native,
            op,
            residual,
            cut(gradient, 40),
            *arguments,
            buffer=buffer,
            nesterov=nesterov,
        )


def test_partitions_together_are_the_whole() -> None:
    residual, gradient = torch.randn(2, 1000, generator=generator())
    whole = ops.accumulate_select(Accumulation(residual.clone(), [gradient]), 1.5)
    parts = [
        ops.partition_select(Accumulation(residual.clone(), [gradient]), 1.5, start, start + 250)
        for start in range(0, 1000, 250)
    ]
    for column in range(2):
        assert torch.equal(torch.cat([part[column] for part in parts]), whole[column])


def test_what_is_not_finite_leaves_any_partition() -> None:
    gradient = torch.zeros(10)
    gradient[7] = INF
    residual = torch.ones(10)
    indices, values = ops.partition_select(Accumulation(residual, [gradient]), 0.5, 0, 2)
    assert indices.tolist() == [0, 1, 7]
    assert values.tolist() == [1.0, 1.0, INF]
    assert residual.tolist() == [0.0, 0.0, *[1.0] * 8]


def collision_share(residual: Tensor, slots: int, slots_per_bucket: int) -> float:
    """The share of the selected entries that find no slot, over some hashes; the others stay."""
    selected = int((residual.abs() >= 1.0).sum())
    numbers = random.Random(0)
    found = 0
    for _ in range(8):
        left = residual.clone()
        a, b = numbers.getrandbits(64) | 1, numbers.getrandbits(64)
        indices, values = ops.hash_select(Accumulation(left), 1.0, slots, slots_per_bucket, a, b)
        found += indices.numel()
        left[indices.long()] += values
        assert torch.equal(left, residual)
    return 1.0 - found / (8 * selected)


def test_hash_spreads() -> None:
    """Collisions are about as frequent as with a random hash: 1 - m/k (1 - e^(-k/m))."""
    numel, k = 2**20, 5000
    residual = torch.zeros(numel)
    residual[torch.randperm(numel, generator=generator())[:k]] = 2.0
    assert collision_share(residual, 2 * k, 1) == pytest.approx(0.213, abs=0.02)
    assert collision_share(residual, 4 * k, 1) == pytest.approx(0.115, abs=0.02)
    assert collision_share(residual, 2 * k, 8) < 0.012


def test_hash_prefers_large_magnitudes() -> None:
    residual = torch.tensor([1.0, -4.0, 2.0, 5.0, 3.0, 4.0])
    indices, values = ops.hash_select(Accumulation(residual), 0.5, 3, 3, A, B)
    assert indices.tolist() == [1, 3, 5]
    assert values.tolist() == [-4.0, 5.0, 4.0]
    assert residual.tolist() == [1.0, 0.0, 2.0, 0.0, 3.0, 0.0]


def test_of_equal_magnitudes_hash_prefers_low_indices_and_infinity_needs_no_slot() -> None:
    residual = torch.ones(6)
    gradient = torch.tensor([0.0, 1.0, INF, 1.0, 0.0, 1.0])
    indices, _ = ops.hash_select(Accumulation(residual, [gradient]), 1.5, 2, 2, A, B)
    assert indices.tolist() == [1, 2, 3]
    assert residual.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 2.0]


def test_hash_can_send_index_0() -> None:
    indices, _ = ops.hash_select(Accumulation(torch.ones(1)), 0.5, 4, 1, A, B)
    assert indices.tolist() == [0]


def test_group_takes_the_largest_of_each() -> None:
    residual, gradient = torch.randn(2, 1300, generator=generator())
    acc = residual + gradient
    expected = [
        first + i
        for first in (0, 512, 1024)
        for i in sorted(acc[first : first + 512].abs().topk(4).indices.tolist())
    ]
    indices, values = ops.accumulate_group_topk(Accumulation(residual, [gradient]), 4)
    assert indices.tolist() == expected
    assert torch.equal(values, acc[expected])
    acc[expected] = 0.0
    assert torch.equal(residual, acc)


def test_zero_at_masks_momentum() -> None:
    u = torch.ones(10)
    accumulation = Accumulation(torch.zeros(10), [torch.arange(10.0)], Momentum(u, 0.5))
    indices, _ = ops.accumulate_select(accumulation, 5.0)
    ops.zero_at(u, indices)
    assert u.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, *[0.0] * 5]
