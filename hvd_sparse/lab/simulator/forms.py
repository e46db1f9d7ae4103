"""A simulated rank's steps: flat, or in two levels.

Both run the real collectives: the flat form over all ranks, two levels over one rank of each host.
What a host sums densely is not there, since nobody reads it. Its messages and additions take their
time, and the stream that a rank then selects of its shard is drawn, as in the flat form.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from hvd_sparse.collectives.registry import Algorithm
from hvd_sparse.collectives.two_levels import encoding
from hvd_sparse.cost_model import VALUE_BYTES, Work
from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.simulator.simulated_transport import SimulatedTransport
from hvd_sparse.lab.simulator.workloads import StreamSource
from hvd_sparse.streams import Part, SparseStream
from hvd_sparse.topology import batches
from hvd_sparse.wire import PLAIN, Packer, Wire


class Form(ABC):
    """What one rank does in a step.

    Args:
        transport: All ranks of the world.
        entry: The algorithm.
        numel: n.
        k: Entries of the whole vector.
        wire: The form of the messages.
        streams: The entries that every rank brings.
    """

    def __init__(
        self,
        transport: SimulatedTransport,
        entry: Algorithm,
        numel: int,
        k: int,
        wire: Wire,
        streams: StreamSource,
    ) -> None:
        self.transport = transport
        self.streams = streams
        self.numel, self.k, peers = self._part(numel, k)
        self.collective = entry.collective(peers, self.numel, self.k, wire=wire)

    @abstractmethod
    def _part(self, numel: int, k: int) -> tuple[int, int, SimulatedTransport]:
        """Elements and entries of what this rank exchanges, and what connects it to its peers."""

    @abstractmethod
    def take_step(self, step: int, *, encodes: bool) -> tuple[int, int]:
        """Take a step.

        Args:
            step: Its number.
            encodes: Whether what the rank computes to select its entries takes time.

        Returns:
            Entries of the sum, or of this rank's shard of it; a checksum of the whole sum.
        """


class Flat(Form):
    """Every rank exchanges with all others."""

    def _part(self, numel: int, k: int) -> tuple[int, int, SimulatedTransport]:
        return numel, k, self.transport

    def take_step(self, step: int, *, encodes: bool) -> tuple[int, int]:
        """See `Form.take_step`."""
        self.transport.worked(encoding(self.numel * encodes))
        stream = self.streams.stream(self.transport.rank, step, self.numel, self.k)
        reduced = self.collective.reduce(stream).reduced
        return reduced.nnz, _checksum([reduced.indices, reduced.values])


class TwoLevels(Form):
    """A rank exchanges its shard with the ranks of the same local rank, one of each host."""

    def _part(self, numel: int, k: int) -> tuple[int, int, SimulatedTransport]:
        transport = self.transport
        local_size = transport.world.network.local_size
        host, local = divmod(transport.rank, local_size)
        first = host * local_size
        self.inside = transport.group(range(first, first + local_size), "inside")
        across = transport.group(range(local, transport.world_size, local_size), "across")
        return -(-numel // local_size), -(-k // local_size), across

    def take_step(self, step: int, *, encodes: bool) -> tuple[int, int]:
        """See `Form.take_step`."""
        self._sum_inside()
        self.transport.worked(encoding(self.numel * encodes))
        stream = self.streams.stream(self.transport.rank, step, self.numel, self.k)
        reduced = self.collective.reduce(stream).reduced
        packer = Packer(PLAIN, self.transport.rank, step)
        shard = Part.of(SparseStream(reduced.indices, reduced.values, self.numel))
        payload, _ = packer.pack(packer.settled(shard))
        every = self.inside.all_to_all([payload] * self.inside.world_size, channel="host.streams")
        return reduced.nnz, _checksum(every)

    def _sum_inside(self) -> None:
        """Reduce-scatter: every rank gets its shard of the others, and adds it to its own."""
        rank, L, nbytes = self.inside.rank, self.inside.world_size, VALUE_BYTES * self.numel
        for distances in batches(L):
            handles = [
                self.inside.pretend(nbytes, (rank + s) % L, (rank - s) % L, channel="host.sums")
                for s in distances
            ]
            for handle in handles:
                handle.wait()
                self.inside.worked(Work(added_values=self.numel))


def check_hosts(world_size: int, local_size: int) -> None:
    """Refuse ranks that do not fill their hosts.

    Raises:
        ConfigError: There is a host with fewer ranks.
    """
    if world_size % local_size:
        raise ConfigError(
            f"two levels need whole hosts: world_size must be a multiple of {local_size}, "
            f"got {world_size}"
        )


def _checksum(tensors: Iterable[Tensor]) -> int:
    digest = 0
    for tensor in tensors:
        digest = zlib.crc32(tensor.numpy().tobytes(), digest)
    return digest
