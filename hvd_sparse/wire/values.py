"""Forms of float32 values on the wire."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from ctypes import c_float
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.magnitude import INFINITE_KEY, key_magnitude, magnitude_keys

SCALE_BYTES = 4
TOP = 15
"""Exponent that the largest of 16-bit values is brought to: float16 ends at 2**16."""
MOST_EXPONENT = 128
"""float32 ends at 2**128."""
MOST_SHIFT = 126
"""2**126 and its inverse are normal numbers."""


class ValueCodec(ABC):
    """Encodes values, in the order of their entries."""

    is_lossless = False

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Bytes of so many encoded values."""

    @abstractmethod
    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, ...]:
        """Encode float32 `(count,)`: tensors to be sent one after the other.

        Finite values stay finite and others do not become so.
        """

    @abstractmethod
    def decode(self, data: Tensor, count: int) -> Tensor:
        """Read uint8 `(nbytes(count),)`, 4-byte aligned, as float32 `(count,)`."""


def flat_message(payload: tuple[Tensor, ...]) -> Tensor:
    """A payload as its receiver gets it."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in payload])


class Float32Values(ValueCodec):
    """The values as they are."""

    is_lossless = True

    @override
    def nbytes(self, count: int) -> int:
        return 4 * count

    @override
    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, ...]:
        del seed
        return (values.contiguous(),)

    @override
    def decode(self, data: Tensor, count: int) -> Tensor:
        del count
        return data.view(torch.float32)


@dataclass(frozen=True)
class HalfValues(ValueCodec):
    """16 bits per value, rounded to nearest, behind one power of two for all.

    The power brings the largest finite magnitude near the top of float16's range, which spans 40
    powers of two: gradients may be anywhere. The `dtype` is float16 or bfloat16.
    """

    dtype: torch.dtype

    @override
    def nbytes(self, count: int) -> int:
        return SCALE_BYTES + 2 * count

    @override
    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, ...]:
        del seed  # it rounds to nearest
        top = _exponent(values)
        shift = max(-MOST_SHIFT, min(MOST_SHIFT, TOP - top))
        scaled = values * 2.0**shift
        if top == MOST_EXPONENT:  # what is rounded up here could not be scaled back
            below = 2.0 ** (top + shift) * (1 - torch.finfo(self.dtype).eps / 2)
            scaled = torch.where(values.isfinite(), scaled.clamp(-below, below), scaled)
        return (
            torch.full((1,), 2.0**-shift, dtype=torch.float32, device="cpu"),
            scaled.to(self.dtype),
        )

    @override
    def decode(self, data: Tensor, count: int) -> Tensor:
        del count
        scale = c_float.from_address(data.data_ptr()).value
        return data[SCALE_BYTES:].view(self.dtype).float().mul_(scale)


def _exponent(values: Tensor) -> int:
    """The least e with 2**e above all finite magnitudes; TOP where all are 0."""
    keys = magnitude_keys(values)
    largest = int(keys.max()) if keys.numel() else 0
    if largest >= INFINITE_KEY:
        finite = keys[keys < INFINITE_KEY]
        largest = int(finite.max()) if finite.numel() else 0
    return math.frexp(key_magnitude(largest))[1] if largest else TOP


@dataclass(frozen=True)
class QsgdValues(ValueCodec):
    """A few bits per value and a scale per bucket, rounded stochastically without bias.

    Source: Alistarh et al., "QSGD" (NIPS 2017), as `qsgd_quantize` in `ops/reference.py` has it.
    """

    bits: int
    bucket_numel: int = 512

    @override
    def nbytes(self, count: int) -> int:
        return self._scales_bytes(count) + -(-count * self.bits // 8)

    @override
    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, ...]:
        """One non-finite value makes its bucket NaN."""
        codes, scales = ops.on_host().qsgd_quantize(
            values.contiguous(), self.bits, self.bucket_numel, seed
        )
        return (scales, codes)

    @override
    def decode(self, data: Tensor, count: int) -> Tensor:
        cut = self._scales_bytes(count)
        scales = data[:cut].view(torch.float32)
        return ops.on_host().qsgd_dequantize(
            data[cut:], scales, count, self.bits, self.bucket_numel
        )

    def _scales_bytes(self, count: int) -> int:
        return SCALE_BYTES * -(-count // self.bucket_numel)


VALUE_CODECS: dict[str, ValueCodec] = {
    "float32": Float32Values(),
    "float16": HalfValues(torch.float16),
    "bfloat16": HalfValues(torch.bfloat16),
    "qsgd8": QsgdValues(8),
    "qsgd4": QsgdValues(4),
    "qsgd2": QsgdValues(2),
}
"""Forms of values by the names under which a user asks for them."""
