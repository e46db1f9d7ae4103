"""What a step costs beside its messages: torch's operations, microseconds each on few entries."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_sparse import ops
from hvd_sparse.collectives.global_threshold import (
    count_that_passes,
    counts_at_levels,
    level_keys,
    threshold_passed_by,
)
from hvd_sparse.collectives.registry import BY_NAME
from hvd_sparse.lab.simulator import SyntheticStreams
from hvd_sparse.magnitude import key_magnitude
from hvd_sparse.streams import Part
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.wire import WIRES, CompactWire, Packer
from hvd_sparse.wire.values import flat_message

NUMEL, K = 147_000, 147
STEPS = 6
MOST = {
    ("oktopk", "float32"): 75,
    ("oktopk", "float16+gap"): 125,
    ("topk_allgather", "float32"): 20,
    ("topk_allgather", "float16+gap"): 45,
}
"""Of a rank at P = 2, in a step that evaluates nothing anew. Slices count, and so do buffers."""


class Operations(TorchDispatchMode):
    """Counts what this thread asks of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "wire"), MOST)
def test_a_step_of_few_entries_takes_few_operations(name: str, wire: str) -> None:
    def worker(transport: Transport) -> Counter[str]:
        collective = BY_NAME[name].collective(transport, NUMEL, K, wire=WIRES[wire])
        for step in range(STEPS):
            stream = SyntheticStreams().stream(transport.rank, step, NUMEL, K)
            with Operations() as operations:
                collective.reduce(stream)
        return operations.calls

    for calls in run_ranks(2, worker, timeout_s=60.0):
        assert 10 < calls.total() <= MOST[name, wire], calls


@pytest.mark.parametrize("name", [name for name in WIRES if name.endswith("+gap")])
def test_who_encodes_does_not_decode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What receivers will read comes of the same pass, the same bits: also what is not finite."""
    values = torch.tensor([1.5, -3e-39, float("inf"), float("nan"), -0.0, 3e38] * 300)
    part = Part(torch.arange(0, 3 * values.numel(), 3, dtype=torch.int32), values, 0, 6000)
    wire = WIRES[name]
    expected = wire.decode(flat_message(wire.encode(part, 7)), 0, 6000)
    monkeypatch.delattr(CompactWire, "_read_gaps")
    payload, read = wire.encode_and_read(part, 7)
    for ours, theirs in zip(payload, wire.encode(part, 7), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(read.values.view(torch.int32), expected.values.view(torch.int32))
    packer = Packer(wire, 0, 7)
    assert packer.pack(part)[1].values.shape == values.shape
    assert (packer.lost(6000).nnz == 0) == wire.is_lossless


@pytest.mark.parametrize("count", [0, 1, 5000])
@pytest.mark.parametrize("threshold", [0.0, 1e-40, 1e-38, 0.7, 1e38])
def test_counts_at_levels_are_those_at_their_thresholds(count: int, threshold: float) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    if count > 1:
        values[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    counts = counts_at_levels(values, threshold)
    indices = torch.arange(count, dtype=torch.int32)
    assert counts.dtype == torch.int32
    for passing, key in zip(counts.tolist(), level_keys(threshold).tolist(), strict=True):
        at = key_magnitude(max(0, key))
        assert passing == ops.on(ops.CPU).threshold_stream(indices, values, at)[0].numel()


@pytest.mark.parametrize("threshold", [0.0, 1e-38, 0.7, 3.0])
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_a_threshold_is_found_between_its_levels(count: int, threshold: float) -> None:
    """As many pass it as are wanted, as near as values lie evenly between two levels."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    counts = counts_at_levels(values, threshold).numpy()
    for wanted in (0.5, 3.0, 100.0, 2500.0, 1e4):
        found, expected = threshold_passed_by(wanted, counts, threshold)
        passing = int((values.abs() >= found).sum())
        if counts[0] <= wanted:  # all that levels reach down to
            assert expected == counts[0]
        elif counts[-1] > wanted:
            assert expected == counts[-1]
        else:
            assert expected == pytest.approx(wanted, rel=1e-3)
            level = next(i for i, count in enumerate(counts) if count <= wanted)
            assert counts[level] <= passing <= counts[level - 1]
        again = count_that_passes(found, counts, threshold)
        assert again == pytest.approx(expected, rel=1e-2, abs=1.0)
    assert count_that_passes(1e30, counts, threshold) == 0.0
