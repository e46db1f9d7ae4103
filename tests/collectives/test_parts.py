"""The algebra of parts, and wires on any of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_sparse.streams import (
    OPERATIONS,
    Operation,
    Part,
    SparseStream,
    combine,
    join,
    uniform_regions,
)
from hvd_sparse.wire import WIRES, CompactWire, Packer, PlainWire
from hvd_sparse.wire.values import flat_message

NUMEL = 60
WHOLE_NUMBERS = st.integers(-100, 100)
ENTRIES = st.dictionaries(st.integers(0, NUMEL - 1), WHOLE_NUMBERS, max_size=NUMEL)
OPERATION_NAMES = st.sampled_from(sorted(OPERATIONS))


def part_of(entries: dict[int, int], dtype: torch.dtype = torch.int64) -> Part:
    places = sorted(entries)
    values = torch.tensor([entries[place] for place in places], dtype=dtype)
    return Part(torch.tensor(places, dtype=torch.int32), values, 0, NUMEL)


def dense(part: Part, operation: Operation) -> Tensor:
    return part.to_dense(operation).values


@settings(deadline=None, max_examples=150)
@given(st.lists(ENTRIES, min_size=1, max_size=5), OPERATION_NAMES)
def test_combining_is_element_by_element(brought: list[dict[int, int]], name: str) -> None:
    operation = OPERATIONS[name]
    parts = [part_of(entries) for entries in brought]
    expected = dense(parts[0], operation)
    for part in parts[1:]:
        expected = operation.combine(expected, dense(part, operation))
    total = combine(parts, operation)
    assert torch.equal(dense(total, operation), expected)
    mixed = [part.to_dense(operation) if i % 2 else part for i, part in enumerate(parts)]
    assert torch.equal(dense(combine(mixed, operation), operation), expected)
    if len(parts) > 2:  # associative
        head = combine(parts[:2], operation)
        assert torch.equal(dense(combine([head, *parts[2:]], operation), operation), expected)


@settings(deadline=None, max_examples=100)
@given(ENTRIES, st.integers(1, 9), OPERATION_NAMES, st.booleans())
def test_regions_join_to_the_whole(
    entries: dict[int, int], world_size: int, name: str, settle: bool
) -> None:
    operation = OPERATIONS[name]
    part = part_of(entries)
    regions = [part.slice(*span) for span in uniform_regions(NUMEL, world_size)]
    assert sum(region.numel for region in regions) == NUMEL
    if settle:
        packer = Packer(PlainWire(torch.int64), rank=0, step=0)
        regions = [packer.settled(region, operation) for region in regions]
    whole = join(regions, operation)
    assert (whole.start, whole.stop) == (0, NUMEL)
    assert torch.equal(dense(whole, operation), dense(part, operation))


@settings(deadline=None, max_examples=100)
@given(ENTRIES, OPERATION_NAMES)
def test_the_form_is_the_smaller_one(entries: dict[int, int], name: str) -> None:
    operation = OPERATIONS[name]
    part = part_of(entries, torch.int32)
    settled = Packer(PlainWire(torch.int32), rank=0, step=0).settled(part, operation)
    assert (settled.indices is None) == (len(entries) * 8 >= NUMEL * 4)
    assert torch.equal(dense(settled, operation), dense(part, operation))
    back = part.to_dense(operation).to_sparse(operation)
    assert torch.equal(dense(back, operation), dense(part, operation))


@pytest.mark.parametrize("name", sorted(WIRES))
def test_the_form_is_the_smaller_one_on_every_wire(name: str) -> None:
    """No further than 2 % and a few bytes above the smaller of both messages, at any density."""
    numel, packer = 4096, Packer(WIRES[name], rank=0, step=0)
    for nnz in [1, 40, 400, 450, 500, 1000, 2000, 2100, 2800, 3000, 3400, 3800, numel]:
        places = torch.randperm(numel, generator=torch.Generator().manual_seed(nnz))[:nnz]
        part = Part(places.sort().values.int(), torch.ones(nnz), 0, numel)
        forms = {form: packer.pack(form(part))[0] for form in (Part.to_sparse, Part.to_dense)}
        shorter = min(flat_message(payload).numel() for payload in forms.values())
        chosen = flat_message(packer.pack(packer.settled(part))[0]).numel()
        assert chosen <= 1.02 * shorter + 16, (name, nnz)


def test_combining_leaves_a_full_part_as_it_is() -> None:
    """Its values are its dense form, too."""
    full = Part(torch.arange(8, dtype=torch.int32), torch.ones(8), 0, 8)
    other = Part(torch.tensor([3], dtype=torch.int32), torch.tensor([2.0]), 0, 8)
    assert combine([full, other]).values.tolist() == [1, 1, 1, 3, 1, 1, 1, 1]
    assert full.values.tolist() == [1.0] * 8


@pytest.mark.parametrize("nnz", [29, 30])
def test_two_parts_turn_dense_where_their_entries_might_fill_half(nnz: int) -> None:
    """(nnz1 + nnz2) · (4 + 4) >= 60 · 4, whether or not they coincide."""
    first = part_of(dict.fromkeys(range(15), 1), torch.float32)
    second = part_of(dict.fromkeys(range(nnz - 15), 1), torch.float32)
    assert (combine([first, second]).indices is None) == (nnz == 30)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.integers(0, NUMEL - 1), FLOATS), st.booleans(), st.integers(0, 9))
def test_every_wire_keeps_what_it_does_not_send(
    entries: dict[int, float], is_dense: bool, step: int
) -> None:
    """What is read plus what is lost is what was sent, and finite values stay finite."""
    places = sorted(entries)
    stream = SparseStream(
        torch.tensor(places, dtype=torch.int32), torch.tensor([entries[p] for p in places]), NUMEL
    )
    part = Part.of(stream).to_dense() if is_dense else Part.of(stream)
    largest = max(map(abs, entries.values()), default=0.0)
    for wire in [*WIRES.values(), CompactWire("float32", "gap", dense_values="qsgd2")]:
        packer = Packer(wire, 3, step)
        payload, read = packer.pack(part)
        decoded = wire.decode(flat_message(payload), 0, NUMEL)
        assert torch.equal(decoded.values.view(torch.int32), read.values.view(torch.int32))
        assert bool(read.values.isfinite().all()), wire.name
        lost = packer.lost(NUMEL)
        total = read.to_dense().values.double()
        total[lost.indices.long()] += lost.values.double()
        sent = part.to_dense().values.double()
        assert float((total - sent).abs().max()) <= 1e-7 * largest, wire.name
        if wire.is_lossless:
            assert torch.equal(read.values, part.values)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("density", [0.001, 0.02, 0.4, 1.0])
def test_messages_are_as_long_as_expected(name: str, density: float) -> None:
    numel = 200_000
    k = round(density * numel)
    generator = torch.Generator().manual_seed(k)
    places = torch.randperm(numel, generator=generator)[:k].sort().values.int()
    part = Part(places, torch.randn(k, generator=generator), 0, numel)
    expected = WIRES[name].expected_bytes(numel, k)
    for sent, bytes_each in (
        (part, expected.index_bytes + expected.value_bytes),
        (part.to_dense(), expected.dense_value_bytes),
    ):
        taken = flat_message(WIRES[name].encode(sent, 0)).numel()
        assert taken == pytest.approx(sent.nnz * bytes_each, rel=0.03, abs=32)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("places", [[], [0], [59], [0, 1, 2], [3, 17, 18, 59]])
def test_indices_alone(name: str, places: list[int]) -> None:
    indices = torch.tensor(places, dtype=torch.int32)
    message = flat_message(WIRES[name].encode_indices(indices, NUMEL))
    assert torch.equal(WIRES[name].decode_indices(message, NUMEL), indices)


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e-6, 1.0, 1e20, 3e38])
def test_float16_keeps_eleven_bits_at_any_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.rand(1000, generator=generator) + 0.1) * scale / 1.1
    part = Part(torch.arange(1000, dtype=torch.int32), values, 0, 1000)
    for name, bits in (("float16", 11), ("bfloat16+gap", 8)):
        read = WIRES[name].decode(flat_message(WIRES[name].encode(part, 0)), 0, 1000)
        relative = ((read.values - values).abs() / values).max()
        assert float(relative) <= 2.0**-bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32])
@pytest.mark.parametrize("nnz", [0, 1, 3])
def test_plain_messages_of_any_type(dtype: torch.dtype, nnz: int) -> None:
    values = torch.arange(nnz * 3).view(nnz, 3).to(dtype)
    wire = PlainWire(dtype, (3,))
    for part in (
        Part(torch.arange(nnz, dtype=torch.int32) + 10, values, 10, 20),
        Part(None, values, 10, 10 + nnz),
    ):
        read = wire.decode(flat_message(wire.encode(part, 0)), part.start, part.stop)
        assert torch.equal(read.values, part.values)
        assert (read.indices is None) == (part.indices is None)
