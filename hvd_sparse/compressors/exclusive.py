"""ExDyna and CLT-k: ranks select in turn or in partitions, so that nothing builds up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.checks import check_at_least, check_flag
from hvd_sparse.collectives import CyclicLeader, ExDyna
from hvd_sparse.compressors.shared import NamedParameters, SharedWithMomentum, build, constructor
from hvd_sparse.selectors import ExactTopK, OnlineThreshold

if TYPE_CHECKING:
    from typing_extensions import Unpack


@constructor
def exdyna(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    tolerance: float = 0.1,
    dynamic: bool = True,
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """ExDyna: each rank selects in its own partition; all ranks' accumulators are summed there.

    Source: Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable
    Distributed Deep Learning" (CCGrid 2024), algorithms 1 to 5. About k entries are applied,
    whatever the number of ranks: at the indices idx = ∪_i idx_i, Σ_i acc_i[idx], and acc_i[idx] = 0
    on every rank.

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`.
        tolerance: Share of k by which the number of entries may be off before the threshold is
            evaluated exactly, at least 0.
        dynamic: Whether blocks move between partitions so that ranks select alike many entries.
        **shared: See the class `Compression`.
    """
    own = {
        "tolerance": check_at_least("tolerance", tolerance, 0),
        "dynamic": check_flag("dynamic", dynamic),
    }
    collective = partial(ExDyna, tolerance=tolerance, dynamic=dynamic)
    return build("exdyna", named_parameters, density, OnlineThreshold, collective, own, shared)


@constructor
def clt_k(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """CLT-k: at step t, rank t mod P selects its top k for all ranks.

    Source: Chen et al., "ScaleCom" (NeurIPS 2020). idx = Topk(acc_leader); Σ_i acc_i[idx] is
    applied, and acc_i[idx] = 0 on every rank.

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`.
        **shared: See the class `Compression`.
    """
    return build("clt_k", named_parameters, density, ExactTopK, CyclicLeader, {}, shared)
