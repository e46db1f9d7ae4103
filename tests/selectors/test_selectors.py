"""Selectors against a definition that one can read, on whatever hypothesis comes up with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.magnitude import magnitude_keys
from hvd_sparse.methods.catalogue import DgcOptions, GaussiankOptions, MstopkOptions, SidcoOptions
from hvd_sparse.ops import Accumulation
from hvd_sparse.selectors import ExactTopK, GroupedTopK, ReusedThreshold, Selector
from hvd_sparse.streams import SparseStream

FLOATS = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99
)
STEPS = st.integers(0, 40).flatmap(
    lambda n: st.lists(st.lists(FLOATS, min_size=n, max_size=n), min_size=1, max_size=6)
)


def run(
    selector: Selector, steps: list[list[float]], k: int
) -> list[tuple[Tensor, SparseStream, Tensor]]:
    """The accumulator, the taken stream and the residual of each step."""
    residual = torch.zeros(len(steps[0]))
    outcomes = []
    for values in steps:
        gradient = torch.tensor(values, dtype=torch.float32)
        accumulator = residual + gradient
        stream = selector.select(Accumulator(Accumulation(residual, [gradient])), k)
        outcomes.append((accumulator, stream, residual.clone()))
    return outcomes


def check_split(accumulator: Tensor, stream: SparseStream, residual: Tensor) -> None:
    """What was taken and what stayed make up the accumulator, bit for bit."""
    assert bool((stream.indices[1:] > stream.indices[:-1]).all())
    whole = residual.clone()
    assert not residual[stream.indices.long()].any()
    whole[stream.indices.long()] = stream.values
    assert torch.equal(whole, accumulator)


@settings(deadline=None, max_examples=200)
@given(STEPS, st.integers(1, 45))
def test_exact_top_k_takes_the_largest(steps: list[list[float]], k: int) -> None:
    k = min(k, len(steps[0]))
    for accumulator, stream, residual in run(ExactTopK(), steps, k):
        check_split(accumulator, stream, residual)
        assert stream.nnz == min(k, int(accumulator.count_nonzero()))
        taken = magnitude_keys(stream.values)
        if taken.numel():
            assert int(taken.min()) >= int(magnitude_keys(residual).max())


@settings(deadline=None, max_examples=200)
@given(STEPS, st.integers(1, 45), st.integers(1, 4))
def test_reused_thresholds_take_about_k(steps: list[list[float]], k: int, interval: int) -> None:
    k = min(k, len(steps[0]))
    for accumulator, stream, residual in run(ReusedThreshold(interval), steps, k):
        check_split(accumulator, stream, residual)
        nonzeros = int(accumulator.count_nonzero())
        assert min(0.9 * k, nonzeros) <= stream.nnz <= 1.1 * k


@settings(deadline=None, max_examples=100)
@given(STEPS, st.integers(1, 45), st.integers(0, 5))
def test_state_continues_bit_for_bit(steps: list[list[float]], k: int, cut: int) -> None:
    k, cut = min(k, len(steps[0])), min(cut, len(steps))
    for new in (ExactTopK, ReusedThreshold):
        whole = run(new(), steps, k)
        first, residual = new(), torch.zeros(len(steps[0]))
        for values in steps[:cut]:
            gradient = torch.tensor(values, dtype=torch.float32)
            first.select(Accumulator(Accumulation(residual, [gradient])), k)
        second = new()
        second.load_state_dict(first.state_dict())
        for values, (_, expected, after) in zip(steps[cut:], whole[cut:], strict=True):
            gradient = torch.tensor(values, dtype=torch.float32)
            stream = second.select(Accumulator(Accumulation(residual, [gradient])), k)
            assert torch.equal(stream.indices, expected.indices)
            assert torch.equal(stream.values, expected.values)
            assert torch.equal(residual, after)


def test_a_group_is_as_long_as_the_bucket_at_most() -> None:
    values = [float(i) for i in range(1, 1001)]
    for numel in (2**31 - 1, 10**12):
        ((accumulator, stream, residual),) = run(GroupedTopK(numel), [values], 7)
        check_split(accumulator, stream, residual)
        assert stream.indices.tolist() == list(range(993, 1000))


@pytest.mark.parametrize(("numel", "k"), [(1100, 11), (1600, 16), (700, 7), (2000, 1)])
def test_groups_of_short_vectors_hold_k(numel: int, k: int) -> None:
    """The last group is short, and would have as many entries as the others."""
    g = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    accumulator = Accumulator(Accumulation(torch.zeros(numel), [g]))
    stream = GroupedTopK().select(accumulator, k)
    assert k <= stream.nnz <= 1.1 * k
    restored = accumulator.residual.clone()
    restored[stream.indices.long()] += stream.values
    assert torch.equal(restored, g)


def test_nothing_stays_where_all_is_wanted() -> None:
    """However the values are spread: a fitted threshold would leave the small ones."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-12
    values[3] = 1.0
    for options in (GaussiankOptions(), SidcoOptions(), DgcOptions(), MstopkOptions()):
        ((_, stream, residual),) = run(options.selector(), [values.tolist()], 1000)
        assert stream.nnz == 1000
        assert not residual.any()
