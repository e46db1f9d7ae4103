"""Rabenseifner's dense allreduce, for streams that are hardly sparse.

Source: Rabenseifner's algorithm as in Thakur et al., "Optimization of Collective Communication
Operations in MPICH" (IJHPCA 2005), section 4.4; "Dense" in Ok-Topk's Table 1.

Symbols: P ranks, C `cube.positions` (the largest power of two up to P), n elements, α latency,
β time per word.

Steps:
  1. where P > C, the surplus ranks hand their vectors to a neighbour, and wait;
  2. recursive halving: in each of log C rounds a rank sends half of its range to a partner and sums
     the other half with what it gets, until it has the sum of one C-th of the vector;
  3. recursive doubling: the same rounds backwards, which gather the sum;
  4. the surplus ranks get the result.

Cost: 2 log C α + 2n (C-1)/C β; where P > C, 2 α + 2n β more.

Departure: none. Operands are added in the order of the positions in the cube, so the result has the
same bits everywhere: every element is summed on one rank only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.cost_model import Work
from hvd_sparse.errors import ConfigError
from hvd_sparse.streams import CPU, SparseStream
from hvd_sparse.topology import Cube
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire


class DenseAllreduce(Collective):
    """The allreduce of whole vectors; all entries are applied, nothing is returned.

    Raises:
        ConfigError: Another wire than the plain one was given.
    """

    def __init__(self, transport: Transport, numel: int, k: int, *, wire: Wire = PLAIN) -> None:
        super().__init__(transport, numel, k, wire=wire)
        if wire is not PLAIN:
            raise ConfigError(f"the dense allreduce has no wire but the plain one, got {wire!r}")
        self.cube = Cube(transport.rank, transport.world_size)

    @override
    def reads_on(self, device: torch.device) -> bool:
        return True  # 4 bytes of an element come to the host, not 8 of an entry

    @override
    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        device = stream.home
        whole = torch.empty(self.numel, dtype=torch.float32, device=device)
        ops.on(device).decode(whole, *stream.to(device).payload())
        (vector,) = ops.moved((whole,), CPU)
        self.transport.worked(Work(0, stream.nnz, self.numel, self.numel))
        # The surplus ranks hand their vectors over, and get the result.
        theirs = self._swap_with_partner(vector, to_active=True)
        if theirs is not None:
            self.transport.worked(Work(added_values=self.numel))
            vector.add_(theirs)
        total = self._halve_and_double(vector)
        result = self._swap_with_partner(total, to_active=False)
        (total,) = ops.moved((total if result is None else result,), device)
        self.step += 1
        indices = total.view(torch.int32).nonzero().view(-1).int()
        reduced = SparseStream(indices, total[indices.long()], self.numel)
        return Reduction(reduced, SparseStream.empty(self.numel))

    def _halve_and_double(self, x: Tensor) -> Tensor:
        """Both phases, in place. A surplus rank makes the calls, without messages."""
        start, stop = 0, self.numel
        rounds = []
        for mask in reversed(list(self.cube.masks())):
            middle = start + (stop - start) // 2
            lower, upper = slice(start, middle), slice(middle, stop)
            keeps_lower = self.cube.position & mask == 0
            kept, sent = (lower, upper) if keeps_lower else (upper, lower)
            peer = self.cube.peer(mask)
            theirs = self._swap(x[sent], peer, peer)
            if theirs is not None:
                self.transport.worked(Work(added_values=theirs.numel()))
                torch.add(*((x[kept], theirs) if keeps_lower else (theirs, x[kept])), out=x[kept])
            rounds.append((peer, kept, sent))
            start, stop = kept.start, kept.stop
        for peer, kept, sent in reversed(rounds):
            theirs = self._swap(x[kept], peer, peer)
            if theirs is not None:
                x[sent] = theirs
        return x

    def _swap_with_partner(self, x: Tensor, *, to_active: bool) -> Tensor | None:
        if self.cube.positions == self.transport.world_size:
            return None
        sends = self.cube.is_passive == to_active
        partner = self.cube.partner
        return self._swap(x, partner if sends else None, None if sends else partner)

    def _swap(self, part: Tensor, dst: int | None, src: int | None) -> Tensor | None:
        arrived = self.transport.exchange((part,), dst, src, channel="dense").wait()
        return None if arrived is None else arrived.view(torch.float32)
