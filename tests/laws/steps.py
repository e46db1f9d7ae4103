"""One step of one rank, as the engine does it with a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hvd_sparse.collectives import Collective, Reduction
from hvd_sparse.memories import ErrorFeedback
from hvd_sparse.selectors import Selector
from hvd_sparse.selectors.correction import hold_back
from hvd_sparse.streams import SparseStream


def one_step(
    memory: ErrorFeedback,
    selector: Selector,
    collective: Collective,
    gradients: Sequence[Tensor],
    k: int,
) -> tuple[SparseStream, Reduction]:
    """What was taken, and what came of it."""
    collective.aim(k)
    accumulator = memory.accumulate(gradients, k, collective.scope())
    taken = hold_back(accumulator, selector.select(accumulator, k), k)
    try:
        reduction = collective.reduce(taken.to("cpu"), memory.take_at)
    except BaseException:
        memory.roll_back()
        raise
    memory.give_back(taken, reduction.returned)
    memory.applied(reduction.reduced)
    return taken, reduction
