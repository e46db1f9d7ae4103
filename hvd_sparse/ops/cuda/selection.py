"""Accumulation and selection: gradients are added, and what is selected moves out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.magnitude import (
    INFINITE_KEY,
    key_magnitude,
    magnitude_keys,
    pivot_key,
    threshold_key,
)
from hvd_sparse.ops.cuda._launcher import THREADS
from hvd_sparse.ops.cuda._passes import (
    Accumulator,
    Entries,
    OrderedPass,
    empty_stream,
    new_header,
    tile_count,
    total_of,
)
from hvd_sparse.ops.cuda.estimation import CudaEstimation, Descent
from hvd_sparse.ops.momentum import Momentum

LEAST_CAPACITY = 1 << 16
CAPACITY_SHARE = 32
"""A pass has room for n / 32 entries: what is denser costs a second launch."""
CANDIDATES_PER_ENTRY = 4
"""Room for candidates in exact top-k, as a multiple of k."""
LEAST_SAMPLE, MOST_SAMPLE = 1 << 12, 1 << 16
"""Elements that are sampled for a pivot: n / 64, within these limits."""
FEW_GROUPS = 32
"""Up to so many groups, the whole device works on one group after the other."""
EMPTY_SLOT = 0x7FFFFFFF
"""`kEmpty` in csrc/cuda/hashing.cu."""


class CudaSelection(CudaEstimation):
    """As `hvd_sparse.ops.selection`, on checked arguments."""

    def accumulate_select(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        threshold: float,
        momentum: Momentum | None = None,
    ) -> Entries:
        """Moves out what reaches the threshold."""
        return self.partition_select(
            residual, gradients, threshold, 0, residual.numel(), momentum=momentum
        )

    def partition_select(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        threshold: float,
        start: int,
        stop: int,
        momentum: Momentum | None = None,
    ) -> Entries:
        """Moves out what reaches the threshold in `[start, stop)`."""
        accumulator = Accumulator(residual, gradients, momentum)
        key = threshold_key(threshold)
        capacity = min(residual.numel(), max(LEAST_CAPACITY, residual.numel() // CAPACITY_SHARE))

        def select(step: OrderedPass) -> None:
            self._select(accumulator, step, key, None, start, stop)

        passed = OrderedPass(accumulator.tiles, capacity, residual.device)
        select(passed)
        return passed.finish(select)

    def accumulate_topk(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        k: int,
        pivot: float = 0.0,
        momentum: Momentum | None = None,
    ) -> tuple[Tensor, Tensor, float]:
        """Moves out the k largest magnitudes.

        What reaches the pivot moves out, in the pass that accumulates; the k largest of that are
        found by radix descent, and the others move back. Nothing is waited for in between. Where
        the pivot let too few entries pass, or more than there is room for, the host finds out at
        the end, and goes on from there.
        """
        numel, device = residual.numel(), residual.device
        if k == 0 or numel == 0:
            self.accumulate_select(residual, gradients, math.inf, momentum)  # spoiled ones only
            return *empty_stream(0, device), math.inf if k == 0 else 0.0
        wanted = min(k, numel)
        accumulator = Accumulator(residual, gradients, momentum)
        key = pivot_key(pivot)
        key_at = None if key else self._sampled_pivot(accumulator, wanted)

        def select(step: OrderedPass) -> None:
            self._select(accumulator, step, key, key_at, 0, numel)

        capacity = min(numel, CANDIDATES_PER_ENTRY * wanted + LEAST_CAPACITY)
        passed = OrderedPass(accumulator.tiles, capacity, device)
        select(passed)
        largest, descent = self._take_largest(
            residual, passed.indices, passed.values, wanted, passed.header
        )
        total, stopped, _, kth_key = torch.cat([passed.header[1:4], descent.state[1:2]]).tolist()
        if total < wanted:
            largest, threshold = self._with_more(residual, passed.entries(total), wanted)
        else:
            if stopped:
                largest, descent = self._take_largest(residual, *passed.finish(select), wanted)
                kth_key = descent.kth_key()
            threshold = key_magnitude(kth_key)
        return *largest, threshold if k <= numel else 0.0

    def hash_select(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        threshold: float,
        slots: int,
        slots_per_bucket: int,
        a: int,
        b: int,
        momentum: Momentum | None = None,
    ) -> Entries:
        """Moves out what reaches the threshold and finds a free slot."""
        accumulator, device = Accumulator(residual, gradients, momentum), residual.device
        hashing = (
            np.uint32(slots // slots_per_bucket),
            np.uint32(slots_per_bucket),
            np.uint64(a),
            np.uint64(b),
            torch.full((slots,), EMPTY_SLOT, dtype=torch.int32, device=device),
        )
        marks = torch.empty(accumulator.tiles * THREADS, dtype=torch.int32, device=device)
        arguments = (residual, *accumulator.momentum, *accumulator.table)
        self._launch(
            "hash_claim",
            accumulator.tiles,
            *arguments,
            np.uint32(threshold_key(threshold)),
            *hashing,
            marks,
        )

        def take(step: OrderedPass) -> None:
            self._launch("hash_take", step.tiles, *arguments, *hashing, marks, *step.outputs())

        step = OrderedPass(accumulator.tiles, min(slots, residual.numel()), device)
        take(step)
        return step.finish(take)

    def accumulate_group_topk(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        k: int,
        group_numel: int = 512,
        momentum: Momentum | None = None,
    ) -> Entries:
        """Moves out the k largest magnitudes of each group.

        Each group is one block's, or, where that would leave most of the device idle, the whole
        device's, one after the other.
        """
        numel, device = residual.numel(), residual.device
        groups = -(-numel // group_numel)
        if groups <= FEW_GROUPS:
            return self._topk_of_each(residual, gradients, k, group_numel, momentum)
        accumulator = Accumulator(residual, gradients, momentum)
        header, entries = new_header(groups, device), empty_stream(min(numel, groups * k), device)
        self._launch(
            "accumulate_group_topk",
            groups,
            residual,
            *accumulator.momentum,
            *accumulator.table,
            np.int64(numel),
            np.int64(group_numel),
            np.uint32(k),
            header,
            *entries,
        )
        count = total_of(header)
        return entries[0][:count], entries[1][:count]

    def _topk_of_each(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        k: int,
        group_numel: int,
        momentum: Momentum | None,
    ) -> Entries:
        """The same by `accumulate_topk` of one group after the other."""
        taken = [empty_stream(0, residual.device)]
        for start in range(0, residual.numel(), group_numel):
            stop = min(start + group_numel, residual.numel())
            indices, values, _ = self.accumulate_topk(
                residual[start:stop],
                _between(gradients, start, stop),
                k,
                momentum=momentum and replace(momentum, buffer=momentum.buffer[start:stop]),
            )
            taken.append((indices + start, values))
        return torch.cat([one[0] for one in taken]), torch.cat([one[1] for one in taken])

    def _select(
        self,
        accumulator: Accumulator,
        step: OrderedPass,
        key: int,
        key_at: Tensor | None,
        start: int,
        stop: int,
    ) -> None:
        """Launches one pass that accumulates and selects."""
        momentum = accumulator.momentum if accumulator.has_momentum else ()
        self._launch(
            "accumulate_momentum_select" if momentum else "accumulate_select",
            step.tiles,
            accumulator.residual,
            *momentum,
            *accumulator.table,
            np.uint32(key),
            key_at,
            np.int64(start),
            np.int64(stop),
            *step.outputs(),
        )

    def _sampled_pivot(self, accumulator: Accumulator, k: int) -> Tensor | None:
        """A key that probably lets k entries pass, and not many more; it stays on the device.

        Returns:
            Its place, or None where everything that is not zero has to be looked at.
        """
        numel = accumulator.numel
        if numel <= 8 * LEAST_SAMPLE:
            return None
        stride = (numel // min(max(numel // 64, LEAST_SAMPLE), MOST_SAMPLE) - 1) | 1
        samples = -(-numel // stride)
        # Of the sample, k / n is expected among the largest k; 4 standard deviations lie below.
        expected = samples * k / numel
        rank = math.ceil(expected + 4.0 * math.sqrt(expected) + 4.0)
        if rank >= samples:
            return None
        magnitudes = self._sample(accumulator, 0, stride, 1, samples)
        return self._descend(magnitudes, rank).key()

    def _take_largest(
        self,
        residual: Tensor,
        indices: Tensor,
        values: Tensor,
        k: int,
        passed: Tensor | None = None,
    ) -> tuple[Entries, Descent]:
        """The k largest candidates; the others move back into the residual.

        Args:
            residual: What they came from.
            indices: The candidates', or room for them.
            values: Theirs.
            k: How many to take, at most as many as there are.
            passed: Header of the pass that leaves the candidates; if they are fewer than k or not
                all there, nothing happens.
        """
        descent = self._descend(values, k, passed)
        header = new_header(tile_count(values.numel()), residual.device)
        largest = empty_stream(k, residual.device)
        self._launch(
            "take_largest",
            tile_count(values.numel()),
            indices,
            values,
            np.int64(values.numel()),
            passed,
            descent.state,
            np.uint64(k),
            residual,
            header,
            *largest,
        )
        return largest, descent

    def _with_more(self, residual: Tensor, taken: Entries, k: int) -> tuple[Entries, float]:
        """Adds the largest entries that are left to those that a pivot let pass, up to k."""
        indices, values = taken
        spoiled = indices[magnitude_keys(values) >= INFINITE_KEY].long()
        kept = residual[spoiled]
        residual[spoiled] = 0.0  # what they left behind is not to be taken now
        missing = k - indices.numel()
        threshold = self.kth_magnitude(residual, missing)
        if threshold > 0.0:
            more = self.accumulate_topk(residual, (), missing, threshold)[:2]
        else:
            more = self.accumulate_select(residual, (), 0.0)
        residual[spoiled] = kept
        indices, order = torch.cat([indices, more[0]]).sort()
        return (indices, torch.cat([values, more[1]])[order]), threshold


def _between(gradients: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """What lies at `[start, stop)` of gradients that lie side by side: views."""
    pieces, begin = [], 0
    for gradient in gradients:
        end = begin + gradient.numel()
        if begin < stop and start < end:
            pieces.append(gradient.view(-1)[max(start - begin, 0) : stop - begin])
        begin = end
    return pieces
