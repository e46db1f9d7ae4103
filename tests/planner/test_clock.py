"""The planner on a device: what is waited for, and what a mark says, with a fake torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_sparse import Compression
from hvd_sparse.adapter.binding import Parameters
from hvd_sparse.adapter.handover import refuse_momenta
from hvd_sparse.adapter.planning import Planning
from hvd_sparse.errors import ConfigError
from hvd_sparse.methods import METHODS
from hvd_sparse.optim import MomentumCorrectedSGD
from hvd_sparse.planner import measure
from hvd_sparse.planner.costs import place_of
from hvd_sparse.planner.measure import CudaClock, DeviceClock, clock_of
from hvd_sparse.planner.planner import device_name
from hvd_sparse.transports import Transport, run_ranks

DEVICE = torch.device("cuda", 0)


class Device:
    """A device whose time is set by the test; it counts who waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.stream = 0.0, object()
        self.waits: list[object] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.at_ms = -1.0

            def record(self, stream: object) -> None:
                assert stream is device.stream
                self.at_ms = device.now_ms

            def synchronize(self) -> None:
                device.waits.append(self)

            def elapsed_time(self, other: Event) -> float:
                return other.at_ms - self.at_ms

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(torch.cuda, "synchronize", self.waits.append)


def test_a_mark_is_an_event_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    clock = clock_of(DEVICE)
    assert isinstance(clock, CudaClock)
    first = clock.mark()
    device.now_ms = 250.0
    last = clock.mark()
    assert device.waits == []
    assert clock.seconds(first, last) == 0.25
    assert device.waits == [first, last]
    clock.wait()
    assert device.waits[2:] == [DEVICE]
    assert type(clock_of(torch.device("cpu"))) is DeviceClock


class Trying:
    """A planner in a trial of three steps."""

    is_trying, steps_to_review, timed_steps, outcome = True, 3, 3, None

    def __init__(self) -> None:
        self.ready: list[dict[str, float]] = []
        self.last_s: list[list[float]] = []

    def decide(self, specs: Any, world: Any) -> None:
        assert world.device == DEVICE

    def review(self, specs: Any, ready_s: dict[str, float], timed: Any, transport: Any) -> bool:
        self.ready.append(ready_s)
        self.last_s.append(timed[:, 2].tolist())
        self.is_trying, self.steps_to_review, self.timed_steps = False, 500, 8
        return False


def test_gradients_are_ready_when_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the median step. And one of a trial begins when the device is done; no other waits."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    device, planner = Device(monkeypatch), Trying()
    changes: list[object] = []
    made: Any = Planning
    planning = made(
        planner,
        SimpleNamespace(compressed_steps=0, tell_tried=changes.append),
        changes.append,
        specs=[],
        world=SimpleNamespace(transport=None, device=DEVICE),
    )
    for step, first_ms in enumerate((35.0, 95.0, 30.0)):
        for name, at_ms in (("last", 5.0), ("first", first_ms)):
            device.now_ms = at_ms
            planning.arrived(name)
            planning.returned()
        assert device.waits == [DEVICE] * step
        if planning.begin_step():
            planning.review()
    assert device.waits[:3] == [DEVICE] * 3
    assert planner.ready == [{"last": 0.0, "first": 0.03}]
    assert planner.last_s == [[0.03, 0.09, 0.025]]
    before = len(device.waits)
    for _ in range(3):
        planning.arrived("last")
        planning.begin_step()
    assert len(device.waits) == before
    assert changes == []


def test_every_phase_is_timed_until_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    class Counting(DeviceClock):
        def wait(self) -> None:
            waits.append(1)

    monkeypatch.setattr(measure, "clock_of", lambda device: Counting())
    monkeypatch.setattr(measure, "NUMELS", (256, 512))
    method = METHODS["topk"](density=0.1).make()

    def worker(transport: Transport) -> None:
        place = place_of("local", 1, 1)
        measure.measure_profile(transport, lambda tensor: None, {method.id: method}, place)

    run_ranks(1, worker)
    steps = 2 * (measure.WARMUP_STEPS + measure.TIMED_STEPS)
    assert len(waits) == steps * 2 + steps * 4  # around a dense allreduce, around three phases


def test_a_device_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_name(torch.device("cpu")) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert device_name(DEVICE) == "NVIDIA H200"


def test_momentum_needs_an_optimizer_that_has_it_for_dense_tensors() -> None:
    named = [("w", torch.nn.Parameter(torch.zeros(3)))]
    weights, parameters = [p for _, p in named], Parameters(named)
    plain, ours = torch.optim.SGD(weights, 0.1), MomentumCorrectedSGD(weights, 0.1, 0.9)
    without, planned = (
        Compression.from_policy(
            {"version": 1, "rules": [{"compress": "auto", "compressor": "topk", **options}]}, named
        ).method
        for options in ({}, {"momentum": 0.9})
    )
    refuse_momenta(plain, parameters, without, 0)
    refuse_momenta(ours, parameters, planned, 0)
    with pytest.raises(ConfigError, match=r"momentum=0.9 needs hvd_sparse.MomentumCorrectedSGD"):
        refuse_momenta(plain, parameters, planned, 0)
