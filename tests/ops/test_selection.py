"""Accumulation and selection: the native library against the reference, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.ops import Accumulation, Momentum, reference
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import (
    INF,
    NAN,
    NUMELS,
    assert_same,
    cut,
    generator,
    misleading,
    same_as_reference,
    vectors,
)

SEED = 0x9E3779B97F4A7C15
GROUPS = ((1, 512), (5, 512), (512, 512), (3, 100), (1, 1), (20, 1000))


def check_select(
    native: NativeOps, residual: Tensor, gradients: list[Tensor], threshold: float, what: str = ""
) -> None:
    ours, theirs = residual.clone(), residual.clone()
    actual = native.accumulate_select(Accumulation(ours, gradients), threshold)
    expected = reference.accumulate_select(Accumulation(theirs, gradients), threshold)
    assert_same((*actual, ours), (*expected, theirs), f"{what}, threshold {threshold}")
    assert torch.isfinite(ours).all()


def check_topk(
    native: NativeOps,
    residual: Tensor,
    gradients: list[Tensor],
    k: int,
    what: str = "",
) -> None:
    ours, theirs = residual.clone(), residual.clone()
    actual = native.accumulate_topk(Accumulation(ours, gradients), k)
    expected = reference.accumulate_topk(Accumulation(theirs, gradients), k)
    assert_same((*actual, ours), (*expected, theirs), f"{what}, k {k}")
    assert torch.isfinite(ours).all()


@pytest.mark.parametrize("numel", NUMELS)
def test_select(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for threshold in (0.0, 2.5, INF, NAN):
            check_select(native, residual, [gradient], threshold, name)
        check_select(native, residual, cut(gradient, 7), 1.5, name)
        check_select(native, residual, [], 1.5, name)


@pytest.mark.parametrize("numel", NUMELS)
def test_topk(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for k in {0, 1, 17, numel // 100, numel, numel + 1}:
            check_topk(native, residual, [gradient], k, name)
        # Which NaN a conversion makes of a NaN, and so their order, differs within torch itself.
        pieces = cut(torch.nan_to_num(gradient, INF, INF, -INF), 7)
        check_topk(native, residual, pieces, 17, name)


def test_large(native: NativeOps) -> None:
    """Large enough for sampled pivots and several tasks."""
    numel = 2**20 + 3
    random = generator()
    residual = torch.randn(numel, generator=random)
    gradient = torch.randn(numel, generator=random)
    check_select(native, residual, cut(gradient, 40), 4.0)
    check_topk(native, residual, [gradient], 1000)


def test_large_where_a_sample_misleads(native: NativeOps) -> None:
    numel = 2**20 + 3
    ties = torch.full((numel,), 1.5)
    ties[::3] = -1.5
    check_topk(native, ties, [], 1000)
    ties[5:200_000:1000] = INF
    check_topk(native, ties, [torch.zeros(numel)], 1000)
    one_block = torch.zeros(numel)
    one_block[700_000:710_000] = torch.randn(10_000, generator=generator())
    for k in (1000, 20_000):
        check_topk(native, one_block, [], k)
    for name, residual in misleading(numel):
        check_topk(native, residual, [], 10_000, name)


def test_non_finite_everywhere_and_over_the_limit(native: NativeOps) -> None:
    numel = 2**18
    gradient = torch.full((numel,), INF)
    gradient[::2] = NAN
    check_topk(native, torch.ones(numel), [gradient], 10)


def test_many_small_segments(native: NativeOps) -> None:
    numel = 200_000
    random = generator()
    residual = torch.randn(numel, generator=random)
    gradients = cut(torch.randn(numel, generator=random), 10_000)
    check_select(native, residual, gradients, 3.0)
    check_topk(native, residual, gradients, 500)


def test_any_alignment(native: NativeOps) -> None:
    for offset in range(17):
        residual, gradient = torch.randn(2, 600, generator=generator(offset))
        check_select(native, residual[offset:].clone(), [gradient[offset:]], 1.0)
        ours, theirs = residual.clone(), residual.clone()
        actual, expected = (
            ops.accumulate_select(Accumulation(x[offset : offset + 300], [gradient[3:303]]), 1.0)
            for ops, x in ((native, ours), (reference, theirs))
        )
        assert_same((*actual, ours), (*expected, theirs), f"offset {offset}")


@settings(deadline=None, max_examples=150)
@given(
    patterns=st.lists(
        st.sampled_from([0, 0x80000000, 1, 0x3F800000, 0xBF800000, 0x7F800000, 0x7FC00000])
        | st.integers(0, 2**32 - 1),
        min_size=1,
        max_size=120,
    ),
    k=st.integers(0, 130),
    threshold=st.floats(allow_nan=True),
)
def test_any_bits(patterns: list[int], k: int, threshold: float) -> None:
    signed = [p - 2**32 if p >= 2**31 else p for p in patterns]
    residual = torch.tensor(signed, dtype=torch.int32).view(torch.float32)
    ops = NativeOps()
    check_topk(ops, residual, [], k)
    check_select(ops, residual, [residual.clone()], abs(threshold))


def test_mass_is_conserved(native: NativeOps) -> None:
    residual, gradient = torch.randn(2, 50_000, generator=generator())
    acc = residual + gradient
    indices, values, threshold = native.accumulate_topk(Accumulation(residual, [gradient]), 500)
    residual[indices.long()] += values
    assert torch.equal(residual, acc)
    assert values.abs().min() == threshold


# -- by partition, by hash, by group ---------------------------------------------------------------


@pytest.mark.parametrize("numel", NUMELS)
def test_partition(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for start, stop in ((0, numel), (0, 0), (numel // 3, numel // 2), (numel // 2, numel)):
            for threshold in (0.0, 1.5):
                same_as_reference(
                    native,
                    "accumulate_select",
                    residual,
                    [gradient],
                    threshold,
                    start,
                    stop,
                    what=name,
                )
        same_as_reference(
            native,
            "accumulate_select",
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
                SEED,
                what=name,
            )
        for seed in (0, 2**64 - 1):
            same_as_reference(
                native, "hash_select", residual, cut(gradient, 7), 0.0, 500, 5, seed, what=name
            )


@pytest.mark.parametrize("numel", NUMELS)
def test_group(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for k, group_numel in GROUPS:
            if group_numel < 10 and numel > 10_000:
                continue  # slow in the reference, and nothing new
            same_as_reference(
                native, "accumulate_group_topk", residual, [gradient], k, group_numel, what=name
            )
        pieces = cut(torch.nan_to_num(gradient, INF, INF, -INF), 7)
        same_as_reference(native, "accumulate_group_topk", residual, pieces, 5, 512, what=name)


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_momentum(native: NativeOps, nesterov: bool) -> None:
    numel = 2**18 + 3
    residual, gradient, buffer = torch.randn(3, numel, generator=generator())
    gradient[::10_007] = INF
    for op, arguments in (
        ("accumulate_select", (3.0, 1000, numel // 2)),
        ("hash_select", (3.0, 4000, 1, SEED)),
        ("accumulate_group_topk", (5, 512)),
    ):
        same_as_reference(
            native, op, residual, cut(gradient, 40), *arguments, buffer=buffer, nesterov=nesterov
        )


def test_partitions_together_are_the_whole() -> None:
    residual, gradient = torch.randn(2, 1000, generator=generator())
    whole = ops.accumulate_select(Accumulation(residual.clone(), [gradient]), 1.5)
    parts = [
        ops.accumulate_select(Accumulation(residual.clone(), [gradient]), 1.5, start, start + 250)
        for start in range(0, 1000, 250)
    ]
    for column in range(2):
        assert torch.equal(torch.cat([part[column] for part in parts]), whole[column])


def test_what_is_not_finite_leaves_any_partition() -> None:
    gradient = torch.zeros(10)
    gradient[7] = INF
    residual = torch.ones(10)
    indices, values = ops.accumulate_select(Accumulation(residual, [gradient]), 0.5, 0, 2)
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
        seed = numbers.getrandbits(64)
        indices, values = ops.hash_select(Accumulation(left), 1.0, slots, slots_per_bucket, seed)
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
    indices, values = ops.hash_select(Accumulation(residual), 0.5, 3, 3, SEED)
    assert indices.tolist() == [1, 3, 5]
    assert values.tolist() == [-4.0, 5.0, 4.0]
    assert residual.tolist() == [1.0, 0.0, 2.0, 0.0, 3.0, 0.0]


def test_of_equal_magnitudes_hash_prefers_low_indices_and_infinity_needs_no_slot() -> None:
    residual = torch.ones(6)
    gradient = torch.tensor([0.0, 1.0, INF, 1.0, 0.0, 1.0])
    indices, _ = ops.hash_select(Accumulation(residual, [gradient]), 1.5, 2, 2, SEED)
    assert indices.tolist() == [1, 2, 3]
    assert residual.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 2.0]


def test_hash_can_send_index_0() -> None:
    indices, _ = ops.hash_select(Accumulation(torch.ones(1)), 0.5, 4, 1, SEED)
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


def test_take_at_masks_momentum() -> None:
    u = torch.ones(10)
    accumulation = Accumulation(torch.zeros(10), [torch.arange(10.0)], Momentum(u, 0.5))
    indices, _ = ops.accumulate_select(accumulation, 5.0)
    ops.on(u.device).take_at(u, indices)
    assert u.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, *[0.0] * 5]


@pytest.mark.parametrize("numel", NUMELS)
def test_sample(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for share, run, seed in ((1.0, 1, 0), (0.3, 4, 2**64 - 1), (1.0, 64, 7), (0.01, 7, 2**32)):
            runs = int(share * (numel // run))
            for gradients in ([gradient], cut(gradient, 7), []):
                same_as_reference(
                    native, "sample_accumulator", residual, gradients, runs, run, seed, what=name
                )


@pytest.mark.parametrize("nesterov", [False, True])
def test_sample_with_momentum(native: NativeOps, nesterov: bool) -> None:
    residual, gradient, buffer = torch.randn(3, 2**18 + 3, generator=generator())
    same_as_reference(
        native,
        "sample_accumulator",
        residual,
        cut(gradient, 40),
        5_000,
        8,
        64,
        buffer=buffer,
        nesterov=nesterov,
    )
