"""DSAR_Split_allgather: reduce sparse regions at their owners, then gather dense regions.

Source: SparCML (see sparcml.py), section 5.3.3; quantisation of the dense phase, section 6.

Steps: as in ssar_split_allgather.py, but what the owners send is dense. A wire that quantises dense
parts (QSGD) makes the second phase cheaper by as much; the owner of a region keeps its error.

Cost: (P-1 + log P) α + [0, k] β_s + (P-1)/P · N β_d. It is for results that fill up.
"""

from __future__ import annotations

from hvd_sparse.collectives.sparcml import (
    SparcmlCollective,
    allgather_regions,
    split_and_reduce,
)
from hvd_sparse.streams import SUM, Operation, Part
from hvd_sparse.transports import Transport
from hvd_sparse.wire import Packer
from hvd_sparse.work import Work


def dsar_split_allgather(
    part: Part, transport: Transport, packer: Packer, operation: Operation = SUM
) -> list[Part]:
    """Combine the ranks' parts of one vector; arguments as `ssar_recursive_double` takes them."""
    region = split_and_reduce(part, transport, packer, operation)
    if region.indices is not None:
        transport.worked(Work(0, region.nnz, region.numel))
        region = region.to_dense(operation)
    return allgather_regions(region, part.numel, transport, packer)


class DsarSplitAllgather(SparcmlCollective):
    """A sum by `dsar_split_allgather`."""

    combine_parts = staticmethod(dsar_split_allgather)
