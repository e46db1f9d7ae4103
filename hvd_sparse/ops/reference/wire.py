"""What goes over the wire."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse.magnitude import INFINITE_KEY, magnitude_keys
from hvd_sparse.ops._checks import bad_index
from hvd_sparse.ops._layout import GAP_BLOCK, MAX_NUMEL

WORD_MASK = 0xFFFFFFFF
MOST_SCALE_KEY = 0x7F7FFF00
"""A scale above this could make the top level infinite when it is multiplied out."""


def gap_encode(indices: Tensor, start: int) -> Tensor:
    """Packs ascending indices."""
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
    """Reads packed indices."""
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


def qsgd_quantize(x: Tensor, bits: int, bucket_numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rounds to levels."""
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
    positions = torch.arange(buckets.numel(), device=x.device).view_as(buckets)
    rounded = whole + (_random24(positions, seed) < odds).to(torch.int32)
    codes = levels + torch.where(finite < 0.0, -rounded, rounded)
    per_byte = 8 // bits
    grouped = _rows(codes.view(-1)[: x.numel()], per_byte)
    shifts = torch.arange(per_byte, device=x.device) * bits
    return (grouped << shifts).sum(1).to(torch.uint8), scales


def qsgd_dequantize(
    codes: Tensor, scales: Tensor, numel: int, bits: int, bucket_numel: int
) -> Tensor:
    """The values of levels."""
    levels = (1 << (bits - 1)) - 1
    shifts = torch.arange(8 // bits, device=codes.device) * bits
    unpacked = (codes.long()[:, None] >> shifts & ((1 << bits) - 1)).view(-1)[:numel]
    steps = scales / torch.full_like(scales, levels)
    return ((_rows(unpacked, bucket_numel) - levels) * steps[:, None]).view(-1)[:numel]


def _random24(positions: Tensor, seed: int) -> Tensor:
    """24 random bits per position: the lowbias32 mixer, in 64-bit arithmetic."""
    low, high = seed & WORD_MASK, seed >> 32
    h = (positions * 0x9E3779B9 + low) & WORD_MASK
    h = ((h ^ h >> 16) * 0x7FEB352D) & WORD_MASK
    h = ((h ^ h >> 15 ^ high) * 0x846CA68B) & WORD_MASK
    return ((h ^ h >> 16) >> 8).to(torch.int32)


def _rows(x: Tensor, length: int) -> Tensor:
    """Rows of `length` elements, the last filled up with zeros."""
    rows = -(-x.numel() // length)
    padded = x.new_zeros(rows * length)
    padded[: x.numel()] = x
    return padded.view(rows, length)


def _pack_bits(gaps: Tensor, width: int) -> Tensor:
    """The gaps' bits side by side, from the lowest up."""
    bits = gaps[:, None] >> torch.arange(width, device=gaps.device) & 1
    weights = 1 << torch.arange(8, device=gaps.device)
    return (_rows(bits.reshape(-1), 8) * weights).sum(1).to(torch.uint8)


def _unpack_bits(packed: Tensor, length: int, width: int) -> Tensor:
    bits = packed.long()[:, None] >> torch.arange(8, device=packed.device) & 1
    rows = bits.reshape(-1)[: length * width].view(length, width)
    return (rows << torch.arange(width, device=packed.device)).sum(1)
