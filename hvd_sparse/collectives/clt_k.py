"""CLT-k: one rank in turn selects for all.

Source: Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
Distributed Training" (NeurIPS 2020), cyclic local top-k.

Steps: at step t rank t mod P, the leader, selects its top k; every rank contributes its accumulator
at the leader's indices, and these values are summed (index_union.py).

Cost: index_union.py's with K = k: the result has k entries, whatever P.

Departure: the leader's indices travel by the allgather in which the others have nothing to send,
not by a broadcast. So a rank with a non-finite gradient can say so when it is not the leader.
"""

from __future__ import annotations

from hvd_sparse.accumulator import Scope
from hvd_sparse.collectives.index_union import IndexUnion


class CyclicLeader(IndexUnion):
    """The exchange of CLT-k; its scope is everything on the leader, and nothing elsewhere."""

    def scope(self) -> Scope:
        """See `Collective.scope`."""
        if self.step % self.transport.world_size == self.transport.rank:
            return Scope(0, self.numel)
        return Scope(0, 0, share=0.0)
