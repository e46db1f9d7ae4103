"""ExDyna and CLT-k: ranks select in turn or in partitions, so that nothing builds up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from hvd_sparse.checks import check_below_one, check_flag, option
from hvd_sparse.collectives import CyclicLeader, ExDyna
from hvd_sparse.methods.method_options import CollectiveFactory, MethodOptions
from hvd_sparse.selectors import ExactTopK, OnlineThreshold, Selector


@dataclass(frozen=True, kw_only=True)
class ExdynaOptions(MethodOptions):
    """ExDyna: each rank selects in its own partition; all ranks' accumulators are summed there.

    Source: Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable
    Distributed Deep Learning" (CCGrid 2024), algorithms 1 to 5. For any number of ranks about k
    entries are applied: Σ_i acc_i[idx] at the indices idx = ∪_i idx_i, and acc_i[idx] = 0 on every
    rank.
    """

    name = "exdyna"

    tolerance: float = option(
        0.1,
        "Share of k by which the number of entries may be off before the threshold is evaluated "
        "exactly, in [0, 1).",
        check_below_one,
    )
    dynamic: bool = option(
        True,
        "Whether blocks move between partitions, so that ranks select equally many entries.",
        check_flag,
    )

    @override
    def selector(self) -> Selector:
        return OnlineThreshold()

    @override
    def collective_factory(self) -> CollectiveFactory:
        return partial(ExDyna, tolerance=self.tolerance, dynamic=self.dynamic)


@dataclass(frozen=True, kw_only=True)
class CltkOptions(MethodOptions):
    """CLT-k: at step t, rank t mod P selects its top k for all ranks.

    Source: Chen et al., "ScaleCom" (NeurIPS 2020). idx = Topk(acc_leader); Σ_i acc_i[idx] is
    applied, and acc_i[idx] = 0 on every rank.
    """

    name = "clt_k"

    @override
    def selector(self) -> Selector:
        return ExactTopK()

    @override
    def collective_factory(self) -> CollectiveFactory:
        return CyclicLeader
