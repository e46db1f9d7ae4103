"""Top-k and its two simplest relatives: random-k and a hard threshold."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.checks import check_above, check_count
from hvd_sparse.compressors.shared import (
    NamedParameters,
    SelectorFactory,
    SharedWithMomentum,
    build,
    collective_named,
    constructor,
)
from hvd_sparse.selectors import ExactTopK, GroupedTopK, HardThreshold, RandomK

if TYPE_CHECKING:
    from typing_extensions import Unpack


@constructor
def topk(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    group_numel: int | None = None,
    collective: str = "auto",
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """Exact top-k: each rank sends its k largest accumulated magnitudes in every step.

    acc = ε + g; sent: the k largest |acc|; ε = the rest.

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`.
        group_numel: None: the k largest of a whole bucket. A number, at least 1: as large a part of
            each group of about so many consecutive elements. SparCML (Renggli et al., SC '19)
            trains with 512; every layer is heard then, however small its gradient.
        collective: "auto" (the cheapest of "oktopk", "topk_allgather" and SparCML's three, for the
            world size, k, the wire and the link, which is measured once); "oktopk" or "gtopk" (the
            k largest of the sum are applied); "topk_allgather", "topk_dsa",
            "ssar_recursive_double", "ssar_split_allgather" or "dsar_split_allgather" (all that was
            sent is); "index_union" (all ranks' accumulators wherever one selected).
        **shared: See the class `Compression`.
    """
    selector: SelectorFactory = ExactTopK
    if group_numel is not None:
        selector = partial(GroupedTopK, check_count("group_numel", group_numel, 1))
    own = {"collective": collective, "group_numel": group_numel}
    return build(
        "topk", named_parameters, density, selector, collective_named(collective), own, shared
    )


@constructor
def randomk(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    seed: int = 0,
    collective: str = "topk_allgather",
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """Random-k: k entries whatever their magnitude, the same ones on all ranks.

    Source: Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018).

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`.
        seed: Of the draws, at least 0; must be the same on all ranks.
        collective: See `Compression.topk`.
        **shared: See the class `Compression`.
    """
    selector = partial(RandomK, check_count("seed", seed, 0))
    own = {"collective": collective, "seed": seed}
    return build(
        "randomk", named_parameters, density, selector, collective_named(collective), own, shared
    )


@constructor
def hard_threshold(
    named_parameters: NamedParameters = None,
    *,
    threshold: float,
    density: float = 0.01,
    collective: str = "topk_allgather",
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """Hard threshold: all that reaches one fixed magnitude; density is whatever comes of it.

    Source: Sahu et al., "Rethinking Gradient Sparsification as Total Error Minimization" (NeurIPS
    2021). There is no good default: λ = 1 / (2 √k) is the authors', for a density k/n that is hoped
    for, and wrong by orders of magnitude where gradients are small.

    Args:
        named_parameters: See the class `Compression`.
        threshold: λ, above 0, in units of the gradients (of the scaled loss, with loss scaling).
        density: What k is for collectives that apply the k largest of the sum.
        collective: See `Compression.topk`.
        **shared: See the class `Compression`.
    """
    selector = partial(HardThreshold, check_above("threshold", threshold, 0))
    own = {"collective": collective, "threshold": threshold}
    return build(
        "hard_threshold",
        named_parameters,
        density,
        selector,
        collective_named(collective),
        own,
        shared,
    )
