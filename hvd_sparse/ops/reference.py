"""The operations in plain torch: what they mean, and what runs where there is no native library.

Works on any device. The arguments are as `hvd_sparse.ops` has checked them. Operations on streams
and the formats of wires, which it does not check, are described here. An index out of `[0, n)`
raises ValueError; some entries may be written by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse.magnitude import INFINITE_KEY, magnitude_keys, threshold_key
from hvd_sparse.ops._arguments import GAP_BLOCK, MAX_NUMEL, Entries, bad_index
from hvd_sparse.ops.accumulation import Accumulation

WORD_MASK = 0xFFFFFFFF
MOST_SCALE_KEY = 0x7F7FFF00
"""A scale above this could make the top level infinite when it is multiplied out."""

# -- selection -------------------------------------------------------------------------------------


class Sums:
    """The residual plus the gradients, `acc`; nothing is written back before `move_out`."""

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        before = accumulation.unchanged()
        residual, momentum = before.residual, before.momentum
        if len(accumulation.gradients) == 0:
            self.acc = residual.clone()
        else:
            g = torch.cat([gradient.reshape(-1).float() for gradient in accumulation.gradients])
            if momentum is None:
                self.acc = residual + g
            elif momentum.nesterov:
                self._u = (momentum.buffer + g) * momentum.factor
                self.acc = residual + self._u + g
            else:
                self._u = momentum.buffer * momentum.factor + g
                self.acc = residual + self._u
        self.keys = magnitude_keys(self.acc)

    def move_out(self, selected: Tensor) -> Entries:
        """Leaves in the residual what is not selected, by int64 indices, and returns what is.

        Where a sum is not finite, the old value stays, be it selected or not.
        """
        values = self.acc[selected]
        spoiled = self.keys >= INFINITE_KEY
        kept = self.acc.index_fill(0, selected, 0.0)
        accumulation = self._accumulation.in_place()
        _update(accumulation.residual, kept, spoiled)
        if accumulation.momentum is not None:
            _update(accumulation.momentum.buffer, self._u, spoiled)
        return selected.to(torch.int32), values


def _update(x: Tensor, updated: Tensor, spoiled: Tensor) -> None:
    """Writes to `x`; where it is spoiled, `x` stays as it was (0 if that was not finite either)."""
    before = torch.where(magnitude_keys(x) < INFINITE_KEY, x, 0.0)
    x.copy_(torch.where(spoiled, before, updated))


def accumulate_select(
    accumulation: Accumulation, threshold: float, start: int = 0, stop: int | None = None
) -> Entries:
    sums = Sums(accumulation)
    selected = sums.keys >= INFINITE_KEY
    selected[start:stop] = sums.keys[start:stop] >= threshold_key(threshold)
    return sums.move_out(_where(selected))


def accumulate_topk(accumulation: Accumulation, k: int) -> tuple[Tensor, Tensor, float]:
    sums = Sums(accumulation)
    acc, keys = sums.acc, sums.keys
    threshold = math.inf if k == 0 else kth_magnitude(acc, k) if k <= acc.numel() else 0.0
    order = torch.sort(keys, descending=True, stable=True).indices[:k]  # ties: the lower index
    return *sums.move_out(order[keys[order] > 0].sort().values), threshold


def accumulate_group_topk(accumulation: Accumulation, k: int, group_numel: int = 512) -> Entries:
    sums = Sums(accumulation)
    keys = sums.keys
    short = -keys.numel() % group_numel
    rows = torch.nn.functional.pad(keys, (0, short)).view(-1, group_numel)
    order = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :k]
    first = (
        torch.arange(rows.shape[0], device=keys.device, dtype=torch.int64).view(-1, 1) * group_numel
    )
    candidates = (first + order).flatten()
    candidates = candidates[candidates < keys.numel()]
    return sums.move_out(candidates[keys[candidates] > 0].sort().values)


def hash_select(
    accumulation: Accumulation, threshold: float, slots: int, slots_per_bucket: int, seed: int
) -> Entries:
    sums = Sums(accumulation)
    finite = sums.keys < INFINITE_KEY
    selected = _where((sums.keys >= threshold_key(threshold)) & finite)
    selected = selected[torch.sort(sums.keys[selected], descending=True, stable=True).indices]
    buckets = scaled(mixed32(selected, seed), slots // slots_per_bucket)
    # Sorted stably, the entries of a bucket are a run of descending magnitudes: the first ones win.
    buckets, order = torch.sort(buckets, stable=True)
    position = torch.arange(order.numel(), device=order.device, dtype=torch.int64)
    place = position - torch.searchsorted(buckets, buckets)
    winners = selected[order[place < slots_per_bucket]]
    return sums.move_out(torch.cat([winners, _where(~finite)]).sort().values)


def _where(mask: Tensor) -> Tensor:
    return torch.nonzero(mask).view(-1)


def mixed32(positions: Tensor, seed: int) -> Tensor:
    """32 random bits per position: the lowbias32 mixer, in 64-bit arithmetic.

    Unlike a product, it leaves no trace of order in places that lie a constant distance apart.
    """
    low, high = seed & WORD_MASK, seed >> 32
    h = (positions * 0x9E3779B9 + low) & WORD_MASK
    h = ((h ^ h >> 16) * 0x7FEB352D) & WORD_MASK
    h = ((h ^ h >> 15 ^ high) * 0x846CA68B) & WORD_MASK
    return h ^ h >> 16


def scaled(random: Tensor, count: Tensor | int) -> Tensor:
    """One of `count` < 2**31 places, by 32 random bits."""
    return random * count >> 32


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude of `x`, float32 `(n,)`, for k in `[1, n]`; C++ has none."""
    kth_key = torch.sort(magnitude_keys(x), descending=True).values[k - 1]
    return float(kth_key.view(torch.float32))


def sample_accumulator(accumulation: Accumulation, runs: int, run_numel: int, seed: int) -> Tensor:
    keys = Sums(accumulation).keys
    number = torch.arange(runs + 1, device=keys.device, dtype=torch.int64)
    edges = number * (keys.numel() // run_numel) // max(runs, 1)
    first = edges[:-1] + scaled(mixed32(number[:-1], seed), edges.diff())
    within = torch.arange(run_numel, device=keys.device, dtype=torch.int64)
    return keys[(first.view(-1, 1) * run_numel + within).flatten()].view(torch.float32)


# -- streams ---------------------------------------------------------------------------------------


def merge_sum(streams: Sequence[Entries], numel: int) -> Entries:
    """The sum of at least one stream over `numel` elements, below 2**31: an entry per index.

    At one index, values are added in the order of the list.
    """
    for i, (indices, _) in enumerate(streams):
        _check_range(f"streams[{i}] indices", indices, numel)
    union = torch.unique(torch.cat([indices for indices, _ in streams]))
    # -0.0 is the neutral element of a float sum: 0.0 + -0.0 would lose a sign.
    total = torch.full(union.shape, -0.0, device=union.device, dtype=torch.float32)
    for indices, values in streams:
        total[torch.searchsorted(union, indices)] += values
    return union, total


def difference(indices: Tensor, values: Tensor, other: Tensor) -> Entries:
    """The entries of a stream whose index is not in `other`, int32 `(m,)`, strictly ascending."""
    kept = ~torch.isin(indices, other)
    return indices[kept], values[kept]


def threshold_stream(indices: Tensor, values: Tensor, threshold: float) -> Entries:
    """The entries of a stream that reach a threshold >= 0 as `accumulate_select` does."""
    kept = magnitude_keys(values) >= threshold_key(threshold)
    return indices[kept], values[kept]


def scatter_add(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Adds a stream to a vector, float32 `(n,)`, in place: `x[indices] += values`."""
    _check_range("indices", indices, x.numel())
    x[indices] += values


def decode(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Writes a stream as a dense vector: zero everywhere but `out[indices] = values`.

    `out` is float32, float16 or bfloat16 `(n,)`; values are rounded to nearest even.
    """
    _check_range("indices", indices, out.numel())
    out.zero_()
    out[indices] = values.to(out.dtype)


def take_at(x: Tensor, indices: Tensor) -> Tensor:
    """Moves entries out of a vector, float32 `(n,)`: returns `x[indices]`, and leaves zeros there.

    `indices` are int32 `(nnz,)`, each at most once.
    """
    _check_range("indices", indices, x.numel())
    values = x[indices]
    x[indices] = 0.0
    return values


def _check_range(what: str, indices: Tensor, numel: int) -> None:
    if indices.numel() == 0:
        return
    low, high = torch.aminmax(indices)
    if int(low) < 0 or int(high) >= numel:
        raise bad_index(what, numel)


# -- wire ------------------------------------------------------------------------------------------


def gap_encode(indices: Tensor, start: int) -> Tensor:
    """Packs ascending indices as the gaps between them.

    The gaps, `indices[0] - start` and then each index less its predecessor less one, are packed in
    blocks of 128, each with the width of its largest gap. The code is the blocks' widths, a byte
    each, then the blocks' bits from the lowest up, each from a new byte on: uint8 `(bytes,)`.

    Indices are int32 `(nnz,)`, strictly ascending from `start` on, in `[0, 2**31)`; refused if not.
    """
    if indices.numel() == 0:
        return indices.to(torch.uint8)
    before = torch.cat([indices.new_tensor([start], dtype=torch.int64) - 1, indices[:-1].long()])
    gaps = indices.long() - before - 1
    if bool((gaps < 0).any()):
        raise bad_index(f"indices from {start} on", MAX_NUMEL)
    blocks = gaps.split(GAP_BLOCK)
    widths = [int(block.max()).bit_length() for block in blocks]
    packed = [_pack_bits(block, width) for block, width in zip(blocks, widths, strict=True)]
    return torch.cat([torch.tensor(widths, dtype=torch.uint8, device=indices.device), *packed])


def gap_decode(code: Tensor, nnz: int, start: int, stop: int) -> Tensor:
    """Reads what `gap_encode` packed from `start` on: int32 `(nnz,)`, below `stop` < 2**31.

    Raises:
        ValueError: The code is not one of `nnz` indices in `[start, stop)`.
    """
    what = f"the {nnz} indices of a code"
    count = -(-nnz // GAP_BLOCK)
    if code.numel() < count:
        raise bad_index(what, stop)
    widths = code[:count].tolist()
    lengths = [min(GAP_BLOCK, nnz - first) for first in range(0, nnz, GAP_BLOCK)]
    sizes = [-(-length * width // 8) for length, width in zip(lengths, widths, strict=True)]
    if sum(sizes) != code.numel() - count or any(width > 31 for width in widths):
        raise bad_index(what, stop)
    blocks = code[count:].split(sizes) if count else ()
    gaps = [
        _unpack_bits(block, length, width)
        for block, length, width in zip(blocks, lengths, widths, strict=True)
    ]
    if not gaps:
        return code.to(torch.int32)
    indices = (torch.cat(gaps) + 1).cumsum(0) + (start - 1)
    if int(indices[-1]) >= stop:
        raise bad_index(what, stop)
    return indices.to(torch.int32)


def _pack_bits(gaps: Tensor, width: int) -> Tensor:
    """The gaps' bits side by side, from the lowest up."""
    bits = gaps[:, None] >> torch.arange(width, device=gaps.device, dtype=torch.int64) & 1
    weights = 1 << torch.arange(8, device=gaps.device, dtype=torch.int64)
    return (_rows(bits.reshape(-1), 8) * weights).sum(1).to(torch.uint8)


def _unpack_bits(packed: Tensor, length: int, width: int) -> Tensor:
    bits = packed.long()[:, None] >> torch.arange(8, device=packed.device, dtype=torch.int64) & 1
    rows = bits.reshape(-1)[: length * width].view(length, width)
    return (rows << torch.arange(width, device=packed.device, dtype=torch.int64)).sum(1)


def qsgd_quantize(x: Tensor, bits: int, bucket_numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rounds values to a few levels per bucket, stochastically and without bias.

    Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding" (NIPS 2017), with the largest magnitude of a bucket as its scale. With
    L = 2**(bits - 1) - 1, x becomes the level `|x| / scale * L`, rounded up with the probability of
    its fraction, and its sign; its code is level + L. Codes are packed from a byte's low bits up.

    The random numbers are a hash of the seed and a value's position: the same everywhere.

    Args:
        x: float32 `(n,)`.
        bits: Of one code: 2, 4 or 8.
        bucket_numel: Consecutive values that share a scale: 512 or 1024.
        seed: In `[0, 2**64)`.

    Returns:
        `(codes, scales)`: uint8 `(ceil(n * bits / 8),)` and float32 `(ceil(n / bucket_numel),)`. A
        bucket with a non-finite value has scale NaN; one that is too small for its levels, 0.
    """
    levels = (1 << (bits - 1)) - 1
    buckets = _rows(x, bucket_numel)
    largest = magnitude_keys(buckets).amax(1)
    scales = largest.clamp(max=MOST_SCALE_KEY).view(torch.float32)
    per_level = torch.full_like(scales, levels) / scales
    flat = ~per_level.isfinite()
    per_level = torch.where(flat | (largest >= INFINITE_KEY), 0.0, per_level)
    scales = torch.where(flat, 0.0, scales)
    scales = torch.where(largest >= INFINITE_KEY, torch.nan, scales)

    finite = torch.where(per_level[:, None] == 0.0, 0.0, buckets)
    level = (finite.abs() * per_level[:, None]).clamp_(max=levels)
    whole = level.to(torch.int32)
    odds = ((level - whole) * 16777216.0).to(torch.int32)
    positions = torch.arange(buckets.numel(), device=x.device, dtype=torch.int64).view_as(buckets)
    draws = (mixed32(positions, seed) >> 8).to(torch.int32)
    rounded = whole + (draws < odds).to(torch.int32)
    codes = levels + torch.where(finite < 0.0, -rounded, rounded)
    per_byte = 8 // bits
    grouped = _rows(codes.view(-1)[: x.numel()], per_byte)
    shifts = torch.arange(per_byte, device=x.device, dtype=torch.int64) * bits
    return (grouped << shifts).sum(1).to(torch.uint8), scales


def qsgd_dequantize(
    codes: Tensor, scales: Tensor, numel: int, bits: int, bucket_numel: int
) -> Tensor:
    """The values, float32 `(numel,)`, that `qsgd_quantize` rounded to; arguments as there."""
    levels = (1 << (bits - 1)) - 1
    shifts = torch.arange(8 // bits, device=codes.device, dtype=torch.int64) * bits
    unpacked = (codes.long()[:, None] >> shifts & ((1 << bits) - 1)).view(-1)[:numel]
    steps = scales / torch.full_like(scales, levels)
    return ((_rows(unpacked, bucket_numel) - levels) * steps[:, None]).view(-1)[:numel]


def _rows(x: Tensor, length: int) -> Tensor:
    """Rows of `length` elements, the last filled up with zeros."""
    rows = -(-x.numel() // length)
    padded = x.new_zeros(rows * length)
    padded[: x.numel()] = x
    return padded.view(rows, length)


# -- hosts -----------------------------------------------------------------------------------------


def sum_vectors(out: Tensor, vectors: Sequence[Tensor]) -> None:
    """Sums vectors `(n,)` of one type in the order of the list, into a float32 one, on the CPU."""
    out.zero_()
    for vector in vectors:
        out.add_(vector)  # widened before it is added


def post(place: Tensor, number: int) -> None:
    """Writes a number that other processes wait for: with it they see all that was written before.

    It is larger than what is in the place, int64 `(1,)`, in shared memory.
    """
    place.fill_(number)  # x86-64 keeps the order of what is written, other processors may not


def posted(places: Sequence[Tensor], number: int) -> bool:
    """Whether all of some places, int64 `(1,)` each, have a number of at least `number`."""
    return all(int(place) >= number for place in places)
