"""Selection on CUDA, its kernels run on the CPU (shim/shim.h), against the reference."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from hvd_sparse.magnitude import magnitude_key
from hvd_sparse.ops.cuda import CudaOps
from hvd_sparse.ops.cuda import launch_selection as selection
from tests.ops.cases import INF, NAN, cut, generator, same_as_reference, vectors
from tests.ops.test_before import check, every_op, gradients_of, state_of

pytestmark = pytest.mark.slow  # together they are: they compile many kernels

NUMELS = (0, 1, 5, 1000, 4096, 9001)
"""Up to three tiles of 4096 elements."""
FORMS = (None, False, True)
"""Without momentum, with it, with Nesterov's."""
SEED = 0x9E3779B97F4A7C15


@pytest.fixture
def went_on(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a pass left too few entries (`_with_more`) or found too many (`again`)."""
    counts: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return method(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count(selection.CudaSelection, "_with_more")
    count(selection.Claims, "again")
    return counts


def set_pivot(monkeypatch: pytest.MonkeyPatch, pivot: float) -> None:
    """Lets every sample say that `pivot` is the magnitude to take from; 0.0: all but zeros."""
    key = torch.tensor([magnitude_key(pivot)], dtype=torch.int32)
    monkeypatch.setattr(selection.CudaSelection, "_sampled_pivot", lambda *_: key)


def buffer_for(numel: int, nesterov: bool | None) -> torch.Tensor | None:
    return None if nesterov is None else torch.randn(numel, generator=generator(1))


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize("numel", NUMELS)
def test_select(cuda: CudaOps, numel: int, nesterov: bool | None) -> None:
    momentum = {"buffer": buffer_for(numel, nesterov), "nesterov": bool(nesterov)}
    for name, residual, gradient in vectors(numel):
        for gradients, threshold in (
            ([gradient], 2.5),
            ([gradient], INF),
            (cut(gradient, 4), 1.5),
            ([], 1.5),
        ):
            if gradients or nesterov is None:
                same_as_reference(
                    cuda, "accumulate_select", residual, gradients, threshold, what=name, **momentum
                )


@pytest.mark.parametrize("threshold", [0.0, 3.0, NAN])
def test_selection_that_outgrows_its_room(
    cuda: CudaOps, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "LEAST_CAPACITY", 500)
    for nesterov in FORMS:
        for name, residual, gradient in vectors(9001):
            same_as_reference(
                cuda,
                "accumulate_select",
                residual,
                cut(gradient, 4),
                threshold,
                buffer=buffer_for(9001, nesterov),
                nesterov=bool(nesterov),
                what=name,
            )


@pytest.mark.parametrize("numel", NUMELS)
def test_topk(cuda: CudaOps, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, residual, gradient in vectors(numel):
        for k in (0, 17, numel):
            same_as_reference(cuda, "accumulate_topk", residual, [gradient], k, what=name)
    for k, pivot in ((1, 2.0), (17, 3.5), (numel + 1, 2.0)):
        set_pivot(monkeypatch, pivot)
        for name, residual, gradient in vectors(numel):
            same_as_reference(cuda, "accumulate_topk", residual, [gradient], k, what=name)


@pytest.mark.parametrize("nesterov", FORMS)
def test_topk_from_a_sampled_pivot(
    cuda: CudaOps, nesterov: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "LEAST_SAMPLE", 1 << 9)
    numel = 13_001
    momentum = {"buffer": buffer_for(numel, nesterov), "nesterov": bool(nesterov)}
    for name, residual, gradient in vectors(numel):
        gradients = cut(torch.nan_to_num(gradient, INF, INF, -INF), 5)
        same_as_reference(cuda, "accumulate_topk", residual, gradients, 100, what=name, **momentum)


@pytest.mark.parametrize(
    ("pivot", "then"), [(0.0, "again"), (1e-3, "again"), (3.0, None), (100.0, "_with_more")]
)
def test_topk_with_little_room(
    cuda: CudaOps,
    pivot: float,
    then: str | None,
    went_on: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "LEAST_CAPACITY", 10)
    set_pivot(monkeypatch, pivot)
    for name, residual, gradient in vectors(9001):
        went_on.clear()
        same_as_reference(cuda, "accumulate_topk", residual, [gradient], 200, what=name)
        if name == "normal":
            assert went_on == Counter([then] if then else [])


def test_partition(cuda: CudaOps) -> None:
    for name, residual, gradient in vectors(9001):
        for start, stop in ((0, 0), (3000, 5000), (5000, 9001)):
            same_as_reference(
                cuda, "accumulate_select", residual, cut(gradient, 3), 1.5, start, stop, what=name
            )


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize("numel", [0, 1, 1000, 9001])
def test_hash(cuda: CudaOps, numel: int, nesterov: bool | None) -> None:
    momentum = {"buffer": buffer_for(numel, nesterov), "nesterov": bool(nesterov)}
    for name, residual, gradient in vectors(numel):
        for slots, slots_per_bucket in ((1, 1), (100, 1), (96, 8), (2 * numel + 8, 1)):
            same_as_reference(
                cuda,
                "hash_select",
                residual,
                cut(gradient, 3),
                1.5,
                slots,
                slots_per_bucket,
                SEED,
                what=f"{name}, {slots}",
                **momentum,
            )


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize("few", [0, 1 << 30])
def test_groups(
    cuda: CudaOps, few: int, nesterov: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a warp for each group, by a block for each large one, and by the whole device for each."""
    monkeypatch.setattr(selection, "FEW_GROUPS", few)
    for numel, groups in (
        (0, [(1, 512)]),
        (5, [(1, 1), (1, 2), (2, 4), (5, 9)]),
        (1000, [(5, 512), (512, 512), (3, 300)]),
        (3001, [(100, 1500), (5, 1000), (40, 1023)]),
    ):
        momentum = {"buffer": buffer_for(numel, nesterov), "nesterov": bool(nesterov)}
        for name, residual, gradient in vectors(numel):
            for k, group_numel in groups:
                if numel > 1000 and nesterov is not None:
                    continue  # nothing new
                same_as_reference(
                    cuda,
                    "accumulate_group_topk",
                    residual,
                    cut(torch.nan_to_num(gradient, INF, INF, -INF), 4),
                    k,
                    group_numel,
                    what=name,
                    **momentum,
                )


def test_groups_that_lie_well(cuda: CudaOps) -> None:
    """In one tensor and aligned, with a last group that is short, or not made of whole quads."""
    for numel in (6000, 6001):
        for name, residual, gradient in vectors(numel)[::3]:
            for dtype, nesterov in ((torch.float32, None), (torch.bfloat16, False)):
                for k, group_numel in ((5, 512), (17, 500), (5, 1000)):
                    same_as_reference(
                        cuda,
                        "accumulate_group_topk",
                        residual,
                        [torch.nan_to_num(gradient, INF, INF, -INF).to(dtype)],
                        k,
                        group_numel,
                        buffer=buffer_for(numel, nesterov),
                        what=f"{name}, {numel}, {dtype}, {group_numel}",
                    )


def test_groups_without_gradients(cuda: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FEW_GROUPS", 0)
    for name, residual, _ in vectors(1000):
        for group_numel in (300, 1100):
            same_as_reference(
                cuda, "accumulate_group_topk", residual, [], 5, group_numel, what=name
            )


@pytest.mark.parametrize("nesterov", FORMS)
def test_sample(cuda: CudaOps, nesterov: bool | None) -> None:
    for numel in (0, 1, 1000, 9001):
        momentum = {"buffer": buffer_for(numel, nesterov), "nesterov": bool(nesterov)}
        for name, residual, gradient in vectors(numel):
            for share, run, seed in (
                (1.0, 1, 0),
                (0.01, 1, 97),
                (0.2, 17, 2**64 - 1),
                (1.0, 40, 40),
            ):
                same_as_reference(
                    cuda,
                    "sample_accumulator",
                    residual,
                    cut(gradient, 4),
                    int(share * (numel // run)),
                    run,
                    seed,
                    what=name,
                    **momentum,
                )


def test_any_alignment(cuda: CudaOps) -> None:
    for offset in range(5):
        residual, gradient = torch.randn(2, 6000, generator=generator(offset))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            pieces = [gradient[3:1000].to(dtype), gradient.to(dtype)[1000 + offset : 5000]]
            numel = sum(piece.numel() for piece in pieces)
            for state in (residual[offset : offset + numel], residual[:numel]):
                same_as_reference(cuda, "accumulate_select", state, pieces, 1.0, what=str(offset))


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize("few", [0, 1 << 30])
def test_what_was_before(
    cuda: CudaOps, few: int, nesterov: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "FEW_GROUPS", few)
    for numel in (0, 1, 1000, 4097):
        for name, op in every_op(numel).items():
            if name == "one group" and few == 0:
                continue  # a block's shared memory would not hold it
            gradients = gradients_of(numel)["odd pieces"]
            check(cuda, op, state_of(numel), gradients, nesterov, f"{name}, {numel}")


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize(("pivot", "then"), [(1e-30, "again"), (2.4, None), (1e9, "_with_more")])
def test_topk_out_of_what_was_before(
    cuda: CudaOps,
    pivot: float,
    then: str | None,
    nesterov: bool | None,
    went_on: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "LEAST_CAPACITY", 300)
    set_pivot(monkeypatch, pivot)
    gradients = gradients_of(4097)["odd pieces"]
    check(cuda, lambda o, a: o.accumulate_topk(a, 400), state_of(4097), gradients, nesterov, "")
    assert went_on == Counter([then] * 2 if then else [])
