"""Accumulation and selection: gradients are added, and what is selected moves out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.magnitude import INFINITE_KEY, key_magnitude, magnitude_keys, threshold_key
from hvd_sparse.ops._arguments import Entries
from hvd_sparse.ops.accumulation import Accumulation, Before
from hvd_sparse.ops.cuda._launcher import THREADS, Argument
from hvd_sparse.ops.cuda._passes import (
    AccumulationInputs,
    Claims,
    KernelFamily,
    empty_stream,
    stream,
    thread_blocks,
    vector,
)
from hvd_sparse.ops.cuda._workspace import tile_count

LEAST_CAPACITY = 1 << 16
CAPACITY_SHARE = 32
"""A pass has room for n / 32 entries: what is denser costs a second launch."""
CANDIDATES_PER_ENTRY = 4
"""Room for candidates in exact top-k, as a multiple of k."""
LEAST_SAMPLE, MOST_SAMPLE = 1 << 12, 1 << 16
"""Elements that are sampled for a pivot: n / 64, within these limits."""
WARP_GROUPS = {512: "accumulate_group_topk", 1024: "accumulate_long_group_topk"}
"""Kernels for groups that a warp holds in its registers, by their most elements."""
WARPS = 8
"""Of a block."""
SPAN_TILES = 2
"""Tiles whose marks one block reads (`kTilesOfSpan` in csrc/cuda/hashing.cu)."""
FEW_GROUPS = 32
"""Up to so many larger groups, the whole device works on one group after the other."""
DIGITS = 3
"""Of a key, from the top (csrc/cuda/topk.cu)."""
DESCENT_WORDS = (32 + DIGITS * 2048 * 4) // 8
"""64-bit words of a `Descent` there."""
KEY = slice(1, 2)
"""The word of it that is the k-th key."""
MOST_COUNTING_BLOCKS = 1024


class CudaSelection(KernelFamily):
    """As `hvd_sparse.ops.selection`, on checked arguments."""

    def accumulate_select(
        self, accumulation: Accumulation, threshold: float, start: int = 0, stop: int | None = None
    ) -> Entries:
        inputs, numel = AccumulationInputs(accumulation, self._workspace), accumulation.numel
        within = np.int64(start), np.int64(numel if stop is None else stop)
        capacity = min(numel, max(LEAST_CAPACITY, numel // CAPACITY_SHARE))

        def select(claims: Claims) -> None:
            self._select(inputs, claims, np.uint32(threshold_key(threshold)), None, *within)

        passed = Claims(self, inputs.tiles, capacity, accumulation.device)
        select(passed)
        return passed.finish(select)

    def accumulate_topk(self, accumulation: Accumulation, k: int) -> tuple[Tensor, Tensor, float]:
        """Moves out the k largest magnitudes.

        What reaches a sampled pivot moves out, in the pass that accumulates; the k largest of that
        are found by radix descent, and the others move back. Nothing is waited for in between.
        Where the pivot let too few entries pass, or more than there is room for, the host finds out
        at the end, and goes on from there.
        """
        residual, numel, device = accumulation.residual, accumulation.numel, accumulation.device
        if k == 0 or numel == 0:
            self.accumulate_select(accumulation, math.inf)  # spoiled ones only
            return *empty_stream(0, device), math.inf if k == 0 else 0.0
        wanted = min(k, numel)
        inputs = AccumulationInputs(accumulation, self._workspace)
        key_at = self._sampled_pivot(inputs, wanted)

        def select(claims: Claims) -> None:
            self._select(inputs, claims, np.uint32(0), key_at, np.int64(0), np.int64(numel))

        capacity = min(numel, CANDIDATES_PER_ENTRY * wanted + LEAST_CAPACITY)
        passed = Claims(self, inputs.tiles, capacity, device)
        select(passed)
        found = passed.in_order()
        largest, descent = self._take_largest(residual, *found, wanted, passed.header)
        total, written, kth_key = self._workspace.read(passed.header[1:3], descent[KEY])
        if total < wanted:
            few = found[0][:total], found[1][:total]
            largest, threshold = self._with_more(residual, few, wanted)
        else:
            if total > capacity:
                found = passed.again(select, total, written)
                largest, descent = self._take_largest(residual, *found, wanted)
                kth_key = self._workspace.read(descent[KEY])[0]
            threshold = key_magnitude(kth_key)
        return *largest, threshold if k <= numel else 0.0

    def hash_select(
        self,
        accumulation: Accumulation,
        threshold: float,
        slots: int,
        slots_per_bucket: int,
        seed: int,
    ) -> Entries:
        inputs, device = AccumulationInputs(accumulation, self._workspace), accumulation.device
        hashing = (
            np.uint32(slots // slots_per_bucket),
            np.uint32(slots_per_bucket),
            np.uint64(seed),
            torch.zeros(slots, dtype=torch.int64, device=device),  # of `kEmpty`
        )
        marks = torch.empty(inputs.tiles * THREADS, dtype=torch.int32, device=device)
        key = np.uint32(threshold_key(threshold))
        self._launch("hash_claim", inputs.tiles, *inputs.whole, key, *hashing, marks)

        def take(claims: Claims) -> None:
            marked = (np.int64(inputs.tiles), *hashing, marks)
            self._launch("hash_take", claims.blocks, *inputs.written, *marked, *claims.outputs())

        capacity = min(slots, accumulation.numel)
        winners = Claims(self, -(-inputs.tiles // SPAN_TILES), capacity, device)
        take(winners)
        return winners.finish(take)

    def accumulate_group_topk(
        self, accumulation: Accumulation, k: int, group_numel: int = 512
    ) -> Entries:
        """Moves out the k largest magnitudes of each group.

        A small group is a warp's. A larger one is a block's, or, where that would leave most of the
        device idle, the whole device's, one after the other.
        """
        numel, device = accumulation.numel, accumulation.device
        groups = -(-numel // group_numel)
        small = [kernel for most, kernel in WARP_GROUPS.items() if group_numel <= most]
        if small:
            kernel, blocks = small[0], -(-groups // WARPS)
        elif groups > FEW_GROUPS:
            kernel, blocks = "accumulate_large_group_topk", groups
        else:
            return self._topk_of_each(accumulation, k, group_numel)
        inputs = AccumulationInputs(accumulation, self._workspace)
        header, entries = self._header(blocks, device), empty_stream(min(numel, groups * k), device)
        grouped = np.int64(numel), np.int64(group_numel), np.uint32(k)
        self._launch(kernel, blocks, *inputs.whole, *grouped, header, *entries)
        return self._found(header, entries)

    def sample_accumulator(
        self, accumulation: Accumulation, runs: int, run_numel: int, seed: int
    ) -> Tensor:
        inputs = AccumulationInputs(accumulation, self._workspace)
        return self._sample(inputs, runs, run_numel, seed)

    def _topk_of_each(self, accumulation: Accumulation, k: int, group_numel: int) -> Entries:
        """The same by `accumulate_topk` of one group after the other."""
        taken = [empty_stream(0, accumulation.device)]
        for start in range(0, accumulation.numel, group_numel):
            stop = min(start + group_numel, accumulation.numel)
            indices, values, _ = self.accumulate_topk(_between(accumulation, start, stop), k)
            taken.append((indices + start, values))
        return torch.cat([one[0] for one in taken]), torch.cat([one[1] for one in taken])

    def _select(self, inputs: AccumulationInputs, claims: Claims, *selected: Argument) -> None:
        """Launches one pass that accumulates and selects: by a key, its place, from and up to."""
        kernel, accumulated = "accumulate_momentum_select", inputs.whole
        if inputs.momentum[0] is None:
            kernel = "accumulate_select"
            accumulated = (inputs.before, inputs.written[0], *inputs.table)
        self._launch(kernel, claims.blocks, *accumulated, *selected, *claims.outputs())

    def _sampled_pivot(self, inputs: AccumulationInputs, k: int) -> Tensor | None:
        """The place, on the device, of a key that probably lets k entries pass, and few more.

        None where everything that is not zero has to be looked at.
        """
        numel = inputs.before.numel()
        if numel <= 8 * LEAST_SAMPLE:
            return None
        samples = min(max(numel // 64, LEAST_SAMPLE), MOST_SAMPLE)
        # Of the sample, k / n is expected among the largest k; 4 standard deviations lie below.
        expected = samples * k / numel
        rank = math.ceil(expected + 4.0 * math.sqrt(expected) + 4.0)
        if rank >= samples:
            return None
        magnitudes = self._sample(inputs, samples, 1, 0)
        return self._descend(magnitudes, rank)[KEY].view(torch.int32)

    def _take_largest(
        self,
        residual: Tensor,
        indices: Tensor,
        values: Tensor,
        k: int,
        passed: Tensor | None = None,
    ) -> tuple[Entries, Tensor]:
        """The k largest candidates, and their descent; the others move back into the residual.

        There may only be room for candidates yet: `passed` is the header of the pass that leaves
        them. If they are fewer than k or not all there, nothing happens.
        """
        descent = self._descend(values, k, passed)
        header = self._header(tile_count(values.numel()), residual.device)
        largest = empty_stream(k, residual.device)
        self._launch(
            *("take_largest", tile_count(values.numel()), *stream(indices, values)),
            *(passed, descent, np.uint64(k), residual, header, *largest),
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
        more = self.accumulate_select(Accumulation(residual), threshold)
        if more[0].numel() > missing:
            more, _ = self._take_largest(residual, *more, missing)
        residual[spoiled] = kept
        indices, order = torch.cat([indices, more[0]]).sort()
        return (indices, torch.cat([values, more[1]])[order]), threshold

    def kth_magnitude(self, x: Tensor, k: int) -> float:
        """As that of `reference.py`; part of an exact top-k, and waited for."""
        return key_magnitude(self._workspace.read(self._descend(x, k)[KEY])[0])

    def _sample(self, inputs: AccumulationInputs, runs: int, run_numel: int, seed: int) -> Tensor:
        device, samples = inputs.before.device, runs * run_numel
        magnitudes = torch.empty(samples, device=device, dtype=torch.float32)
        places = np.int64(inputs.before.numel() // run_numel)
        self._launch(
            *("sample_accumulator", thread_blocks(samples)),
            *(inputs.before, inputs.buffer_before, *inputs.momentum[1:], *inputs.table),
            *(places, np.int64(runs), np.int64(run_numel), np.uint64(seed), magnitudes),
        )
        return magnitudes

    def _descend(self, x: Tensor, k: int, passed: Tensor | None = None) -> Tensor:
        """Starts a radix descent to the k-th largest key of `x`, k > 0.

        `x` is float32 `(n,)`, or room for what a pass leaves; if by the header of that, `passed`,
        it does not leave k entries, the key is 0. Returns the `Descent` (csrc/cuda/topk.cu), int64
        `(DESCENT_WORDS,)`, on the device.
        """
        descent = self._workspace.zeros(DESCENT_WORDS, x.device)
        for digit in range(DIGITS):
            self._launch(
                *("count_digits", min(tile_count(x.numel()), MOST_COUNTING_BLOCKS)),
                *(*vector(x), passed, np.uint64(k), np.uint32(digit), descent),
            )
        return descent


def _between(accumulation: Accumulation, start: int, stop: int) -> Accumulation:
    """What an accumulation does to `[start, stop)`, as one of views."""
    pieces, begin = [], 0
    for gradient in accumulation.gradients:
        end = begin + gradient.numel()
        if begin < stop and start < end:
            pieces.append(gradient.view(-1)[max(start - begin, 0) : stop - begin])
        begin = end
    momentum = accumulation.momentum
    if momentum is not None:
        momentum = replace(momentum, buffer=momentum.buffer[start:stop])
    before = accumulation.before
    if before is not None:
        buffer = None if before.buffer is None else before.buffer[start:stop]
        before = Before(before.residual[start:stop], buffer)
    return Accumulation(accumulation.residual[start:stop], pieces, momentum, before)
