"""The engine over ranks in threads: order, failure, state, reports."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives import OkTopk, TopkAllgather
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.exchange import decode, reduce, select
from hvd_sparse.engine.state import EngineState
from hvd_sparse.errors import ConfigError, PlanError, TransportError
from hvd_sparse.selectors import ExactTopK, ReusedThreshold
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from hvd_sparse.wire import WIRES
from tests.devices import CPU, on_every_device

SHAPES = {"a": (30, 20), "b": (7,), "c": (200,), "d": (), "e": (40, 10), "f": (900,)}


def method(density: float = 1.0, **changes: Any) -> Method:
    arguments = {
        "density": density,
        "bucket_numel": 500,
        "selector": partial(ReusedThreshold, 4),
        "collective": partial(OkTopk, threshold_interval=3, repartition_interval=5),
        "name": f"test density={density}",
        **changes,
    }
    return Method(**arguments)


def spec(name: str, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(name, SHAPES[name], str(dtype))


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randint(-99, 100, shape, generator=generator).float()
        for name, shape in SHAPES.items()
    }


def connected(transport: Transport, chosen: Method) -> Engine:
    engine = Engine(chosen)
    engine.connect(transport)
    return engine


def step_of(
    engine: Engine,
    grads: dict[str, Tensor],
    order: list[str] | None = None,
    device: torch.device = CPU,
) -> dict[str, Tensor]:
    for name in order or list(grads):
        engine.submit(spec(name, grads[name].dtype), grads[name].to(device))
    engine.scale = engine.scale or 1.0
    return {name: engine.result(name).clone().cpu() for name in grads}


@on_every_device
def test_sums_whatever_the_order_of_arrival(device: torch.device) -> None:
    world_size = 3

    def worker(transport: Transport) -> list[dict[str, Tensor]]:
        engine = connected(transport, method())
        shuffled = random.Random(transport.rank)
        results = []
        for step in range(12):
            names = list(SHAPES)
            shuffled.shuffle(names)
            results.append(step_of(engine, gradients(transport.rank, step), names, device))
        assert len(engine.stats().buckets) > 2
        engine.disconnect()
        return results

    for results in run_ranks(world_size, worker, timeout_s=30.0):
        for step, result in enumerate(results):
            for name in SHAPES:
                total = sum(gradients(rank, step)[name] for rank in range(world_size))
                assert torch.equal(result[name], total), (step, name)


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_keep_their_type(dtype: torch.dtype, device: torch.device) -> None:
    def worker(transport: Transport) -> dict[str, Tensor]:
        engine = connected(transport, method())
        grads = {name: g.to(dtype) for name, g in gradients(transport.rank, 0).items()}
        result = step_of(engine, grads, device=device)
        engine.disconnect()
        return result

    for result in run_ranks(2, worker, timeout_s=30.0):
        for name in SHAPES:
            total = sum(gradients(rank, 0)[name].to(dtype).float() for rank in range(2))
            assert result[name].dtype == dtype
            assert torch.equal(result[name], total.to(dtype))


@on_every_device
def test_strided_and_reused_gradients(device: torch.device) -> None:
    """Gradients may be strided, and may be the very views that the last step returned."""

    def worker(transport: Transport) -> Tensor:
        engine = connected(transport, method())
        grads = {name: g.to(device) for name, g in gradients(transport.rank, 0).items()}
        grads["a"] = grads["a"].t().contiguous().t()
        assert not grads["a"].is_contiguous()
        for name in grads:
            engine.submit(spec(name), grads[name])
        engine.scale = 1.0
        views = {name: engine.result(name) for name in grads}
        again = {name: view.mul_(2) for name, view in views.items()}
        for name, gradient in again.items():
            engine.submit(spec(name), gradient)
        result = engine.result("a").clone().cpu()
        engine.disconnect()
        return result

    for result in run_ranks(2, worker, timeout_s=30.0):
        assert torch.equal(result, 4 * sum(gradients(rank, 0)["a"] for rank in range(2)))


def test_no_new_memory_of_the_buckets_size_after_the_first_steps() -> None:
    """What a step does, on the thread that is profiled: a profile sees no other."""
    numel = 1 << 20

    def worker(transport: Transport) -> int:
        big = TensorSpec("big", (numel,), "torch.float32")
        bucket = Bucket([big], method(0.001, bucket_numel=numel), transport, CPU)
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))

        def one() -> int:
            bucket.put(0, gradient)
            select(bucket)
            reduce(bucket)
            decode(bucket, 0.5, bucket.step_stats)
            bucket.close_step()
            return bucket.views[0].data_ptr()

        addresses = {one() for _ in range(3)}
        with torch.profiler.profile(profile_memory=True) as profile:
            addresses |= {one() for _ in range(3)}
        assert len(addresses) == 1
        return max(event.self_cpu_memory_usage for event in profile.events())

    [most_bytes] = run_ranks(1, worker, timeout_s=60.0)
    assert 0 < most_bytes < numel


@on_every_device
@pytest.mark.parametrize("in_place", [False, True])
def test_a_non_finite_gradient_reaches_every_rank_and_leaves_no_trace(
    in_place: bool, device: torch.device
) -> None:
    """`in_place`: gradients accumulate into views of the last result, without set_to_none."""

    def worker(transport: Transport) -> None:
        engine = connected(transport, method(0.05, bucket_numel=600))
        result: dict[str, Tensor] = {}
        for step in range(6):
            grads = gradients(transport.rank, step)
            if step == 3 and transport.rank == 1:
                grads["f"][17] = float("nan")
                grads["f"][500] = float("inf")
            grads = {name: g.to(device) for name, g in grads.items()}
            if in_place and result:
                grads = {name: result[name].copy_(grad) for name, grad in grads.items()}
            before = engine.state_dict()["residual"]
            for name, gradient in grads.items():
                engine.submit(spec(name), gradient)
            engine.scale = engine.scale or 1.0
            result = {name: engine.result(name) for name in grads}
            engine.settle(engine.residuals.changed if step == 3 else ())
            after = engine.state_dict()["residual"]
            assert all(torch.isfinite(value).all() for value in after.values())
            if step == 3:
                assert torch.isnan(result["f"][17])
                assert torch.isinf(result["f"][500])
                assert all(torch.equal(after[name], before[name]) for name in SHAPES)
        assert all(torch.isfinite(value).all() for value in result.values())
        engine.disconnect()

    run_ranks(3, worker, timeout_s=30.0)


@pytest.mark.parametrize("wire", ["float16+gap", "qsgd4+gap", "qsgd8"])
def test_it_leaves_no_trace_over_a_lossy_wire(wire: str) -> None:
    """A quantised bucket turns non-finite as a whole; the residual is as before all the same."""

    def worker(transport: Transport) -> None:
        chosen = method(0.05, bucket_numel=600, collective=partial(OkTopk, wire=WIRES[wire]))
        engine = connected(transport, chosen)
        for step in range(6):
            grads = gradients(transport.rank, step)
            if step == 3 and transport.rank == 1:
                grads["f"][17] = float("nan")
            before = engine.state_dict()["residual"]
            result = step_of(engine, grads)
            engine.settle(engine.residuals.changed if step == 3 else ())
            after = engine.state_dict()["residual"]
            assert all(torch.isfinite(value).all() for value in after.values())
            if step == 3:
                assert not torch.isfinite(result["f"][17])
                for name in SHAPES:
                    assert torch.equal(after[name], before[name])
        engine.disconnect()

    run_ranks(3, worker, timeout_s=30.0)


def test_state_survives_bit_for_bit() -> None:
    def worker(transport: Transport) -> bool:
        engine, twin = (connected(transport, method(0.02)) for _ in range(2))
        for step in range(7):
            step_of(engine, gradients(transport.rank, step))
        twin.load_state_dict(engine.state_dict())
        for step in range(7, 20):
            grads = gradients(transport.rank, step)
            ours, theirs = step_of(engine, grads), step_of(twin, grads)
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), step
        same = all(
            torch.equal(a, b)
            for a, b in zip(
                engine.state_dict()["residual"].values(),
                twin.state_dict()["residual"].values(),
                strict=True,
            )
        )
        return same

    assert all(run_ranks(3, worker, timeout_s=30.0))


def test_a_rank_without_state_joins_those_with() -> None:
    """As after an elastic restart: residuals stay, what must be alike on all ranks starts anew."""
    states = run_ranks(3, partial(train_and_save, steps=7), timeout_s=30.0)

    def worker(transport: Transport) -> dict[str, Tensor]:
        engine = connected(transport, method(0.02))
        if transport.rank:
            engine.load_state_dict(states[transport.rank], strict=False)
        result = step_of(engine, gradients(transport.rank, 8))
        for step in range(9, 20):
            result = step_of(engine, gradients(transport.rank, step))
        engine.disconnect()
        return result

    results = run_ranks(3, worker, timeout_s=30.0)
    assert all(torch.equal(results[0][name], r[name]) for r in results for name in SHAPES)


def train_and_save(transport: Transport, steps: int) -> dict[str, Any]:
    engine = connected(transport, method(0.02))
    for step in range(steps):
        step_of(engine, gradients(transport.rank, step))
    state = engine.state_dict()
    engine.disconnect()
    return state


def test_reconnecting_keeps_the_residual() -> None:
    def worker(transport: Transport) -> tuple[dict[str, Any], Engine]:
        engine = connected(transport, method(0.02))
        for step in range(3):
            step_of(engine, gradients(transport.rank, step))
        return engine.state_dict()["residual"], engine

    for residual, engine in run_ranks(1, worker, timeout_s=30.0):
        run_ranks(1, engine.connect, timeout_s=30.0)
        again = engine.state_dict()["residual"]
        assert residual.keys() == again.keys()
        assert all(torch.equal(residual[name], again[name]) for name in residual)
        assert any(value.any() for value in residual.values())


def test_broken_states_are_refused() -> None:
    engine = Engine(method())
    with pytest.raises(ConfigError, match="version must be 2, got None"):
        engine.load_state_dict({})
    with pytest.raises(ConfigError, match="residuals"):
        engine.load_state_dict({"version": 2, "residuals": {}, "residual": {}, "buckets": []})

    def worker(transport: Transport) -> None:
        wrong = connected(transport, method())
        state = {**EngineState().as_dict(), "residual": {"a": torch.ones(3)}}
        wrong.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"residual of 'a'.*\(30, 20\), got \(3,\)"):
            step_of(wrong, gradients(0, 0))
        wrong.load_state_dict({**state, "residual": {"a": torch.zeros(3)}})  # after `forget`
        step_of(wrong, gradients(0, 0))

    run_ranks(1, worker, timeout_s=30.0)


def test_ranks_that_disagree_are_told_so_on_every_rank() -> None:
    def other_shape(transport: Transport) -> None:
        engine = connected(transport, method())
        grads = gradients(transport.rank, 0)
        engine.scale = 1.0
        for name in grads:
            if transport.rank == 2 and name == "c":
                continue
            engine.submit(spec(name), grads[name])
        with pytest.raises(PlanError, match=r"'c': rank 0 .*200.*rank 2 none"):
            engine.result("a")

    run_ranks(3, other_shape, timeout_s=30.0)

    def other_density(transport: Transport) -> None:
        engine = connected(transport, method(0.5 if transport.rank == 1 else 1.0))
        with pytest.raises(PlanError, match=r"rank 0 .*1\.0, rank 1 .*0\.5"):
            step_of(engine, gradients(transport.rank, 0))

    run_ranks(2, other_density, timeout_s=30.0)


def test_a_gradient_that_does_not_come_is_named() -> None:
    def worker(transport: Transport) -> None:
        engine = connected(transport, method())
        grads = gradients(transport.rank, 0)
        step_of(engine, grads)
        for name in grads:
            if name != "c":
                engine.submit(spec(name), grads[name])
        with pytest.raises(PlanError, match="no gradient came for c"):
            engine.result("c")
        engine.disconnect()

    run_ranks(2, worker, timeout_s=30.0)


class Broken(TopkAllgather):
    """Fails in its second exchange."""

    calls = 0

    def reduce(self, stream: Any, take_at: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise TransportError("the network is gone")
        return super().reduce(stream)


def test_a_failed_exchange_loses_nothing() -> None:
    def worker(transport: Transport) -> None:
        engine = connected(
            transport, method(0.02, collective=Broken, selector=ExactTopK, bucket_numel=9999)
        )
        step_of(engine, gradients(0, 0))
        before = engine.state_dict()["residual"]
        grads = gradients(0, 1)
        with pytest.raises(TransportError, match="the network is gone"):
            step_of(engine, grads)
        after = engine.state_dict()["residual"]
        assert all(torch.equal(after[n], before[n]) for n in SHAPES)  # as if there was no step
        engine.disconnect()

    run_ranks(1, worker, timeout_s=30.0)


def test_stats_add_up() -> None:
    def worker(transport: Transport) -> None:
        engine = connected(transport, method(0.1, collective=TopkAllgather))
        for step in range(5):
            step_of(engine, gradients(transport.rank, step))
        stats = engine.stats()
        assert stats.transport == "local"
        assert {name for b in stats.buckets for name in b.names} == set(SHAPES)
        for bucket in stats.buckets:
            assert bucket.steps == 5 == len(bucket.history)
            assert bucket.nnz_selected == sum(step.nnz_selected for step in bucket.history)
            assert bucket.nnz_selected <= 5 * bucket.k * 1.1
            assert bucket.bytes_sent >= 8 * bucket.nnz_selected
            assert min(bucket.accumulate_select_s, bucket.exchange_s, bucket.decode_s) > 0
            assert bucket.density == pytest.approx(bucket.nnz_applied / (5 * bucket.numel))
        assert stats.totals.bytes_sent == sum(b.bytes_sent for b in stats.buckets)
        assert stats.totals.wait_s > 0
        engine.disconnect()

    run_ranks(2, worker, timeout_s=30.0)


def test_disconnecting_ends_the_thread() -> None:
    def worker(transport: Transport) -> None:
        engine = connected(transport, method())
        step_of(engine, gradients(0, 0))
        engine.disconnect()
        engine.disconnect()

    before = threading.active_count()
    run_ranks(1, worker, timeout_s=30.0)
    assert threading.active_count() == before
