"""Random-k: entries whatever their magnitude.

Source: Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018).

Departure: one index is drawn from each of k equal ranges (strata), so that the draw takes O(k) time
and memory and comes out in ascending order; where k is far below n, every index still has a chance
of about k/n. All ranks draw the same indices, so that nothing builds up in the sum.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.selector import Selector, mixed, own_k
from hvd_sparse.streams import SparseStream


class RandomK(Selector):
    """`k` random entries; the `seed` is the same on all ranks."""

    is_common = True
    kept = ("step",)

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0

    @override
    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        """Zeros are taken as any other entry."""
        wanted, width = own_k(accumulator, k), accumulator.width
        generator = torch.Generator().manual_seed(mixed(self.seed, self.step) >> 1)
        self.step += 1
        spoiled = accumulator.accumulate()
        edges = torch.arange(wanted + 1, dtype=torch.int64, device="cpu") * width // max(wanted, 1)
        chance = torch.rand(wanted, generator=generator, dtype=torch.float64, device="cpu")
        offsets = (chance * (edges[1:] - edges[:-1])).long()
        indices = (edges[:-1] + offsets + accumulator.scope.start).int()
        taken = accumulator.take_at(indices.to(accumulator.residual.device))
        return accumulator.joined(taken, spoiled)
