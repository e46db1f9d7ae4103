"""Ok-Topk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from hvd_sparse.checks import at_least, check_below_one, count, option
from hvd_sparse.collectives import OkTopk
from hvd_sparse.methods.method_options import CollectiveFactory, MethodOptions
from hvd_sparse.selectors import ReusedThreshold, Selector


@dataclass(frozen=True, kw_only=True)
class OktopkOptions(MethodOptions):
    """Ok-Topk: thresholds reused between exact evaluations, and an allreduce of O(k) volume.

    Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning"
    (PPoPP '22), Algorithms 1 and 2. It applies Topk(Σ_i Topk(ε_i + g_i)).

    The authors train the first 512 steps (VGG) or 128 (LSTM) densely: `dense_steps`.
    """

    name = "oktopk"

    repartition_interval: int = option(
        64, "τ, steps between repartitions of the index space, at least 1.", count(1)
    )
    threshold_interval: int = option(
        32, "τ′, steps between exact thresholds, local and global, at least 1.", count(1)
    )
    balance_factor: float = option(
        4.0,
        "Results are balanced between ranks before they are gathered if one rank has more than "
        "this many times the average, at least 1.",
        at_least(1),
    )
    tolerance: float = option(
        0.1,
        "Share of k by which the number of entries may be off before a threshold is evaluated "
        "early, in [0, 1).",
        check_below_one,
    )

    @override
    def selector(self) -> Selector:
        return ReusedThreshold(self.threshold_interval, self.tolerance)

    @override
    def collective_factory(self) -> CollectiveFactory:
        return partial(
            OkTopk,
            repartition_interval=self.repartition_interval,
            threshold_interval=self.threshold_interval,
            balance_factor=self.balance_factor,
            tolerance=self.tolerance,
        )
