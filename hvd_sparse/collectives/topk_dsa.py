"""TopkDSA: the dynamic sparse allreduce that Ok-Topk is compared with.

Source: Li and Hoefler (PPoPP '22), section 2 and Table 1, after SparCML.

Steps: a reduce-scatter of sparse regions, then an allgather, in which a region that has filled up
is sent dense. These are the steps of `ssar_split_allgather`, whose regions settle into the form
that takes less room: one algorithm, under the names of two papers.

Cost: (P + 2 log P) α + [4k (P-1)/P, (2k + n) (P-1)/P] β: the least where all indices overlap, the
most where the sum fills up.
"""

from __future__ import annotations

from hvd_sparse.collectives.ssar_split_allgather import SsarSplitAllgather

TopkDsa = SsarSplitAllgather
"""TopkDSA. Everything that goes in is applied."""
