"""Ok-Topk."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.checks import check_at_least, check_count
from hvd_sparse.collectives import OkTopk
from hvd_sparse.compressors.shared import NamedParameters, SharedWithMomentum, build, constructor
from hvd_sparse.selectors import ReusedThreshold

if TYPE_CHECKING:
    from typing_extensions import Unpack


@constructor
def oktopk(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    repartition_interval: int = 64,
    threshold_interval: int = 32,
    balance_factor: float = 4.0,
    tolerance: float = 0.1,
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """Ok-Topk: thresholds reused between exact evaluations, and an allreduce of O(k) volume.

    Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning"
    (PPoPP '22), Algorithms 1 and 2. It applies Topk(Σ_i Topk(ε_i + g_i)).

    The authors train the first 512 steps (VGG) or 128 (LSTM) densely: `dense_steps`.

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`.
        repartition_interval: τ, steps between repartitions of the index space, at least 1.
        threshold_interval: τ′, steps between exact thresholds, local and global, at least 1.
        balance_factor: Results are levelled between ranks before they are gathered where one rank
            has more than this many times the average, at least 1.
        tolerance: Share of k by which the number of entries may be off before a threshold is
            evaluated early, at least 0.
        **shared: See the class `Compression`.
    """
    own: dict[str, Any] = {
        "repartition_interval": check_count("repartition_interval", repartition_interval, 1),
        "threshold_interval": check_count("threshold_interval", threshold_interval, 1),
        "balance_factor": check_at_least("balance_factor", balance_factor, 1),
        "tolerance": check_at_least("tolerance", tolerance, 0),
    }
    selector = partial(ReusedThreshold, threshold_interval, tolerance)
    return build("oktopk", named_parameters, density, selector, partial(OkTopk, **own), own, shared)
