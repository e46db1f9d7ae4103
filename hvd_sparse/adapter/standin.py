"""The stand-in that Horovod reduces instead of a gradient, and what its result tells.

Rank r of a process set of P ranks sends [1, r + 1]. A sum that is scaled by s comes back as
[P s, s P (P + 1) / 2]: the first element tells the scale that the optimizer asked for (Average,
Sum, pre- and postscaling), and the ratio of the two that it was a sum over all ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hvd_sparse.errors import UnsupportedError

TOLERANCE = 1e-5


def make_standin(rank: int) -> Tensor:
    """What rank `rank` of the process set sends, float32 `(2,)`."""
    return torch.tensor([1.0, rank + 1.0])


def scale_of(reduced: Tensor, world_size: int) -> float:
    """The factor s that Horovod applied to the sum over ranks.

    Raises:
        UnsupportedError: What came back is no scaled sum over all ranks.
    """
    count, total = reduced.tolist()
    if not math.isclose(total, count * (world_size + 1) / 2, rel_tol=TOLERANCE) or count <= 0:
        raise UnsupportedError(
            "sparse gradients can be summed or averaged over all ranks of a process set, but "
            f"Horovod reduced [1, rank + 1] to [{count:g}, {total:g}] over {world_size} ranks: "
            "op must be hvd.Average or hvd.Sum, and hvd.join() cannot be used"
        )
    return float(count) / world_size
