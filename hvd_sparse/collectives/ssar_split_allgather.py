"""SSAR_Split_allgather: reduce regions at their owners, then gather the regions.

Source: SparCML (see sparcml.py), section 5.3.2.

Steps: every rank sends region i to rank i, which combines what comes (`split_and_reduce`); an
allgather brings the results to all.

Cost: (P-1 + log P) α + [2 (P-1)/P · k, P · k] β_s: the least where all indices overlap and spread
evenly, the most where none do. It is for large data of which the result stays sparse.

A region that fills up while it is summed is sent dense (section 5.1). With that these are the steps
of TopkDSA, too, which Ok-Topk is compared with (Li and Hoefler, PPoPP '22, section 2 and Table 1,
after SparCML): one algorithm, under the names of two papers. Its bound there is
(P + 2 log P) α + [4k (P-1)/P, (2k + n) (P-1)/P] β.
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


def ssar_split_allgather(
    part: Part, transport: Transport, packer: Packer, operation: Operation = SUM
) -> list[Part]:
    """Combine the ranks' parts of one vector; arguments as `ssar_recursive_double` takes them."""
    region = split_and_reduce(part, transport, packer, operation)
    settled = packer.settled(region, operation)
    return allgather_regions(settled, part.numel, transport, packer)


class SsarSplitAllgather(SparcmlCollective):
    """A sum by `ssar_split_allgather`."""

    combine_parts = staticmethod(ssar_split_allgather)
