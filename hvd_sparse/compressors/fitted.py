"""Gaussiank, SIDCo and MSTopK: thresholds that are fitted or searched for."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.checks import check_at_least, check_count, check_share
from hvd_sparse.compressors.shared import (
    NamedParameters,
    SharedWithMomentum,
    build,
    collective_named,
    constructor,
)
from hvd_sparse.selectors import (
    BisectionTopK,
    GaussianThreshold,
    Selector,
    SidcoThreshold,
    ThresholdSelector,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


@constructor
def gaussiank(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    sample_share: float = 0.01,
    collective: str = "topk_allgather",
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """Gaussiank: the threshold that a normal distribution would have.

    Source: Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (arXiv
    1911.08772): t = Φ⁻¹(1 - d/2) σ, with three rough adjustments. It misses k, often
    by a lot: it is here to be compared with.

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`; what is aimed at.
        sample_share: Part of the elements whose moments are taken, in (0, 1].
        collective: See `Compression.topk`.
        **shared: See the class `Compression`.
    """
    selector = partial(_gaussian, check_share("sample_share", sample_share))
    own = {"collective": collective, "sample_share": sample_share}
    return build(
        "gaussiank", named_parameters, density, selector, collective_named(collective), own, shared
    )


@constructor
def sidco(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    sample_share: float = 0.01,
    tolerance: float = 0.1,
    collective: str = "topk_allgather",
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """SIDCo: exponential tails fitted in stages.

    Source: Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for
    Distributed Training Systems" (MLSys 2021): η_m = η_{m-1} + μ_m ln(1/δ_m).

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`.
        sample_share: Part of the elements to which the tails are fitted, in (0, 1].
        tolerance: Share of k by which the number of entries may be off before the selection is put
            right, at least 0.
        collective: See `Compression.topk`.
        **shared: See the class `Compression`.
    """
    check_share("sample_share", sample_share)
    selector = partial(_sidco, sample_share, check_at_least("tolerance", tolerance, 0))
    own = {"collective": collective, "sample_share": sample_share, "tolerance": tolerance}
    return build(
        "sidco", named_parameters, density, selector, collective_named(collective), own, shared
    )


@constructor
def mstopk(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    halvings: int = 30,
    sample_share: float = 0.01,
    tolerance: float = 0.1,
    collective: str = "topk_allgather",
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """MSTopK: the threshold by bisection.

    Source: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters" (MLSys 2021).

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`.
        halvings: N, most bisections, at least 1.
        sample_share: Part of the elements from which candidates are guessed, in (0, 1].
        tolerance: Share of k within which bisection ends, at least 0.
        collective: See `Compression.topk`.
        **shared: See the class `Compression`.
    """
    check_share("sample_share", sample_share)
    check_at_least("tolerance", tolerance, 0)
    check_count("halvings", halvings, 1)
    selector = partial(BisectionTopK, sample_share, tolerance, halvings)
    own = {
        "collective": collective,
        "halvings": halvings,
        "sample_share": sample_share,
        "tolerance": tolerance,
    }
    return build(
        "mstopk", named_parameters, density, selector, collective_named(collective), own, shared
    )


def _gaussian(sample_share: float) -> Selector:
    return ThresholdSelector(GaussianThreshold(sample_share), tolerance=math.inf)


def _sidco(sample_share: float, tolerance: float) -> Selector:
    return ThresholdSelector(SidcoThreshold(sample_share), tolerance=tolerance)
