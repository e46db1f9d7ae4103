"""Accumulation and selection: gradients are added, and what is selected moves out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hvd_sparse.magnitude import INFINITE_KEY, threshold_key
from hvd_sparse.ops.accumulation import Accumulation
from hvd_sparse.ops.reference._sums import Sums
from hvd_sparse.ops.reference.estimation import kth_magnitude


def accumulate_select(accumulation: Accumulation, threshold: float) -> tuple[Tensor, Tensor]:
    """Moves out what reaches the threshold."""
    sums = Sums(accumulation)
    return sums.move_out(_where(sums.keys >= threshold_key(threshold)))


def accumulate_topk(
    accumulation: Accumulation, k: int, pivot: float = 0.0
) -> tuple[Tensor, Tensor, float]:
    """Moves out the k largest magnitudes."""
    del pivot  # it could only save time
    sums = Sums(accumulation)
    acc = sums.acc
    threshold = math.inf if k == 0 else kth_magnitude(acc, k) if k <= acc.numel() else 0.0
    return *sums.move_out(_largest(sums.keys, k)), threshold


def accumulate_group_topk(
    accumulation: Accumulation, k: int, group_numel: int = 512
) -> tuple[Tensor, Tensor]:
    """Moves out the k largest magnitudes of each group."""
    sums = Sums(accumulation)
    keys = sums.keys
    short = -keys.numel() % group_numel
    rows = torch.nn.functional.pad(keys, (0, short)).view(-1, group_numel)
    order = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :k]
    first = torch.arange(rows.shape[0], device=keys.device).view(-1, 1) * group_numel
    candidates = (first + order).flatten()
    candidates = candidates[candidates < keys.numel()]
    return sums.move_out(candidates[keys[candidates] > 0].sort().values)


def partition_select(
    accumulation: Accumulation, threshold: float, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Moves out what reaches the threshold in `[start, stop)`."""
    sums = Sums(accumulation)
    selected = sums.keys >= INFINITE_KEY
    selected[start:stop] = sums.keys[start:stop] >= threshold_key(threshold)
    return sums.move_out(_where(selected))


def hash_select(
    accumulation: Accumulation, threshold: float, slots: int, slots_per_bucket: int, a: int, b: int
) -> tuple[Tensor, Tensor]:
    """Moves out what reaches the threshold and wins a slot."""
    sums = Sums(accumulation)
    finite = sums.keys < INFINITE_KEY
    selected = _where((sums.keys >= threshold_key(threshold)) & finite)
    selected = selected[torch.sort(sums.keys[selected], descending=True, stable=True).indices]
    buckets = _bucket_of(selected, slots // slots_per_bucket, a, b)
    # Sorted stably, the entries of a bucket are a run of descending magnitudes: the first ones win.
    buckets, order = torch.sort(buckets, stable=True)
    position = torch.arange(order.numel(), device=order.device)
    place = position - torch.searchsorted(buckets, buckets)
    winners = selected[order[place < slots_per_bucket]]
    return sums.move_out(torch.cat([winners, _where(~finite)]).sort().values)


def _where(mask: Tensor) -> Tensor:
    return torch.nonzero(mask).view(-1)


def _largest(keys: Tensor, k: int) -> Tensor:
    """Indices of the k largest keys above 0, ascending; of equal keys, the lower indices."""
    order = torch.sort(keys, descending=True, stable=True).indices[:k]
    return order[keys[order] > 0].sort().values


def _bucket_of(indices: Tensor, buckets: int, a: int, b: int) -> Tensor:
    """H = ((a·i + b) mod 2**64) >> 32, scaled to `[0, buckets)`: (h · buckets) >> 32."""
    h = (_signed(a) * indices + _signed(b)) >> 32 & 0xFFFFFFFF  # int64 wraps modulo 2**64
    return h * buckets >> 32


def _signed(x: int) -> int:
    """The int64 with the bits of `x` in [0, 2**64)."""
    return x - 2**64 if x >= 2**63 else x
