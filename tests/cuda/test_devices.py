"""Selectors, collectives and the engine give the same bits on every device as on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives import OkTopk, TopkAllgather
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.memories import ErrorFeedback
from hvd_sparse.selectors import ExactTopK, ReusedThreshold
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from tests.devices import ON_CUDA
from tests.ops.cases import assert_same, generator, stream

DEVICES = ("cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if ON_CUDA else []))
SHAPES = {"a": (70, 60), "b": (7,), "c": (200,), "d": (40, 10)}
STEPS = 6

pytestmark = pytest.mark.parametrize("device", DEVICES)


def test_streams_cross(device: str) -> None:
    indices, values = stream(1000, 77, 1)
    there = SparseStream(indices, values, 1000).to(device)
    assert there.indices.device.type == device
    assert_same(there.to("cpu").payload(), (indices, values))


@pytest.mark.parametrize("selector", [ExactTopK, partial(ReusedThreshold, 3)])
def test_selectors(device: str, selector: type[ExactTopK]) -> None:
    numel, k = 50_000, 500
    kept = {}
    for place in ("cpu", device):
        memory, chosen = ErrorFeedback(numel, torch.device(place)), selector()
        random, taken = generator(), []
        for _ in range(STEPS):
            gradient = torch.randn(numel, generator=random).to(place)
            stream = chosen.select(memory.accumulate([gradient], k), k)
            taken.append(stream.to("cpu").payload())
        kept[place] = (*taken, memory.residual.cpu())
    assert_same(kept[device], kept["cpu"])


def rank_of_engine(transport: Transport, device: str, method: Method) -> list[Tensor]:
    engine = Engine(method)
    engine.connect(transport)
    engine.scale = 0.5
    random, results = generator(transport.rank), []
    for _ in range(STEPS):
        gradients = {
            name: torch.randn(shape, generator=random).to(device) for name, shape in SHAPES.items()
        }
        for name, gradient in gradients.items():
            engine.submit(TensorSpec(name, SHAPES[name], str(gradient.dtype)), gradient)
        engine.scale = 0.5
        results += [engine.result(name).cpu() for name in SHAPES]
    engine.disconnect()
    return results


@pytest.mark.parametrize("collective", [TopkAllgather, OkTopk])
def test_engine(device: str, collective: type[OkTopk]) -> None:
    method = Method(
        density=0.05,
        bucket_numel=3000,
        selector=partial(ReusedThreshold, 4),
        collective=collective,
        name="test",
    )
    outcomes = {
        place: run_ranks(3, partial(rank_of_engine, device=place, method=method), timeout_s=60)
        for place in ("cpu", device)
    }
    for results in outcomes[device]:
        assert_same(results, outcomes["cpu"][0])
