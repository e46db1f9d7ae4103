"""TopkDSA: the dynamic sparse allreduce that Ok-Topk is compared with.

Source: Li and Hoefler (PPoPP '22), section 2 and Table 1, after SparCML.

Steps: a sparse reduce-scatter, then an allgather in which each region is sent in the form that
takes less room; that is `ssar_split_allgather` with its switch to the dense form.

Cost: (P + 2 log P) α + [4k (P-1)/P, (2k + n) (P-1)/P] β: the least where all indices overlap, the
most where the sum fills up.
"""

from __future__ import annotations

from hvd_sparse.collectives.ssar_split_allgather import SsarSplitAllgather


class TopkDsa(SsarSplitAllgather):
    """TopkDSA. Everything that goes in is applied."""
