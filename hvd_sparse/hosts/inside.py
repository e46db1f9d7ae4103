"""The dense exchange among the ranks of a host, for one bucket.

Symbols: L ranks of one host, n elements of the bucket, m those of a shard, about n / L.

| step | between devices, a rank sends | through shared memory, a rank reads and writes |
|---|---|---|
| reduce_scatter | n (L - 1) / L values | 2 (n - m) values to copy, n + m to sum |
| gather | its stream L - 1 times | its stream, and L - 1 others |

Sums are taken in float32 and in the order of the local ranks: the same bits each time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse.streams import CPU, DenseSum, Part, Sum, join
from hvd_sparse.transports import Payload
from hvd_sparse.transports.group import GroupTransport
from hvd_sparse.transports.nccl import NcclTransport
from hvd_sparse.wire import PLAIN

STREAMS = "host.streams"

SHARD_ALIGNMENT = 16
"""In elements: shards of float32 begin on cache lines, so that no two ranks write one line."""


class InsideHost(ABC):
    """One bucket's exchange inside its host; all ranks of the host make the same calls.

    `shard` is this rank's, of those between the `bounds`. `needs_order`: all ranks must exchange
    buckets in one order, and on one thread.
    """

    needs_order: bool

    def __init__(self, local_rank: int, local_size: int, numel: int) -> None:
        self.bounds = shard_bounds(numel, local_size)
        self.shard = slice(*self.bounds[local_rank : local_rank + 2])

    @property
    def shard_numel(self) -> int:
        return int(self.shard.stop - self.shard.start)

    @abstractmethod
    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Tensor:
        """The host's sum of this rank's shard: float32 `(m,)`, valid until the next call.

        `gradients` are this rank's tensors, side by side over the bucket: one type, any strides.
        The sum is on their device.
        """

    @abstractmethod
    def gather(self, own: Sum) -> DenseSum:
        """The reduced shards of all ranks, `own` among them; readable until `reduce_scatter`."""

    def _message(self, own: Sum) -> Payload:
        """A reduced shard in the shorter form, at most m values long."""
        part = join(own.parts) if isinstance(own, DenseSum) else Part.of(own)
        if part.indices is not None and PLAIN.is_filled_by(part):
            part = part.to_dense()
        indices = None if part.indices is None else part.indices + self.shard.start
        in_bucket = Part(indices, part.values, self.shard.start, self.shard.stop)
        return PLAIN.encode(in_bucket.to(CPU), 0)

    def _read(self, messages: Sequence[Tensor]) -> DenseSum:
        """Decodes the ranks' messages: all ranks read the same bytes, so they get the same bits."""
        pairs = zip(messages, pairwise(self.bounds), strict=True)
        parts = (PLAIN.decode(message, *span) for message, span in pairs)
        return DenseSum(tuple(parts), self.bounds[-1])


class OverDevices(InsideHost):
    """The exchange where the ranks of a host have a device each.

    Gradients are cut into shards on the device, and go to the other devices over NCCL, all to all.
    Each rank adds its shards up there. That is as many bytes as NCCL's own reduce-scatter sends,
    but the order of the sum is ours: it has the same bits as through shared memory. Reduced
    streams, which are on the host, go by messages. `transport` connects the devices of all ranks.
    """

    needs_order = True

    def __init__(self, transport: NcclTransport, inside: GroupTransport, numel: int) -> None:
        super().__init__(inside.rank, inside.world_size, numel)
        self._devices, self._inside = transport, inside

    @override
    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        sizes = [stop - start for start, stop in pairwise(self.bounds)]
        shards = dict(zip(self._inside.ranks, flat.split(sizes), strict=True))
        by_rank = sorted(shards)  # the order of an all-to-all's parts
        if by_rank != list(shards):
            flat = torch.cat([shards[rank] for rank in by_rank])
        arrived = self._devices.exchange_on_devices(
            flat.view(torch.uint8),
            {rank: shards[rank].nbytes for rank in by_rank},
            dict.fromkeys(by_rank, self.shard_numel * flat.itemsize),
        )
        vectors = dict(zip(by_rank, arrived.view(flat.dtype).chunk(len(by_rank)), strict=True))
        first, *others = (vectors[rank] for rank in self._inside.ranks)
        total = first.to(torch.float32, copy=True)
        for vector in others:
            total += vector
        return total

    @override
    def gather(self, own: Sum) -> DenseSum:
        return self._read(self._inside.allgather(self._message(own), channel=STREAMS))


def shard_bounds(numel: int, local_size: int) -> list[int]:
    """The bounds of a vector's L shards: L + 1, ascending; shards may be empty."""
    ends = (numel * i // local_size for i in range(local_size))
    aligned = [min(numel, -(-end // SHARD_ALIGNMENT) * SHARD_ALIGNMENT) for end in ends]
    return [*aligned, numel]
