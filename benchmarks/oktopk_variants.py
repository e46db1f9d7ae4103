"""Ok-Topk without its balancing or its overlap, and the skewed streams that need them."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from hvd_sparse.collectives import OkTopk
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Traffic, Transport
from hvd_sparse.wire import Packer

SKEW = 3.0
"""A place is n · u**SKEW for uniform u: half of the entries lie in the first eighth."""
SHARED = 0.5
"""Share of the places that all ranks have in common."""


def skewed_stream(rank: int, step: int, numel: int, k: int) -> SparseStream:
    """About k entries, most of them at low indices, as where one layer has the large gradients."""
    common = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1000 * step + rank + 1)
    draws = torch.cat(
        [
            torch.rand(round(k * SHARED), generator=common, dtype=torch.float64),
            torch.rand(k - round(k * SHARED), generator=own, dtype=torch.float64),
        ]
    )
    indices = torch.unique((draws**SKEW * numel).long()).to(torch.int32)
    values = torch.randn(indices.numel(), generator=own).exp_()
    return SparseStream(indices, values, numel)


class MeasuredOkTopk(OkTopk):
    """Ok-Topk, which notes what each phase took.

    Attributes:
        seconds: Of the last exchange, by phase.
        traffic: Of the last exchange, by phase.
    """

    seconds: dict[str, float]
    traffic: dict[str, Traffic]

    def split_and_reduce(self, stream: SparseStream, packer: Packer) -> SparseStream:
        """Phase 1."""
        self.seconds, self.traffic = {}, {}
        before, start = self.transport.traffic.snapshot(), perf_counter()
        reduced_topk = self._split(stream, packer)
        self.seconds["split and reduce"] = perf_counter() - start
        self.traffic["split and reduce"] = self.transport.traffic.since(before)
        return reduced_topk

    def _split(self, stream: SparseStream, packer: Packer) -> SparseStream:
        return super().split_and_reduce(stream, packer)

    def balance_and_allgather(
        self, reduced_topk: SparseStream, packer: Packer, *, re_evaluate: bool
    ) -> SparseStream:
        """Phase 2."""
        before, start = self.transport.traffic.snapshot(), perf_counter()
        u = super().balance_and_allgather(reduced_topk, packer, re_evaluate=re_evaluate)
        self.seconds["balance and allgather"] = perf_counter() - start
        self.traffic["balance and allgather"] = self.transport.traffic.since(before)
        return u


class UniformRegions(MeasuredOkTopk):
    """Without space repartition: all regions are of n/P elements."""

    def space_repartition(self, stream: SparseStream) -> Tensor:
        """Boundaries that know nothing of the entries."""
        P = self.transport.world_size
        return torch.arange(1, P, dtype=torch.int64) * self.numel // P


class UniformUnbalanced(UniformRegions):
    """Without the balancing of either phase: shares are gathered as they are."""

    def __init__(self, transport: Transport, numel: int, k: int) -> None:
        super().__init__(transport, numel, k, balance_factor=float("inf"))


class UniformLevelled(UniformRegions):
    """Regions as uneven as there, but shares are levelled before they are gathered."""

    def __init__(self, transport: Transport, numel: int, k: int) -> None:
        super().__init__(transport, numel, k, balance_factor=1.0)


class NotOverlapped(MeasuredOkTopk):
    """Rotated destinations, but every message is waited for before anything is summed."""

    def _split(self, stream: SparseStream, packer: Packer) -> SparseStream:
        P, rank = self.transport.world_size, self.transport.rank
        regions, span = self._cut(stream), self._spans()[rank]
        arrived = []
        for s in range(1, P):
            payload, _ = packer.pack(regions[(rank + s) % P])
            target, source = (rank + s) % P, (rank - s) % P
            handle = self.transport.exchange(payload, target, source, channel="split")
            arrived.append(self._read(handle.received(), packer, span))
        return self._sum(regions[rank].to_stream(self.numel), arrived)


class NotRotated(NotOverlapped):
    """Figure 2 (a): at step i everybody sends to rank i."""

    def _split(self, stream: SparseStream, packer: Packer) -> SparseStream:
        P, rank = self.transport.world_size, self.transport.rank
        regions, span = self._cut(stream), self._spans()[rank]
        arrived = []
        for owner in range(P):
            payload, _ = packer.pack(regions[owner])
            for source in range(P):
                sends, receives = source == rank != owner, owner == rank != source
                message = self.transport.exchange(
                    payload if sends else None,
                    owner if sends else None,
                    source if receives else None,
                    channel="split",
                ).wait()
                if message is not None:
                    arrived.append(self._read(message, packer, span))
        return self._sum(regions[rank].to_stream(self.numel), arrived)
