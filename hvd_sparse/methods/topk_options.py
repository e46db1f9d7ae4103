"""Top-k and its two simplest relatives: random-k and a hard threshold."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from hvd_sparse.checks import REQUIRED, above, count, option, optional
from hvd_sparse.methods.method_options import AUTOMATIC, AnyCollectiveOptions, check_collective
from hvd_sparse.selectors import ExactTopK, GroupedTopK, HardThreshold, RandomK, Selector


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
        '"oktopk" or "gtopk" (the k largest of the sum are applied); "topk_allgather", "topk_dsa", '
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

    threshold: float = option(
        REQUIRED,
        "λ, above 0, in units of the gradients (of the scaled loss, with loss scaling).",
        above(0),
    )

    @override
    def selector(self) -> Selector:
        return HardThreshold(self.threshold)
