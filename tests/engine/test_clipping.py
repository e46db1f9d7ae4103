"""Clipping by the norm of all gradients of a rank, in units of what the optimizer sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.engine import Choice, Engine, TensorSpec, WithDense
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.clipping import StepClipping
from hvd_sparse.engine.exchange import reduce, select
from hvd_sparse.errors import ConfigError
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import LocalWorld, Transport, run_ranks

SHAPES = {"a": (40, 10), "b": (300,), "c": (20, 30), "d": (7,)}


def method_of(clip_norm: float | None, **arguments: Any) -> Any:
    arguments = {"density": 1.0, "clip_norm": clip_norm, **arguments}
    return METHODS["topk"](**arguments).make()


def unit_gradients(rank: int) -> dict[str, Tensor]:
    """Of norm 1 together; those of different ranks are at right angles, or nearly so."""
    generator = torch.Generator().manual_seed(rank)
    gradients = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    norm = norm_of(gradients)
    return {name: gradient / norm for name, gradient in gradients.items()}


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.cat([tensor.double().view(-1) for tensor in tensors.values()]).norm())


def averages(
    world_size: int, method: Any, length: float = 1.0, unit: float = 1.0, steps: int = 2
) -> dict[str, Tensor]:
    """What the optimizer sees of gradients of that length, under a loss scale."""

    def worker(transport: Transport) -> dict[str, Tensor]:
        engine = Engine(method)
        engine.connect(transport)
        engine.unit = unit
        results = {}
        for _ in range(steps):
            for name, gradient in unit_gradients(transport.rank).items():
                spec = TensorSpec(name, SHAPES[name], "torch.float32")
                engine.submit(spec, gradient * (length * unit))
            engine.scale = 1 / world_size
            results = {name: engine.result(name) / unit for name in SHAPES}
            engine.settle()
        engine.disconnect()
        return results

    ranks = run_ranks(world_size, worker, timeout_s=60.0)
    return ranks[0]


def test_an_average_that_is_short_enough_is_left_alone() -> None:
    plain, clipped = (averages(8, method_of(limit)) for limit in (None, 1.0))
    assert norm_of(plain) == pytest.approx(8**-0.5, rel=0.1)
    for name in SHAPES:
        assert torch.equal(plain[name], clipped[name])


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_the_limit_is_on_what_the_optimizer_sees(world_size: int) -> None:
    """Gradients at right angles, of any length: their average has just the limit's norm."""
    plain = averages(world_size, method_of(None))
    for limit in (1.0, 1e-3):
        clipped = averages(world_size, method_of(limit), length=100.0)
        assert norm_of(clipped) == pytest.approx(limit, rel=0.1)
        ratio = norm_of(clipped) / norm_of(plain)
        for name in SHAPES:
            torch.testing.assert_close(clipped[name], plain[name] * ratio)


@pytest.mark.parametrize("bucket_numel", [1, 400, 10_000])
@pytest.mark.parametrize("unit", [1.0, 2.0**12])
def test_neither_buckets_nor_the_loss_scale_change_it(bucket_numel: int, unit: float) -> None:
    expected = averages(2, method_of(0.5), length=3.0)
    other = averages(2, method_of(0.5, bucket_numel=bucket_numel), length=3.0, unit=unit)
    assert norm_of(expected) == pytest.approx(0.5, rel=0.1)
    for name in SHAPES:
        torch.testing.assert_close(other[name], expected[name], rtol=1e-5, atol=1e-7)


def test_dense_tensors_count_and_are_clipped() -> None:
    class OnlyA:
        description = "only a"
        clip_norm = 0.5

        def choice_of(self, spec: TensorSpec) -> Choice:
            return Choice(method_of(0.5) if spec.name == "a" else None)

    dense = method_of(0.5, bucket_numel=10_000)
    expected = averages(2, method_of(0.5), length=3.0)
    mixed = averages(2, WithDense(OnlyA(), dense, 0), length=3.0)
    small = averages(2, WithDense(method_of(0.5, bucket_numel=5), dense, 350), length=3.0)
    for name in SHAPES:
        torch.testing.assert_close(mixed[name], expected[name], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(small[name], expected[name], rtol=1e-5, atol=1e-7)


def test_every_type_counts_and_what_is_not_finite_stays() -> None:
    transport = LocalWorld(1).transport(0)
    gradients = [torch.full((8,), 3.0), torch.full((8,), -3.0, dtype=torch.float16)]
    buckets = []
    for number, gradient in enumerate(gradients):
        spec = TensorSpec(str(number), (8,), str(gradient.dtype))
        buckets.append(Bucket([spec], method_of(6.0), transport, torch.device("cpu")))
        buckets[-1].put(0, gradient)
    clipping = StepClipping(buckets, 4)  # 12 long together; 3 are allowed
    for bucket in buckets:
        clipping.apply(bucket, 1.0)
    torch.testing.assert_close(gradients[0], torch.full((8,), 0.75))
    assert torch.equal(gradients[1].float(), torch.full((8,), -0.75))
    for bucket in buckets:
        select(bucket)
        reduce(bucket)
        bucket.close_step()
    spoiled = [torch.full((8,), 3.0), torch.full((8,), 3.0, dtype=torch.float16)]
    spoiled[1][3] = float("nan")
    for bucket, gradient in zip(buckets, spoiled, strict=True):
        bucket.put(0, gradient)
    for bucket in buckets:
        clipping.apply(bucket, 1.0)
    assert torch.equal(spoiled[0], torch.full((8,), 3.0))


def test_a_norm_whose_square_overflows_is_clipped() -> None:
    gradient = torch.tensor([3e25, 4e25])
    spec = TensorSpec("w", (2,), "torch.float32")
    bucket = Bucket([spec], method_of(1.0), LocalWorld(1).transport(0), torch.device("cpu"))
    bucket.put(0, gradient)
    StepClipping([bucket], 1).apply(bucket, 1.0)
    torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]))


def test_policies_have_one_limit() -> None:
    rules: list[dict[str, Any]] = [
        {"match": {"ndim": 1}, "compressor": "topk", "clip_norm": 1.0},
        {"match": {"ndim": 2}, "compressor": "topk"},
    ]
    load_policy = pytest.importorskip("hvd_sparse.policy").load_policy  # pydantic may be missing
    with pytest.raises(ConfigError, match=r"rules\[1\].*the same in all rules, got 1.0 and None"):
        load_policy({"version": 1, "rules": rules})
    load_policy({"version": 1, "defaults": {"clip_norm": 1.0}, "rules": rules})
    rules[0]["compress"] = "auto"
    with pytest.raises(ConfigError, match=r"rules\[0\].compress: auto is not for clip_norm"):
        load_policy({"version": 1, "rules": rules})
