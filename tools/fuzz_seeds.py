"""First inputs of the fuzz targets: what `csrc/fuzz` reads real encodings from."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hvd_sparse import ops

MOST_MOVES = 255
FAR = 253
"""The move of a step that takes four bytes (`TakeIndices` in csrc/fuzz/fuzz.h)."""
ISAS = 3


def indices_of(numel: int, nnz: int, seed: int) -> Tensor:
    """int32 `(nnz,)`, ascending in `[0, numel)`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(numel, generator=generator)[:nnz].sort().values.int()


def moves(indices: Tensor) -> bytes:
    """Ascending indices as the targets read them: a count of moves, then each move."""
    steps = torch.diff(indices.long(), prepend=torch.tensor([-1])).tolist()[:MOST_MOVES]
    coded = (bytes([step - 1]) if step <= FAR else struct.pack("<Bi", FAR, step) for step in steps)
    return bytes([len(steps)]) + b"".join(coded)


SHAPES = [(1, 1), (300, 300), (5000, 40), (100_000, 200), (2**31 - 1, 0)]
"""Lengths, and numbers of entries."""


def streams() -> Iterator[tuple[int, Tensor]]:
    """Lengths of vectors, and indices in them."""
    for seed, (numel, nnz) in enumerate(SHAPES):
        places = indices_of(numel, nnz, seed) if nnz else torch.tensor([], dtype=torch.int32)
        yield numel, places


def gap() -> Iterator[bytes]:
    """Codes of `ops.gap_encode`, and indices to be encoded."""
    for numel, indices in streams():
        for start in (0, 7):
            code = ops.gap_encode(indices + start, start).numpy().tobytes()
            yield struct.pack("<BIIIB", 0, indices.numel(), start, numel, start % 8) + code
        yield struct.pack("<BI", 1, 0) + moves(indices)


def qsgd() -> Iterator[bytes]:
    """Codes and scales of `ops.qsgd_quantize`, and values to be rounded."""
    x = torch.randn(700, generator=torch.Generator().manual_seed(0))
    for isa in range(ISAS):
        for bits_code, bits in enumerate((2, 4, 8)):
            for bucket_code, bucket_numel in enumerate((512, 1024)):
                head = struct.pack("<BBBBBBH", isa, 0, isa, bits_code, bucket_code, 0, x.numel())
                codes, scales = ops.qsgd_quantize(x, bits, bucket_numel, 5)
                yield head + scales.numpy().tobytes() + codes.numpy().tobytes()
                head = struct.pack("<BBBBBBH", isa, 1, isa, bits_code, bucket_code, 0, x.numel())
                yield head + struct.pack("<QI", 5, 5) + x.numpy().tobytes()


def merge() -> Iterator[bytes]:
    """One stream and more of them over the same vector."""
    for numel, nnz in SHAPES:
        for count in (1, 2, 3, 6):
            lists = [moves(indices_of(min(numel, 10**6), nnz, seed)) for seed in range(count)]
            body = b"".join(struct.pack("<H", seed) + list_ for seed, list_ in enumerate(lists))
            yield struct.pack("<BBI", count - 1, count - 1, numel) + body


def filter_() -> Iterator[bytes]:
    """Pairs of streams, of like and of unlike lengths."""
    for isa in range(ISAS):
        for (_, one), (_, other) in zip(streams(), [*streams()][::-1], strict=True):
            yield struct.pack("<BII", isa, 0x3F000000, 3) + moves(one) + moves(other)


def scatter() -> Iterator[bytes]:
    """Every function and type, on short vectors and long ones, and on empty ones: these have no
    address to fetch ahead from."""
    for isa in range(ISAS):
        for is_long, what, numel in ((0, 0, 4001), (0, 1, 4001), (255, 0, 4001), (0, 1, 0)):
            indices = moves(indices_of(4000, 100, isa))
            head = struct.pack("<BBBBHI", isa, what, isa, is_long, numel, 9)
            for choice in range(3):
                yield head + indices + struct.pack("<BB", choice, 5)


SEEDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "filter": filter_,
    "gap": gap,
    "merge": merge,
    "qsgd": qsgd,
    "scatter": scatter,
}
"""First inputs by the names of the targets."""
