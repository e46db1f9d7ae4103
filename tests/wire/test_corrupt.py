"""A message that was damaged, or is none at all, is refused by name or read as something sound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_sparse.errors import MessageError
from hvd_sparse.streams import Part
from hvd_sparse.wire import WIRES, PlainWire, Wire
from hvd_sparse.wire.compact import CompactWire
from hvd_sparse.wire.values import flat_message

EVERY_WIRE: dict[str, Wire] = {
    **WIRES,
    "gap, dense qsgd2": CompactWire("float32", "gap", dense_values="qsgd2"),
    "float64 rows": PlainWire(torch.float64, (3,)),
    "int64": PlainWire(torch.int64),
}
MOST_GROWTH = 512 + 16
"""What a byte of a message may become: the width of 128 consecutive indices, four bytes each; or
values of two bits."""


class Allocations(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.most_bytes = max(self.most_bytes, result.nbytes)
        return result


def aligned(message: bytes) -> Tensor:
    """A message as a transport delivers it."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else no_bytes()


def no_bytes() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def message_of(wire: Wire, places: list[int], span: tuple[int, int], is_dense: bool) -> bytes:
    start, stop = span
    indices = torch.tensor([start + place for place in places], dtype=torch.int32)
    block = wire.block if isinstance(wire, PlainWire) else ()
    dtype = wire.dtype if isinstance(wire, PlainWire) else torch.float32
    values = torch.arange(1, indices.numel() * max(1, sum(block)) + 1).to(dtype)
    part = Part(indices, values.view(-1, *block), start, stop)
    return flat_message(wire.encode(part.to_dense() if is_dense else part, 1)).numpy().tobytes()


def read_or_refused(wire: Wire, message: bytes, start: int, stop: int) -> Part | None:
    """Reads a message; checks what comes of it, and what it took."""
    allocations = Allocations()
    tensor = aligned(message)
    try:
        with allocations:
            part = wire.decode(tensor, start, stop)
    except MessageError:
        return None
    finally:
        assert allocations.most_bytes <= MOST_GROWTH * len(message) + 64
    block = wire.block if isinstance(wire, PlainWire) else ()
    assert (part.start, part.stop) == (start, stop)
    assert part.values.shape == (part.nnz, *block)
    assert part.values.is_contiguous()
    if part.indices is None:
        assert part.nnz == stop - start
        return part
    assert part.indices.dtype == torch.int32
    assert part.indices.is_contiguous()
    assert_ascending(part.indices, start, stop)
    assert part.indices.numel() == part.nnz
    return part


def assert_ascending(indices: Tensor, start: int, stop: int) -> None:
    assert indices.dim() == 1
    bounded = torch.cat([torch.tensor([start - 1]), indices.long(), torch.tensor([stop])])
    assert bool((bounded.diff() > 0).all())


SPANS = st.sampled_from([(0, 60), (1000, 1060), (2**31 - 61, 2**31 - 1)])
PLACES = st.sets(st.integers(0, 59), max_size=60).map(sorted)


@pytest.mark.parametrize("name", EVERY_WIRE)
@settings(deadline=None, max_examples=25)
@given(st.data(), PLACES, SPANS, st.booleans())
def test_damaged_messages(
    name: str, data: st.DataObject, places: list[int], span: tuple[int, int], is_dense: bool
) -> None:
    wire = EVERY_WIRE[name]
    message = bytearray(message_of(wire, places, span, is_dense))
    whole = read_or_refused(wire, bytes(message), *span)
    assert whole is not None
    assert whole.indices is None or (whole.indices - span[0]).tolist() == places
    for bit in data.draw(st.lists(st.integers(0, 8 * len(message) - 1), max_size=8)):
        message[bit // 8] ^= 1 << bit % 8
    cut = data.draw(st.integers(0, len(message)))
    tail = data.draw(st.binary(max_size=8))
    for damaged in (message, message[:cut], message + tail, message[:cut] + tail):
        read_or_refused(wire, bytes(damaged), *span)


@pytest.mark.parametrize("name", EVERY_WIRE)
@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([-(2**63), -2, -1, 0, 1, 5, 60, 61, 2**20, 2**31 - 1, 2**40, 2**61, 2**63 - 1]),
    st.binary(max_size=300),
    st.sampled_from([(0, 60), (0, 0), (0, 2**31 - 1), (100, 2**31 - 1)]),
)
def test_messages_of_anything(name: str, count: int, body: bytes, span: tuple[int, int]) -> None:
    """A count that is not that of the body must not even be made room for."""
    wire = EVERY_WIRE[name]
    read_or_refused(wire, body, *span)
    read_or_refused(wire, count.to_bytes(8, "little", signed=True) + body, *span)


@pytest.mark.parametrize("name", EVERY_WIRE)
@settings(deadline=None, max_examples=25)
@given(
    PLACES,
    st.lists(st.integers(0, 8 * 300), max_size=8),
    st.integers(0, 300),
    st.binary(max_size=40),
    st.sampled_from([60, 2**31 - 1]),
)
def test_damaged_indices(
    name: str, places: list[int], bits: list[int], cut: int, tail: bytes, numel: int
) -> None:
    wire = EVERY_WIRE[name]
    indices = torch.tensor(places, dtype=torch.int32)
    message = bytearray(flat_message(wire.encode_indices(indices, numel)).numpy().tobytes())
    assert wire.decode_indices(aligned(bytes(message)), numel).tolist() == places
    for bit in bits:
        if bit < 8 * len(message):
            message[bit // 8] ^= 1 << bit % 8
    for damaged in (bytes(message), bytes(message[:cut]), bytes(message[:cut]) + tail, tail):
        allocations = Allocations()
        tensor = aligned(damaged)
        try:
            with allocations:
                read = wire.decode_indices(tensor, numel)
        except MessageError:
            pass
        else:
            assert read.dtype == torch.int32
            assert_ascending(read, 0, numel)
        assert allocations.most_bytes <= MOST_GROWTH * len(damaged) + 64


@pytest.mark.parametrize("name", ["float32", "float16+gap", "qsgd4"])
def test_the_error_says_what_is_wrong(name: str) -> None:
    wire = EVERY_WIRE[name]
    message = message_of(wire, [1, 5, 7], (0, 60), is_dense=False)
    huge = (10**9).to_bytes(8, "little") + message[8:]
    with pytest.raises(MessageError, match=r"1000000000 entries in \[0, 60\)"):
        wire.decode(aligned(huge), 0, 60)
    with pytest.raises(MessageError, match="bytes"):
        wire.decode(aligned(message[:-1]), 0, 60)
    with pytest.raises(MessageError, match="at least 8 bytes, got 3"):
        wire.decode(aligned(message[:3]), 0, 60)
    with pytest.raises(MessageError, match="ascending"):
        wire.decode(aligned(message), 0, 7)
