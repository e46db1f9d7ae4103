"""What the ranks of one host do in memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def sum_vectors(out: Tensor, vectors: Sequence[Tensor]) -> None:
    """Sums vectors in the order of the list, in float32."""
    out.zero_()
    for vector in vectors:
        out.add_(vector)  # widened before it is added


def post(place: Tensor, number: int) -> None:
    """Writes a number; x86-64 keeps the order of what is written, other processors may not."""
    place.fill_(number)


def posted(places: Sequence[Tensor], number: int) -> bool:
    """Whether all places have a number of at least `number`."""
    return all(int(place) >= number for place in places)
