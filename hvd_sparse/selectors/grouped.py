"""Top-k of every group of consecutive elements.

Source: Renggli et al., "SparCML" (SC '19), section 8: what it trains with, k of every 512
consecutive elements. Every layer is heard, however small its gradient.

Departure: a group is as long as makes the density right. At density 0.01 it is 5 of every 500, at
0.001 one of every 1000.
"""

from __future__ import annotations

from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.correction import keep_largest
from hvd_sparse.selectors.selector import Selector, own_k
from hvd_sparse.streams import SparseStream


class GroupedTopK(Selector):
    """The largest magnitudes of each group of about `group_numel` elements, about `k` in all."""

    def __init__(self, group_numel: int = 512) -> None:
        self.group_numel = group_numel

    @override
    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        """Groups with fewer nonzeros than their part take fewer.

        The last group is short. Where that makes too many of a short vector's, the smallest stay.
        """
        wanted, width = own_k(accumulator, k), accumulator.width
        if wanted == 0:
            return accumulator.accumulate()
        per_group = max(1, round(min(self.group_numel, width) * wanted / width))
        stream = accumulator.group_topk(per_group, max(per_group, per_group * width // wanted))
        if stream.nnz <= wanted * (1 + self.tolerance):
            return stream
        return keep_largest(accumulator, stream, wanted)[0]
