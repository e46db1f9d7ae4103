"""One call of every operation, on inputs that are the same for every implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from hvd_sparse.ops import Accumulation, Momentum
from hvd_sparse.ops._dispatch import Ops

NUMELS = (1, 257, 5000, 100_003, 2**22 + 3)
"""The last one has more tiles than the look-back reads at once."""
HASH_SEED = 0x9E3779B97F4A7C15
Case = Callable[[Ops], tuple[object, ...]]
"""Calls an operation of an implementation: what it returned, and the tensors that it changed."""


def vector(numel: int, seed: int, device: torch.device) -> Tensor:
    """Small whole numbers, whose sums are exact, with many ties and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-40, 41, (numel,), generator=generator).float().to(device)


def cases(numel: int, device: torch.device) -> Iterator[tuple[str, Case]]:
    """Cases by the name of their operation; all of them fit a CUDA device and the reference."""
    k, dtypes = max(1, numel // 50), (torch.float32, torch.bfloat16, torch.float16)

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        cut = numel // 3  # so that the second begins where no load of 16 bytes may
        return [
            part.to(dtype).clone() for part in vector(numel, 2, device).split([cut, numel - cut])
        ]

    def accumulated(
        call: Callable[[Ops, Accumulation], tuple[object, ...]],
        dtype: torch.dtype = torch.float32,
        momentum: bool = False,
    ) -> Case:
        def case(ops: Ops) -> tuple[object, ...]:
            residual, buffer = vector(numel, 1, device), vector(numel, 3, device)
            corrected = Momentum(buffer, 0.5) if momentum else None
            returned = call(ops, Accumulation(residual, gradients(dtype), corrected))
            return (*returned, residual, buffer)

        return case

    for dtype in dtypes:
        for momentum in (False, True):
            told = f"{str(dtype).removeprefix('torch.')}{' momentum' if momentum else ''}"
            yield (
                f"accumulate_select {told}",
                accumulated(lambda o, a: o.accumulate_select(a, 60.0), dtype, momentum),
            )
    yield "accumulate_topk", accumulated(lambda o, a: o.accumulate_topk(a, k))
    yield (
        "accumulate_topk momentum",
        accumulated(lambda o, a: o.accumulate_topk(a, k), momentum=True),
    )
    for group_numel in (100, 1000, 2000):
        yield (
            f"accumulate_group_topk, {group_numel}",
            accumulated(partial(grouped, group_numel=group_numel)),
        )
    yield (
        "accumulate_select, partition",
        accumulated(lambda o, a: o.accumulate_select(a, 50.0, numel // 4, numel // 2)),
    )
    for slots_per_bucket in (1, 8):
        yield (
            f"hash_select, {slots_per_bucket}",
            accumulated(partial(hashed, slots=8 * k, slots_per_bucket=slots_per_bucket)),
        )
    yield (
        "sample_accumulator",
        accumulated(lambda o, a: (o.sample_accumulator(a, numel // 10, 8, 7),)),
    )
    streams = [picked(numel, seed, device) for seed in range(4)]
    yield "merge_sum", lambda o: o.merge_sum(streams, numel)
    yield "difference", lambda o: o.difference(*streams[0], streams[1][0])
    yield "threshold_stream", lambda o: o.threshold_stream(*streams[0], 20.0)
    yield "take_at", lambda o: (o.take_at(vector(numel, 1, device), streams[0][0]),)

    def changed(call: Callable[[Ops, Tensor], None]) -> Case:
        def case(ops: Ops) -> tuple[object, ...]:
            x = vector(numel, 1, device)
            call(ops, x)
            return (x,)

        return case

    yield "scatter_add", changed(lambda o, x: o.scatter_add(x, *streams[0]))
    yield "decode", changed(lambda o, x: o.decode(x, *streams[0]))


def hashed(
    ops: Ops, accumulation: Accumulation, slots: int, slots_per_bucket: int
) -> tuple[Tensor, Tensor]:
    """Entries that reach 40 and find a slot."""
    return ops.hash_select(accumulation, 40.0, slots, slots_per_bucket, HASH_SEED)


def grouped(ops: Ops, accumulation: Accumulation, group_numel: int) -> tuple[Tensor, Tensor]:
    """The largest 5 of every group."""
    return ops.accumulate_group_topk(accumulation, 5, group_numel)


def picked(numel: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A stream of about a tenth of the entries, and at least one."""
    generator = torch.Generator().manual_seed(100 + seed)
    chosen = torch.rand(numel, generator=generator) < 0.1
    chosen[seed % numel] = True
    indices = chosen.nonzero().view(-1).int()
    return indices.to(device), vector(indices.numel(), 10 + seed, device)


def same(one: tuple[object, ...], other: tuple[object, ...]) -> str:
    """In what two outcomes differ; empty where they have the same bits."""
    if len(one) != len(other):
        return f"{len(one)} results instead of {len(other)}"
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            if mine.shape != theirs.shape:
                return f"result {number}: shape {tuple(mine.shape)}, not {tuple(theirs.shape)}"
            apart = (mine != theirs).nonzero()
            if apart.numel():
                at = tuple(apart[0].tolist())
                return f"result {number} at {at}: {mine[at].item()}, not {theirs[at].item()}"
        elif mine != theirs:
            return f"result {number}: {mine}, not {theirs}"
    return ""
