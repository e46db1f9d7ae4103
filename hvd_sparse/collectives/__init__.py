"""Sparse reductions, one file per algorithm or family of a paper.

`reduce(stream, take_at)` returns the sum to be applied, with the same bits on every rank, and this
rank's entries that took no part in it. `take_at(indices) -> values` is for collectives that sum all
ranks' accumulators at the union of indices (`IndexUnion`: ExDyna, CLT-k).

`registry.py` has one entry for each algorithm: name, class, cost, what others must know of it.
`automatic.py` chooses among them, and between lossless wires, by the cost model and a measured
link; `two_levels.py` predicts what they cost where ranks share a host's network card. Collectives
tell their transport what they compute (`transport.worked`), by which the simulator's clock moves.

Collectives are one text for host and device: a `Packer` brings messages to where they are summed,
the stream's `home`. One that `reads_on` a device takes streams that are there alone.
"""

from hvd_sparse.collectives.automatic import AutomaticCollective, lossless_wire
from hvd_sparse.collectives.collective import Collective, Reduction
from hvd_sparse.collectives.dense_allreduce import DenseAllreduce
from hvd_sparse.collectives.exdyna import ExDyna
from hvd_sparse.collectives.gtopk import GTopk
from hvd_sparse.collectives.index_union import CyclicLeader, IndexUnion
from hvd_sparse.collectives.oktopk import OkTopk
from hvd_sparse.collectives.sparcml import (
    DsarSplitAllgather,
    SsarRecursiveDouble,
    SsarSplitAllgather,
)
from hvd_sparse.collectives.spardl import SparDL
from hvd_sparse.collectives.topk_allgather import TopkAllgather
