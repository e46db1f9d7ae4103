"""What goes over the wire: indices as bit-packed gaps, values as a few bits each.

Every operation raises TypeError where a tensor has another dtype, and ValueError where one is not
contiguous, lengths do not match, or a number is out of its range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse.ops import _arguments as checks
from hvd_sparse.ops._arguments import MAX_NUMEL, MAX_SEED
from hvd_sparse.ops._dispatch import unchecked

QSGD_BITS = (2, 4, 8)
QSGD_BUCKETS = (512, 1024)


def gap_encode(indices: Tensor, start: int) -> Tensor:
    """Packs ascending indices as the gaps between them.

    The gaps, `indices[0] - start` and then each index less its predecessor less one, are packed in
    blocks of 128, each with the width of its largest gap. The code is the blocks' widths, a byte
    each, then the blocks' bits from the lowest up, each from a new byte on: uint8 `(bytes,)`.

    Indices are int32 `(nnz,)`, strictly ascending from `start` on, in `[0, 2**31)`; refused if not.
    """
    device = checks.device_of(indices)
    checks.tensor("indices", indices, (torch.int32,), device)
    checks.integer("start", start, 0, MAX_NUMEL)
    return unchecked(device).gap_encode(indices, start)


def gap_decode(code: Tensor, nnz: int, start: int, stop: int) -> Tensor:
    """Reads what `gap_encode` packed from `start` on: int32 `(nnz,)`, below `stop` < 2**31.

    Raises:
        ValueError: The code is not one of `nnz` indices in `[start, stop)`.
    """
    device = checks.device_of(code)
    checks.tensor("code", code, (torch.uint8,), device)
    checks.integer("nnz", nnz, 0, MAX_NUMEL)
    checks.integer("start", start, 0, MAX_NUMEL)
    checks.integer("stop", stop, start, MAX_NUMEL)
    return unchecked(device).gap_decode(code, nnz, start, stop)


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
    device = checks.vector("x", x).device
    _check_form(bits, bucket_numel)
    checks.integer("seed", seed, 0, MAX_SEED)
    return unchecked(device).qsgd_quantize(x, bits, bucket_numel, seed)


def qsgd_dequantize(
    codes: Tensor, scales: Tensor, numel: int, bits: int, bucket_numel: int
) -> Tensor:
    """The values, float32 `(numel,)`, that `qsgd_quantize` rounded to; arguments as there."""
    device = checks.device_of(codes)
    checks.tensor("codes", codes, (torch.uint8,), device)
    checks.tensor("scales", scales, (torch.float32,), device)
    checks.integer("numel", numel, 0, MAX_NUMEL)
    _check_form(bits, bucket_numel)
    sizes = (-(-numel * bits // 8), -(-numel // bucket_numel))
    if (codes.numel(), scales.numel()) != sizes:
        raise ValueError(
            f"codes and scales of {numel} values must have {sizes} elements, "
            f"got {(codes.numel(), scales.numel())}"
        )
    return unchecked(device).qsgd_dequantize(codes, scales, numel, bits, bucket_numel)


def _check_form(bits: int, bucket_numel: int) -> None:
    if bits not in QSGD_BITS:
        raise ValueError(f"bits must be one of {QSGD_BITS}, got {bits!r}")
    if bucket_numel not in QSGD_BUCKETS:
        raise ValueError(f"bucket_numel must be one of {QSGD_BUCKETS}, got {bucket_numel!r}")
