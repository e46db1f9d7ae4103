"""The methods: each class has the options of one, and cites its paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from typing_extensions import override

from hvd_sparse.checks import (
    at_least,
    at_most,
    check_above_zero,
    check_below_one,
    check_count,
    check_flag,
    check_share,
    choice,
    count,
    option,
    optional,
)
from hvd_sparse.collectives import CyclicLeader, ExDyna, OkTopk
from hvd_sparse.errors import ConfigError
from hvd_sparse.memories import MOMENTUM_KINDS
from hvd_sparse.methods.method_options import (
    AUTOMATIC,
    AnyCollectiveOptions,
    CollectiveFactory,
    MethodOptions,
    check_collective,
)
from hvd_sparse.selectors import (
    BisectionTopK,
    ExactTopK,
    GaussianThreshold,
    GroupedTopK,
    HardThreshold,
    HashedExtraction,
    OnlineThreshold,
    RandomK,
    ReusedThreshold,
    SampledThreshold,
    Selector,
    SidcoThreshold,
    ThresholdSelector,
)
from hvd_sparse.selectors.hashed import SLOTS_PER_BUCKET
from hvd_sparse.selectors.sampled import SAMPLE_SHARE


@dataclass(frozen=True, kw_only=True)
class TopkOptions(AnyCollectiveOptions):
    """Exact top-k: each rank sends its k largest accumulated magnitudes in every step.

    acc = ε + g; sent: the k largest |acc|; ε = the rest.
    """

    name = "topk"

    collective: str = option(
        AUTOMATIC,
        '"auto" (the cheapest of "topk_allgather" and SparCML\'s three, which apply all that was '
        "sent, for the world size, k, the wire and the link, which is measured once); "
        '"oktopk", "gtopk" or "spardl" (k entries of the sum are); "topk_allgather", "topk_dsa", '
        '"ssar_recursive_double", "ssar_split_allgather" or "dsar_split_allgather" (all that was '
        'sent is); "index_union" (all ranks\' accumulators wherever one selected). Several names, '
        'as in "oktopk,topk_allgather": the cheapest of these.',
        check_collective,
    )
    group_numel: int | None = option(
        None,
        "None: the k largest of a whole bucket. A number, at least 1: the same share of each group "
        "of about so many consecutive elements. SparCML (Renggli et al., SC '19) trains with 512, "
        "so that every layer is sent, however small its gradient.",
        optional(count(1)),
    )

    @override
    def selector(self) -> Selector:
        return ExactTopK() if self.group_numel is None else GroupedTopK(self.group_numel)


@dataclass(frozen=True, kw_only=True)
class RandomkOptions(AnyCollectiveOptions):
    """Random-k: k entries whatever their magnitude, the same ones on all ranks.

    Source: Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018).
    """

    name = "randomk"

    seed: int = option(0, "Seed of the draws, at least 0; must be the same on all ranks.", count(0))

    @override
    def selector(self) -> Selector:
        return RandomK(self.seed)


@dataclass(frozen=True, kw_only=True)
class HardThresholdOptions(AnyCollectiveOptions):
    """Hard threshold: all entries that reach one fixed magnitude, whatever density that gives.

    Source: Sahu et al., "Rethinking Gradient Sparsification as Total Error Minimization" (NeurIPS
    2021). There is no good default: the authors' λ = 1 / (2 √k), for a wanted density k/n, is wrong
    by orders of magnitude where gradients are small. Collectives that apply the k largest entries
    of the sum take k from `density`. A rank sends at most four times k entries in a step; others
    that reach the threshold wait in the residual.
    """

    name = "hard_threshold"

    threshold: float = field(
        metadata={
            "meaning": "λ, above 0, in units of the gradients (of the scaled loss, with scaling).",
            "check": check_above_zero,
        }
    )

    @override
    def selector(self) -> Selector:
        return HardThreshold(self.threshold)


@dataclass(frozen=True, kw_only=True)
class OktopkOptions(MethodOptions):
    """Ok-Topk: thresholds reused between exact evaluations, and an allreduce of O(k) volume.

    Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning"
    (PPoPP '22), Algorithms 1 and 2. It applies Topk(Σ_i Topk(ε_i + g_i)).
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


MOST_SLOTS_PER_ENTRY = 100


def _check_slots_per_bucket(name: str, value: int) -> int:
    if check_count(name, value, 1) not in SLOTS_PER_BUCKET:
        raise ConfigError(f"{name} must be 1 or 8, got {value!r}")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class DgcOptions(AnyCollectiveOptions):
    """Deep Gradient Compression: momentum correction and factor masking, sampled thresholds.

    Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887):
    u = m u + g; v = v + u; sent: about the k largest |v|; there v = 0 and u = 0.

    The optimizer must not apply momentum to these gradients a second time: use
    `hvd_sparse.MomentumCorrectedSGD`, or `hvd_sparse.dgc_sgd`, which makes both. The authors warm
    up over the first four epochs (`warmup_epochs=4, steps_per_epoch=…`), down to density 0.001.
    """

    name = "dgc"

    momentum: float = option(
        0.9, "m of the momentum correction, in [0, 1); 0 is plain error feedback.", check_below_one
    )
    momentum_kind: str = option(
        "local",
        '"local": each worker\'s own, as in the paper; "global": that of the applied gradients of '
        "all workers (GMC).",
        choice(MOMENTUM_KINDS),
    )
    sample_share: float = option(
        SAMPLE_SHARE,
        "Part of the elements from which the threshold is estimated, in (0, 1].",
        check_share,
    )

    @override
    def selector(self) -> Selector:
        return ThresholdSelector(SampledThreshold(self.sample_share))


@dataclass(frozen=True, kw_only=True)
class DragonnOptions(AnyCollectiveOptions):
    """DRAGONN: entries that pass a sampled threshold are extracted by hashing their indices.

    Source: Wang et al., "DRAGONN" (ICML 2022), algorithm 1. Where |acc_i| ≥ t, I[h(i)] = i; the
    largest magnitudes win the slots, and the others stay in the residual. The authors use it with
    DGC's memory: `momentum=0.9, momentum_kind="local"`.
    """

    name = "dragonn"

    slots_per_entry: float = option(
        3.0,
        "m/l, slots per entry expected to reach the threshold, above 0 and at most "
        f"{MOST_SLOTS_PER_ENTRY}.",
        at_most(MOST_SLOTS_PER_ENTRY),
    )
    slots_per_bucket: int = option(
        8,
        "8, which loses under 0.1 % of the entries at 3 slots per entry, and of many at most 0.8 % "
        "in a step; or 1, as in the paper, whose release has 4 slots per entry and loses 11.5 %.",
        _check_slots_per_bucket,
    )
    sample_share: float = option(
        SAMPLE_SHARE,
        "Part of the elements from which the threshold is estimated, in (0, 1].",
        check_share,
    )

    @override
    def selector(self) -> Selector:
        extraction = HashedExtraction(self.slots_per_entry, self.slots_per_bucket)
        return ThresholdSelector(SampledThreshold(self.sample_share), extraction)


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
    as_written: bool = option(
        False,
        "Whether the threshold is scaled and blocks move by the paper's algorithms 5 and 3 as they "
        "are written, for comparison: the number of entries is then not held.",
        check_flag,
    )

    @override
    def selector(self) -> Selector:
        return OnlineThreshold()

    @override
    def collective_factory(self) -> CollectiveFactory:
        return partial(
            ExDyna, tolerance=self.tolerance, dynamic=self.dynamic, as_written=self.as_written
        )


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


@dataclass(frozen=True, kw_only=True)
class GaussiankOptions(AnyCollectiveOptions):
    """Gaussiank: the threshold that a normal distribution would have.

    Source: Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (arXiv
    1911.08772): t = Φ⁻¹(1 - d/2) σ, with three rough adjustments. It often misses its density by a
    lot, and is here for comparison.
    """

    name = "gaussiank"

    sample_share: float = option(
        SAMPLE_SHARE, "Part of the elements whose moments are taken, in (0, 1].", check_share
    )

    least_share: float = option(
        0.0,
        "Share of k, in [0, 1): the threshold is scaled down until as many entries reach it. "
        "Ok-Topk's section 5.4 compares with 0.75; 0 is the method as published.",
        check_below_one,
    )

    @override
    def selector(self) -> Selector:
        estimator = GaussianThreshold(self.sample_share)
        return ThresholdSelector(estimator, tolerance=math.inf, least_share=self.least_share)


@dataclass(frozen=True, kw_only=True)
class SidcoOptions(AnyCollectiveOptions):
    """SIDCo: exponential tails fitted in stages.

    Source: Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for
    Distributed Training Systems" (MLSys 2021): η_m = η_{m-1} + μ_m ln(1/δ_m).
    """

    name = "sidco"

    sample_share: float = option(
        SAMPLE_SHARE, "Part of the elements to which the tails are fitted, in (0, 1].", check_share
    )
    tolerance: float = option(
        0.1,
        "Share of k by which the number of entries may be off before the selection is corrected, "
        "in [0, 1).",
        check_below_one,
    )

    @override
    def selector(self) -> Selector:
        return ThresholdSelector(SidcoThreshold(self.sample_share), tolerance=self.tolerance)


@dataclass(frozen=True, kw_only=True)
class MstopkOptions(AnyCollectiveOptions):
    """MSTopK: the threshold by bisection.

    Source: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters" (MLSys 2021).
    """

    name = "mstopk"

    halvings: int = option(30, "N, the largest number of bisections, at least 1.", count(1))
    sample_share: float = option(
        SAMPLE_SHARE,
        "Part of the elements from which candidates are guessed, in (0, 1].",
        check_share,
    )
    tolerance: float = option(
        0.1, "Share of k within which bisection ends, in [0, 1).", check_below_one
    )

    @override
    def selector(self) -> Selector:
        return BisectionTopK(self.sample_share, self.tolerance, self.halvings)


METHODS: Mapping[str, type[MethodOptions]] = MappingProxyType(
    {
        options.name: options
        for options in (
            TopkOptions,
            OktopkOptions,
            DgcOptions,
            DragonnOptions,
            ExdynaOptions,
            CltkOptions,
            GaussiankOptions,
            SidcoOptions,
            MstopkOptions,
            HardThresholdOptions,
            RandomkOptions,
        )
    }
)
