"""What crosses to a bucket's lane and back, and how seldom: the streams here only count."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hvd_sparse.engine import lane
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.bucketing import TensorSpec
from hvd_sparse.engine.lane import DeviceLane
from hvd_sparse.methods import METHODS
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import run_ranks
from tests.ops.cases import assert_same, stream

DEVICE = torch.device("cuda", 0)
calls: Counter[str] = Counter()


class FakeStream:
    """As much of a stream as a lane uses."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.waited_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        calls["wait_stream"] += 1
        self.waited_for.append(other)


class FakeEvent:
    def record(self) -> None:
        calls["record"] += 1

    def synchronize(self) -> None:
        calls["synchronize"] += 1


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The stream that the training thread issues to: the list's last one."""
    current = [FakeStream(DEVICE)]
    calls.clear()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])

    def pageable(nnz: int) -> SparseStream:
        calls["allocated"] += 1
        return SparseStream(torch.empty(nnz, dtype=torch.int32), torch.empty(nnz), 0)

    monkeypatch.setattr(lane, "_pinned", pageable)
    return current


def new_bucket(tensors: int) -> Bucket:
    specs = [TensorSpec(f"t{i}", (3,), "torch.float32") for i in range(tensors)]
    method = METHODS["topk"](density=0.1).make()
    cpu = torch.device("cpu")
    [bucket] = run_ranks(1, lambda transport: Bucket(specs, method, transport, cpu))
    bucket.lane = DeviceLane(DEVICE)
    return bucket


def test_a_bucket_is_handed_over_once(training: list[FakeStream]) -> None:
    bucket = new_bucket(60)
    for place in range(59):
        assert not bucket.put(place, torch.zeros(3))
    assert calls["wait_stream"] == 0
    assert bucket.put(59, torch.zeros(3))
    assert calls["wait_stream"] == 1
    assert bucket.put(4, torch.ones(3))  # another gradient in the place of one that is there
    assert calls["wait_stream"] == 2


def test_every_stream_that_gave_a_gradient_is_waited_for(training: list[FakeStream]) -> None:
    bucket = new_bucket(3)
    bucket.put(0, torch.zeros(3))
    training.append(FakeStream(DEVICE))
    bucket.put(1, torch.zeros(3))
    bucket.put(2, torch.zeros(3))
    stream = bucket.lane._stream
    assert isinstance(stream, FakeStream)
    assert stream.waited_for == training
    assert stream.priority < 0


def test_entries_land_in_memory_that_stays(training: list[FakeStream]) -> None:
    place = DeviceLane(DEVICE)
    for nnz in (100, 70, 0, 128, 129, 5):
        indices, values = stream(1000, nnz, nnz)
        there = SparseStream(indices, values, 1000)
        calls["synchronize"] = 0
        place.send(there)
        assert calls["synchronize"] == 0
        here = place.landed(there)
        assert_same((*here.payload(), here.numel), (indices, values, 1000))
        assert calls["synchronize"] == 1
    assert calls["allocated"] == 2


def test_on_a_cpu_nothing_is_copied() -> None:
    place, there = DeviceLane(torch.device("cpu")), SparseStream.empty(5)
    place.send(there)
    assert place.landed(there) is there
