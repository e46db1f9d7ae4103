"""What crosses to a bucket's lane and back, and how seldom: the streams here only count."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hvd_sparse.engine import clipping
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.bucketing import TensorSpec
from hvd_sparse.engine.lane import DeviceLane
from hvd_sparse.engine.stats import StepStats
from hvd_sparse.errors import UnsupportedError
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

    def wait_stream(self, other: object) -> None:
        calls["wait_stream"] += 1

    def record_event(self, event: FakeEvent) -> FakeEvent:
        event.record(self)
        return event


class FakeEvent:
    def __init__(self, *, enable_timing: bool = False, blocking: bool) -> None:
        assert blocking, "a wait that spins takes a core"

    def record(self, stream: object = None) -> None:
        calls["record"] += 1
        self.stream = stream

    def elapsed_time(self, other: FakeEvent) -> float:
        return 2.0

    def synchronize(self) -> None:
        calls["synchronize"] += 1


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The stream that the training thread issues to: the list's last one."""
    current = [FakeStream(DEVICE)]
    calls.clear()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: calls["captures"] > 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    drop = SimpleNamespace(empty_host_cache=lambda: calls.update(["dropped"]))
    monkeypatch.setattr(torch, "accelerator", drop, raising=False)
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
    assert calls["record"] == 0
    assert bucket.put(59, torch.zeros(3))
    assert calls["record"] == 1
    assert bucket.put(4, torch.ones(3))  # another gradient in the place of one that is there
    assert calls["record"] == 2
    for waits in (2, 4):  # any thread that works in the lane does so
        bucket.lane.work()
        assert calls["synchronize"] == waits
    bucket.lane.hand_back()
    bucket.lane.work()
    assert calls.pop("synchronize") == 4


def test_a_capture_is_refused(training: list[FakeStream]) -> None:
    bucket = new_bucket(1)
    calls["captures"] = 1
    with pytest.raises(UnsupportedError, match="capture the forward pass alone"):
        bucket.put(0, torch.zeros(3))


def test_every_stream_that_gave_a_gradient_is_waited_for(training: list[FakeStream]) -> None:
    bucket = new_bucket(3)
    bucket.put(0, torch.zeros(3))
    training.append(FakeStream(DEVICE))
    bucket.put(1, torch.zeros(3))
    bucket.put(2, torch.zeros(3))
    stream = bucket.lane._stream
    assert isinstance(stream, FakeStream)
    assert [given.stream for given in bucket.lane._given] == training
    assert stream.priority < 0


def test_clipping_waits_for_the_gradients_of_all_buckets(
    training: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets, waits = [new_bucket(1), new_bucket(1)], []
    for bucket in buckets:
        bucket.put(0, torch.zeros(3))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(clipping, "norm_of", lambda *_: waits.append(calls["synchronize"]) or 0.0)
    clipping.StepClipping(buckets, 1).apply(buckets[0], 1.0)
    assert waits == [1, 2]


def test_entries_are_waited_for_once_and_stay_on_the_device(training: list[FakeStream]) -> None:
    place = DeviceLane(DEVICE)
    there = SparseStream(*stream(1000, 100, 1), 1000)
    for to_host in (True, False):
        place.begin()
        place.send(there, to_host=to_host)
        assert calls["synchronize"] == 0
        stats = StepStats(accumulate_select_s=5.0)
        here = place.landed(there, stats)
        assert (here.twin is there) if to_host else (here is there)
        assert_same((*here.payload(), here.numel), (*there.payload(), 1000))
        assert calls.pop("synchronize") == 1
        assert stats.accumulate_select_s == 0.002  # the device's time, not what the host waited


def test_pinned_memory_is_dropped_after_a_warm_up(training: list[FakeStream]) -> None:
    place = DeviceLane(DEVICE)
    dropped = []
    for k in (1000, 900, 250, 240, 260, 10, 10):
        place.shrink(k)
        dropped.append(calls.pop("dropped", 0))
    assert dropped == [0, 0, 1, 0, 0, 1, 0]


def test_on_a_cpu_nothing_is_copied() -> None:
    place, there = DeviceLane(torch.device("cpu")), SparseStream.empty(5)
    place.send(there, to_host=True)
    stats = StepStats(accumulate_select_s=5.0)
    assert place.landed(there, stats) is there
    assert stats.accumulate_select_s == 5.0
