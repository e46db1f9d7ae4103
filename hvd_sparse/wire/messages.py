"""What a wire is, who keeps what rounding loses, and how a message is checked before it is read.

A message may have been damaged, or be one of another wire. Nothing is allocated by a count that the
message's own bytes do not bear out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from ctypes import c_int64

import torch
from torch import Tensor

from hvd_sparse.cost_model import WireBytes
from hvd_sparse.errors import MessageError
from hvd_sparse.streams import CPU, INDEX_BYTES, SUM, Operation, Part, SparseStream, sum_of

HEADER_BYTES = 8
DENSE = -1
"""The header of a dense part's message, in place of a count of entries."""
SEED_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
"""Odd constants that spread a step, a rank and a message over 64 bits."""


class Wire(ABC):
    """A form of messages. Stateless: one serves all ranks and steps.

    `name` is that in settings. If it `is_lossless`, every value arrives with the same bits.
    """

    name: str
    is_lossless: bool

    @abstractmethod
    def encode_and_read(self, part: Part, seed: int) -> tuple[tuple[Tensor, ...], Part]:
        """The message of a part, in the form that it has; and the part as its receivers read it.

        Stochastic rounding depends on a value's place and the seed, in `[0, 2**64)`.
        """

    def encode(self, part: Part, seed: int) -> tuple[Tensor, ...]:
        return self.encode_and_read(part, seed)[0]

    @abstractmethod
    def decode(self, message: Tensor, start: int, stop: int) -> Part:
        """Read a message, uint8 `(bytes,)`, 4-byte aligned, of the elements `[start, stop)`.

        Returns:
            A part with strictly ascending indices in `[start, stop)`, if it has any. It may view
            the message.

        Raises:
            MessageError: The message is not that of such a part.
        """

    @abstractmethod
    def expected_bytes(self, numel: int, k: int) -> WireBytes:
        """What k of n elements are expected to take; headers do not count."""

    def is_filled_by(self, part: Part) -> bool:
        """Whether a sparse part is expected to take no less room in a message than a dense one."""
        room = self.expected_bytes(part.numel, part.nnz)
        return part.nnz * room.entry_bytes >= part.numel * room.dense_value_bytes

    def encode_indices(self, indices: Tensor, numel: int) -> tuple[Tensor, ...]:
        """The message of indices alone: int32 ascending in `[0, numel)`."""
        del numel
        return (indices.contiguous(),)

    def decode_indices(self, message: Tensor, numel: int) -> Tensor:
        """Read the message of such indices; MessageError if it is none of theirs."""
        if message.numel() % INDEX_BYTES:
            raise MessageError(
                f"a message of wire {self.name!r} with indices must have a multiple of "
                f"{INDEX_BYTES} bytes, got {message.numel()}"
            )
        indices = message.view(torch.int32)
        check_ascending(self.name, indices, 0, numel)
        return indices


class Packer:
    """Encodes one rank's messages of one exchange, and keeps account of what rounding loses.

    Messages are on the host. A part may be packed from any device; what is read lands on one.

    The number of the exchange, `step`, seeds stochastic rounding; parts are summed on the `device`.
    """

    def __init__(self, wire: Wire, rank: int, step: int, device: torch.device = CPU) -> None:
        self.wire = wire
        self.rank = rank
        self.step = step
        self.device = device
        self._lost: list[SparseStream] = []
        self._messages = 0

    def settled(self, part: Part, operation: Operation = SUM) -> Part:
        """A part in the form that takes less room in a message; a dense one stays dense."""
        if part.indices is None or not self.wire.is_filled_by(part):
            return part
        return part.to_dense(operation)

    def pack(self, part: Part, author: int | None = None) -> tuple[tuple[Tensor, ...], Part]:
        """The message of a part, and the part as its receivers will read it, not landed.

        The `author` keeps the difference, where several ranks encode the same part after the same
        number of messages; None: this rank.
        """
        author = self.rank if author is None else author
        place = (self.step, author, self._messages)
        self._messages += 1
        seed = sum(n * factor for n, factor in zip(place, SEED_FACTORS, strict=True)) % (1 << 64)
        here = part.to(CPU)
        payload, read = self.wire.encode_and_read(here, seed)
        if read is here:
            return payload, part
        if author == self.rank:
            lost = Part(here.indices, here.values - read.values, part.start, part.stop)
            self._lost.append(lost.to_stream(part.stop))  # some entries may be zero
        return payload, read

    def land(self, part: Part) -> Part:
        """A part where it is summed."""
        return part.to(self.device)

    def read(self, message: Tensor, start: int, stop: int) -> Part:
        """What a message says of the elements `[start, stop)`, landed; see `Wire.decode`."""
        return self.land(self.wire.decode(message, start, stop))

    def read_all(
        self, messages: Iterable[Tensor], own: Part, spans: Iterable[tuple[int, int]]
    ) -> list[Part]:
        """What every rank's message says of its span; this rank's own part is there already."""
        pairs = enumerate(zip(messages, spans, strict=True))
        return [self.land(own) if r == self.rank else self.read(m, *span) for r, (m, span) in pairs]

    def lost(self, numel: int) -> SparseStream:
        """What rounding has lost so far and this rank is to keep, as one stream, landed."""
        lost = sum_of(self._lost, numel)
        return lost.to(self.device) if lost.nnz else lost


def header(count: int) -> Tensor:
    """What a message begins with: a number of entries, or `DENSE`."""
    written = torch.empty(1, dtype=torch.int64, device="cpu")
    c_int64.from_address(written.data_ptr()).value = count
    return written


def entry_count(wire: str, message: Tensor, start: int, stop: int) -> int:
    """What the header says: a number of entries that `[start, stop)` has room for, or `DENSE`."""
    if message.numel() < HEADER_BYTES:
        raise MessageError(
            f"a message of wire {wire!r} must have at least {HEADER_BYTES} bytes, "
            f"got {message.numel()}"
        )
    count = c_int64.from_address(message.data_ptr()).value
    if count != DENSE and not 0 <= count <= stop - start:
        raise MessageError(
            f"a message of wire {wire!r} claims {count} entries in [{start}, {stop})"
        )
    return count


def check_bytes(wire: str, what: str, body: Tensor, expected: int) -> None:
    """Raises `MessageError` where what follows a header has another length."""
    if body.numel() != expected:
        raise MessageError(
            f"a message of wire {wire!r} with {what} must have {expected} bytes after its header, "
            f"got {body.numel()}"
        )


def check_ascending(wire: str, indices: Tensor, start: int, stop: int) -> None:
    """Raises `MessageError` where int32 indices leave `[start, stop)` or do not ascend strictly."""
    if indices.numel() == 0:
        return
    places = indices.numpy()  # torch would share this small work among threads
    is_inside = start <= places[0] and places[-1] < stop
    if not (is_inside and (places[1:] > places[:-1]).all()):
        raise MessageError(
            f"the indices in a message of wire {wire!r} must be strictly ascending in "
            f"[{start}, {stop})"
        )
