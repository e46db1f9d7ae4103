"""One step of one rank, as the engine does it with a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hvd_sparse.collectives import Collective, Reduction
from hvd_sparse.memories import ErrorFeedback
from hvd_sparse.selectors import Selector
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
    taken = selector.select(memory.accumulate(gradients, k, collective.scope()), k)
    try:
        reduction = collective.reduce(taken.to("cpu"), memory.take_at)
    except BaseException:
        memory.roll_back()
        raise
    memory.give_back(taken, reduction.returned)
    return taken, reduction
