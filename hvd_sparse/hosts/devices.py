"""The dense exchange of a host whose ranks have a device each: from device to device.

A host's gradients are cut into shards on the device. All-to-all brings each rank its shard of every
gradient, and the rank adds them up there. That is as many bytes as NCCL's own reduce-scatter has,
while the order of the sum is ours: the bits are those that the host's memory would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hvd_sparse.hosts.inside import OverTransport
from hvd_sparse.transports.group import GroupTransport
from hvd_sparse.transports.nccl import NcclTransport


class OverDevices(OverTransport):
    """Gradients over NCCL, and reduced streams, which are on the host, by messages.

    Args:
        transport: Connects the devices of all ranks.
        inside: Connects the ranks of the host.
        numel: n.
    """

    def __init__(self, transport: NcclTransport, inside: GroupTransport, numel: int) -> None:
        super().__init__(inside, numel)
        self._devices, self._ranks = transport, inside.ranks

    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Tensor:
        """See `InsideHost.reduce_scatter`; waits until all shards have come."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        sizes = [stop - start for start, stop in pairwise(self.bounds)]
        shards = dict(zip(self._ranks, flat.split(sizes), strict=True))
        by_rank = sorted(shards)  # as the parts of an all-to-all lie
        if by_rank != list(shards):
            flat = torch.cat([shards[rank] for rank in by_rank])
        arrived = self._devices.exchange_on_devices(
            flat.view(torch.uint8),
            {rank: shards[rank].nbytes for rank in by_rank},
            dict.fromkeys(by_rank, self.shard_numel * flat.itemsize),
        )
        vectors = dict(zip(by_rank, arrived.view(flat.dtype).chunk(len(by_rank)), strict=True))
        first, *others = (vectors[rank] for rank in self._ranks)
        total = first.to(torch.float32, copy=True)
        for vector in others:
            total += vector
        return total
