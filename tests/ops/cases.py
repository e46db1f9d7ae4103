"""Inputs that are hard on a selection, and bit-for-bit comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hvd_sparse.ops import Accumulation, Momentum, reference
from hvd_sparse.ops.native import NativeOps

NUMELS = (0, 1, 5, 1000, 2**16 - 1, 2**16 + 1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DENORMAL = 1e-42
INF, NAN = float("inf"), float("nan")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@lru_cache
def vectors(numel: int) -> list[tuple[str, Tensor, Tensor]]:
    """Triples (name, residual, gradient), not to be written to."""
    return list(_vectors(numel))


def _vectors(numel: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    random = generator(numel)

    def normal() -> Tensor:
        return torch.randn(numel, generator=random)

    def places(count: int) -> Tensor:
        return torch.randint(max(numel, 1), (count if numel else 0,), generator=random)

    yield "normal", normal(), normal()
    yield "zero", torch.zeros(numel), torch.zeros(numel)
    yield "negative zero", torch.full((numel,), -0.0), torch.full((numel,), -0.0)
    yield "all equal", torch.full((numel,), 1.5), torch.full((numel,), -3.0)
    yield "ties", torch.randint(-3, 4, (numel,), generator=random).float(), torch.zeros(numel)
    thin = torch.zeros(numel)
    thin[places(20)] = 2.0
    yield "few nonzeros", thin, torch.zeros(numel)
    yield "denormal", normal() * DENORMAL, normal() * DENORMAL
    gradient = normal()
    gradient[places(4)] = INF
    gradient[places(4)] = -INF
    gradient[places(4)] = NAN
    yield "some non-finite", normal(), gradient
    residual = normal()
    residual[places(3)] = NAN
    yield "non-finite before", residual, gradient
    yield "all non-finite", normal(), torch.where(normal() > 0, INF, NAN)
    yield "overflow", torch.full((numel,), 3e38), torch.full((numel,), 3e38)


def misleading(numel: int) -> Iterator[tuple[str, Tensor]]:
    """Vectors whose sample's pivot lets too many or too few pass, with 10,000 of 2**20 wanted."""
    ties = torch.full((numel,), 1.5)
    ties[::1000] = INF
    yield "too many", ties
    places = reference.sample_accumulator(Accumulation(torch.arange(float(numel))), 1024, 8, 0)
    few = torch.randn(numel, generator=generator())
    few[places.long()] = 9.0  # all that the native library's sample has
    yield "too few", few


def cut(gradient: Tensor, pieces: int) -> list[Tensor]:
    """Cuts into pieces of uneven lengths (empty ones too), of all dtypes, at any alignment."""
    bounds = torch.randint(gradient.numel() + 1, (pieces - 1,), generator=generator(pieces))
    bounds = [0, *sorted(bounds.tolist()), gradient.numel()]
    return [
        gradient[begin:end].to(DTYPES[i % len(DTYPES)])
        for i, (begin, end) in enumerate(pairwise(bounds))
    ]


@lru_cache
def stream(numel: int, nnz: int, seed: int) -> tuple[Tensor, Tensor]:
    """A stream, not to be written to."""
    random = generator(seed)
    indices = torch.randperm(numel, generator=random)[:nnz].sort().values.to(torch.int32)
    values = torch.randn(indices.numel(), generator=random)
    values[::7] = -0.0
    return indices, values


def bits(x: Tensor) -> Tensor:
    """The bits of `x`, with one NaN for all: no one promises which payload a sum has."""
    if not x.is_floating_point():
        return x
    one_nan = torch.where(torch.isnan(x), torch.full((), NAN, dtype=x.dtype), x)
    return one_nan.view(torch.int32 if x.element_size() == 4 else torch.int16)


def assert_same(actual: object, expected: object, what: str = "") -> None:
    """Asserts equality bit for bit, of tensors, floats and sequences of them."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), what
        assert actual.dtype == expected.dtype, what
        assert actual.shape == expected.shape, what
        assert torch.equal(bits(actual), bits(expected)), what
    elif isinstance(expected, float):
        assert_same(torch.tensor(actual), torch.tensor(expected), what)
    elif isinstance(expected, int):
        assert actual == expected, what
    else:
        assert isinstance(actual, Sequence), what
        assert isinstance(expected, Sequence), what
        assert len(actual) == len(expected), what
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, what)


def same_as_reference(
    native: NativeOps,
    op: str,
    residual: Tensor,
    gradients: Sequence[Tensor],
    *arguments: object,
    buffer: Tensor | None = None,
    nesterov: bool = False,
    what: str = "",
) -> Any:
    """Calls an accumulating op of both, and asserts that results and state are the same.

    Args:
        buffer: That of a momentum, if there is one.

    Returns:
        What the op returned.
    """
    outcomes = []
    for implementation in (native, reference):
        state, u = residual.clone(), None if buffer is None else buffer.clone()
        momentum = None if u is None else Momentum(u, 0.9, nesterov)
        result = getattr(implementation, op)(Accumulation(state, gradients, momentum), *arguments)
        if u is None:
            outcomes.append((result, state))
        else:
            assert torch.isfinite(u).all() or not torch.isfinite(buffer).all(), what
            outcomes.append((result, state, u))
    assert_same(outcomes[0], outcomes[1], f"{op}{arguments}, {what}, nesterov {nesterov}")
    return outcomes[0][0]
