"""What an accumulation was before it: read by the pass that adds the gradients, and unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.ops import Accumulation, Before, Momentum, reference
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import DTYPES, INF, NAN, assert_same, cut, generator, misleading
from tests.ops.test_edge import run_python

SEED = 0x9E3779B97F4A7C15
FORMS = (None, False, True)
"""Without momentum, with it, with Nesterov's."""
NUMELS = (0, 1, 63, 65, 2**16 - 1, 2**16 + 1)
STREAMED_NUMEL = 2**20 + 67
"""Above 4 MiB sums are streamed; several tasks, of which the last one's end fills no line."""


def every_op(numel: int) -> dict[str, Callable[[Any, Accumulation], Any]]:
    """Every operation that adds gradients, along each way that it may take."""
    return {
        "select": lambda o, a: o.accumulate_select(a, 1.5),
        "select all": lambda o, a: o.accumulate_select(a, 0.0),
        "topk": lambda o, a: o.accumulate_topk(a, 17),
        "topk of nothing": lambda o, a: o.accumulate_topk(a, 0),
        "group": lambda o, a: o.accumulate_group_topk(a, 5, 512),
        "group of odd width": lambda o, a: o.accumulate_group_topk(a, 5, 333),
        "one group": lambda o, a: o.accumulate_group_topk(a, 5, numel + 5),
        "partition": lambda o, a: o.accumulate_select(a, 1.5, numel // 3, numel // 2),
        "hash": lambda o, a: o.hash_select(a, 1.5, 100, 1, SEED),
    }


def check(
    ops: Any,
    op: Callable[[Any, Accumulation], Any],
    state: tuple[Tensor, Tensor],
    gradients: list[Tensor],
    nesterov: bool | None,
    what: str,
    offset: int = 0,
) -> None:
    """What was before is what it was, and the rest is as it is in place.

    Args:
        offset: Of what is written in its storage, so that it is aligned otherwise than the rest.
    """
    numel = state[0].numel()
    bits = [tensor.view(torch.int32).clone() for tensor in state]
    v, u = (tensor.clone() for tensor in state)
    momentum = None if nesterov is None else Momentum(u, 0.9, nesterov)
    in_place = (op(ops, Accumulation(v, gradients, momentum)), v, u)

    old_v, old_u = (tensor.clone() for tensor in state)
    before = Before(old_v, None if nesterov is None else old_u)
    room = [torch.full((numel + offset + 9,), 7.0) for _ in range(2)]
    new_v, new_u = (x[offset : offset + numel] for x in room)
    momentum = None if nesterov is None else Momentum(new_u, 0.9, nesterov)
    result = op(ops, Accumulation(new_v, gradients, momentum, before))
    for tensor, old in zip((old_v, old_u), bits, strict=True):
        assert torch.equal(tensor.view(torch.int32), old), what
    if nesterov is None:
        assert (new_u == 7.0).all(), what
        new_u.copy_(old_u)
    assert_same((result, new_v, new_u), in_place, what)
    for written, place in zip(room, (new_v, new_u), strict=True):
        place.fill_(7.0)
        assert (written == 7.0).all(), what  # nothing beside it


def state_of(numel: int) -> tuple[Tensor, Tensor]:
    v, u = torch.randn(2, numel, generator=generator(numel))
    v[3::40] = torch.tensor(NAN)
    v[4::50] = -0.0
    u[5::60] = INF
    return v, u


def gradients_of(numel: int) -> dict[str, list[Tensor]]:
    gradient = torch.randn(numel, generator=generator(1))
    gradient[::101] = INF
    return {
        "odd pieces": cut(gradient, 7),
        **{str(dtype): [gradient.to(dtype)] for dtype in DTYPES},
    }


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize("numel", NUMELS)
def test_every_op(native: NativeOps, numel: int, nesterov: bool | None) -> None:
    for pieces, gradients in gradients_of(numel).items():
        for name, op in every_op(numel).items():
            check(native, op, state_of(numel), gradients, nesterov, f"{name}, {pieces}")


@pytest.mark.parametrize("nesterov", FORMS)
def test_streamed(native: NativeOps, nesterov: bool | None) -> None:
    gradients = gradients_of(STREAMED_NUMEL)["odd pieces"]
    state = state_of(STREAMED_NUMEL)
    for name, op in every_op(STREAMED_NUMEL).items():
        check(native, op, state, gradients, nesterov, name)


@pytest.mark.parametrize("nesterov", FORMS)
def test_where_a_sample_misleads(native: NativeOps, nesterov: bool | None) -> None:
    state = torch.zeros(STREAMED_NUMEL), torch.zeros(STREAMED_NUMEL)
    for name, gradient in misleading(STREAMED_NUMEL):
        check(native, lambda o, a: o.accumulate_topk(a, 10_000), state, [gradient], nesterov, name)


@pytest.mark.parametrize("numel", [300, 2**20 + 9])
def test_any_alignment(native: NativeOps, numel: int) -> None:
    op = every_op(numel)["select"]
    for offset in range(1, 17, 1 if numel == 300 else 5):
        check(native, op, state_of(numel), gradients_of(numel)["odd pieces"], False, "", offset)


def test_the_reference() -> None:
    for nesterov in FORMS:
        for numel in (0, 1, 65, 1000):
            for name, op in every_op(numel).items():
                gradients = gradients_of(numel)["odd pieces"]
                check(reference, op, state_of(numel), gradients, nesterov, name)


@pytest.mark.parametrize("nesterov", FORMS)
def test_a_sample_is_of_what_was_before(native: NativeOps, nesterov: bool | None) -> None:
    v, u = state_of(1000)
    gradients = gradients_of(1000)["odd pieces"]
    nothing = [torch.full((1000,), 7.0) for _ in range(2)]
    there = None if nesterov is None else Momentum(u, 0.9, nesterov)
    here = None if nesterov is None else Momentum(nothing[1], 0.9, nesterov)
    expected = reference.sample_accumulator(Accumulation(v, gradients, there), 300, 3, 2)
    before = Before(v, None if nesterov is None else u)
    for ops in (native, reference):
        sample = ops.sample_accumulator(
            Accumulation(nothing[0], gradients, here, before), 300, 3, 2
        )
        assert_same(sample, expected, "")
        assert all((tensor == 7.0).all() for tensor in nothing)


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="ends where memory does")
@pytest.mark.parametrize("threads", [1])
def test_what_was_before_stays_where_memory_runs_out(threads: int) -> None:
    """Everything is selected, for which there is no room: the pass ends in the middle."""
    code = f"""
import resource, torch
from hvd_sparse.ops import Accumulation, Before
from hvd_sparse.ops.native import NativeOps

torch.set_num_threads(1)
native = NativeOps(threads={threads})
warm = torch.ones(2**18)
native.accumulate_select(Accumulation(warm), 2.0)  # the threads have started
numel = 2**22
residual, gradient = torch.rand(numel) + 1.0, torch.ones(numel)
before, copy = Before(torch.rand(numel) + 1.0), residual.clone()
expected = before.residual.clone()
with open("/proc/self/statm") as statm:
    in_use = int(statm.read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**23, limits[1]))
try:
    native.accumulate_select(Accumulation(residual, [gradient], before=before), 0.0)
except MemoryError:
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not torch.equal(residual, copy)  # it has begun
    print(torch.equal(before.residual, expected))
"""
    assert run_python(code).stdout == "True\n"
