"""Every compressor with every memory: nothing is lost, replicas agree, states go on bit for bit."""

from __future__ import annotations

import copy
import io
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.accumulator import Accumulator
from hvd_sparse.collectives import ExDyna, IndexUnion
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.memories import GlobalMomentum, MomentumCorrection
from hvd_sparse.methods import METHODS
from hvd_sparse.selectors import ExactTopK, OnlineThreshold
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from tests.devices import CPU, in_worlds, on_every_device
from tests.laws.buckets import bucket_by, bucket_of, step_of
from tests.laws.test_step_commit import flattened
from tests.streams import dense

NUMEL = 600
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MEMORIES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9, "momentum_kind": "local"},
    "nesterov": {"momentum": 0.9, "momentum_kind": "local", "nesterov": True},
    "global": {"momentum": 0.9, "momentum_kind": "global"},
    "global nesterov": {"momentum": 0.9, "momentum_kind": "global", "nesterov": True},
}


def method_of(name: str, memory: str = "plain", density: float = 0.05, **changes: Any) -> Method:
    arguments = {**MEMORIES[memory], **changes}
    if name == "hard_threshold":
        arguments["threshold"] = 1.5
    method = METHODS[name](density=density, **arguments).make()
    assert isinstance(method, Method)
    return method


def gradients_of(rank: int, step: int, numel: int = NUMEL) -> list[Tensor]:
    """Random numbers in three tensors of three types."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    g = torch.randn(numel, generator=generator)
    edges = (0, numel // 3, numel // 2, numel)
    return [g[a:b].to(dtype) for (a, b), dtype in zip(pairwise(edges), DTYPES, strict=True)]


@in_worlds([3, 1, 2, 4, 7])
@pytest.mark.parametrize("memory_name", MEMORIES)
@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_lost_in_many_steps(
    name: str, memory_name: str, world_size: int, device: torch.device
) -> None:
    method = method_of(name, memory_name)

    def worker(transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
        numels = [g.numel() for g in gradients_of(0, 0)]
        bucket = bucket_by(method, transport, *numels, device=device)
        memory = bucket.memory
        given, applied = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
        for step in range(80 if world_size <= 2 else 30):
            gradients = [g.to(device) for g in gradients_of(transport.rank, step)]
            if isinstance(memory, GlobalMomentum):
                given += memory.momentum * memory.tensors()["momentum"].double().cpu()
            _, reduction = step_of(bucket, gradients)
            g = torch.cat([gradient.double() for gradient in gradients]).cpu()
            if isinstance(memory, MomentumCorrection):
                given += memory.momentum_buffer.double().cpu()  # not masked before the next step
                given += g if memory.nesterov else 0.0
            else:
                given += g
            applied += dense(reduction.reduced)
        return given, applied, memory.residual.double().cpu()

    ranks = run_ranks(world_size, worker, timeout_s=60.0)
    given = sum(rank[0] for rank in ranks)
    assert all(torch.equal(rank[1], ranks[0][1]) for rank in ranks)
    after = ranks[0][1] + sum(rank[2] for rank in ranks)
    torch.testing.assert_close(after, given, rtol=0, atol=2e-3)
    assert bool(ranks[0][1].any())


@on_every_device
@pytest.mark.parametrize("memory_name", ["momentum", "global", "global nesterov"])
@pytest.mark.parametrize("name", METHODS)
def test_states_go_on_bit_for_bit(name: str, memory_name: str, device: torch.device) -> None:
    """Thresholds, partitions, seeds, momentum and the position in the warm-up survive."""
    check_that_states_go_on(
        method_of(name, memory_name, warmup_steps=12, warmup="linear"), NUMEL, device
    )


CHOSEN = ("topk", {"collective": "oktopk,spardl"})


@pytest.mark.parametrize(("name", "changes"), [CHOSEN, *((name, {}) for name in METHODS)])
def test_states_of_many_entries_go_on_bit_for_bit(name: str, changes: dict[str, Any]) -> None:
    """So many that what a rank may send to another differs from rank to rank."""
    check_that_states_go_on(method_of(name, **changes), 100 * NUMEL, CPU)


def check_that_states_go_on(method: Method, numel: int, device: torch.device) -> None:
    def worker(transport: Transport) -> None:
        first, second = Engine(method), Engine(method)
        for engine in (first, second):
            engine.connect(transport)
        for step in range(14):
            if step == 6:
                file = io.BytesIO()
                torch.save(first.state_dict(), file)
                file.seek(0)
                second.load_state_dict(torch.load(file, weights_only=True))
            result = train_step(first, transport.rank, step, device, numel)
            if step >= 6:
                again = train_step(second, transport.rank, step, device, numel)
                assert torch.equal(result, again), step
        ours, theirs = first.state_dict(), second.state_dict()
        assert ours["step"] == theirs["step"] == 14
        for kind in ("residual", "momentum"):
            assert all(torch.equal(ours[kind][w], theirs[kind][w]) for w in ours[kind])
        first.disconnect()
        second.disconnect()

    run_ranks(3, worker, timeout_s=60.0)


def train_step(
    engine: Engine, rank: int, step: int, device: torch.device = CPU, numel: int = NUMEL
) -> Tensor:
    g = torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))
    engine.submit(TensorSpec("w", (numel,), "torch.float32"), g.to(device))
    engine.scale = engine.scale or 1.0
    return engine.result("w").clone()


@pytest.mark.parametrize("memory_name", ["momentum", "global"])
def test_a_tensor_that_a_plan_lacks_keeps_its_momentum(memory_name: str) -> None:
    """As one that is frozen when its model is wrapped anew."""
    method = method_of("topk", memory_name)

    def worker(transport: Transport) -> None:
        engine, kept = Engine(method), None
        engine.connect(transport)
        for step in range(6):
            if step == 3:
                kept = engine.state_dict()
                engine.reassign(method)
            for name in ("a", "w") if step < 3 else ("w",):
                g = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
                engine.submit(TensorSpec(name, (NUMEL,), "torch.float32"), g)
            engine.scale = 1.0
            engine.result("w")
        assert kept is not None
        for kind in ("residual", "momentum"):
            assert torch.equal(engine.state_dict()[kind]["a"], kept[kind]["a"]), kind
        engine.disconnect()

    run_ranks(2, worker, timeout_s=30.0)


@pytest.mark.parametrize("name", ["dgc", "oktopk", "exdyna", "clt_k"])
@pytest.mark.parametrize("kind", ["local", "global"])
def test_momentum_at_density_one_is_momentum_sgd(kind: str, name: str) -> None:
    for nesterov, low_pass in product((False, True), (1.0, 0.25)):  # nothing is left to filter
        changes: dict[str, Any] = {"momentum": 0.5, "momentum_kind": kind, "nesterov": nesterov}
        method = method_of(name, density=1.0, low_pass=low_pass, **changes)

        def worker(transport: Transport, method: Method = method) -> list[Tensor]:
            engine = Engine(method)
            engine.connect(transport)
            results = [train_step(engine, transport.rank, step) for step in range(6)]
            engine.disconnect()
            return results

        results = run_ranks(2, worker, timeout_s=30.0)[0]
        weights = torch.zeros(NUMEL, requires_grad=True)
        sgd = torch.optim.SGD([weights], lr=1.0, momentum=0.5, nesterov=nesterov)
        for step, result in enumerate(results):
            before = weights.detach().clone()
            parts = [
                torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))
                for rank in range(2)
            ]
            weights.grad = parts[0] + parts[1]
            sgd.step()
            torch.testing.assert_close(before - weights.detach(), result, rtol=1e-5, atol=1e-5)


def test_momentum_is_masked_where_entries_left_and_nowhere_else() -> None:
    memory = MomentumCorrection(6, torch.device("cpu"), momentum=0.5)
    accumulator = memory.accumulate([torch.tensor([5.0, 1.0, 4.0, 1.0, 3.0, 1.0])], 3)
    taken = ExactTopK().select(accumulator, 3)
    assert taken.indices.tolist() == [0, 2, 4]
    memory.take_at(torch.tensor([1], dtype=torch.int32))  # taken for another rank's selection
    memory.give_back(taken, taken.where(taken.indices == 4))  # what took no part in the result
    memory.mask()
    assert memory.momentum_buffer.tolist() == [0.0, 0.0, 0.0, 1.0, 3.0, 1.0]
    assert memory.residual.tolist() == [0.0, 0.0, 0.0, 1.0, 3.0, 1.0]
    ExactTopK().select(memory.accumulate([torch.zeros(6)], 1), 1)
    assert memory.residual.tolist() == [0.0, 0.0, 0.0, 1.5, 0.0, 1.5]


@on_every_device
@pytest.mark.parametrize("memory_name", MEMORIES)
@pytest.mark.parametrize("name", ["exdyna", "clt_k", "dgc", "oktopk", "randomk", "dragonn"])
def test_a_spoiled_step_leaves_no_trace(name: str, memory_name: str, device: torch.device) -> None:
    method = method_of(name, memory_name)

    def worker(transport: Transport) -> None:
        engine = Engine(method)
        engine.connect(transport)
        for step in range(8):
            g = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
            if step in (3, 5) and transport.rank == 1:
                g[[17, 400]] = torch.tensor([float("inf"), float("nan")])
            before = copy.deepcopy(engine.state_dict())
            engine.submit(TensorSpec("w", (NUMEL,), "torch.float32"), g.to(device))
            engine.scale = engine.scale or 1.0
            result = engine.result("w")
            engine.settle(engine.residuals.changed if step in (3, 5) else ())
            if step in (3, 5):
                assert not bool(result[[17, 400]].isfinite().any())
                after = engine.state_dict()
                assert bool(before["momentum"]) == (memory_name != "plain")
                for part in ("residual", "momentum", "step", "buckets"):  # thresholds, regions, …
                    assert flattened(after[part]) == flattened(before[part])
            else:
                assert bool(result.isfinite().all())
        engine.disconnect()

    run_ranks(3, worker, timeout_s=60.0)


class Lost(IndexUnion):
    """Fails after it has taken entries at others' indices."""

    def reduce(self, stream: Any, take_at: Any = None) -> Any:
        assert take_at is not None
        rest = torch.arange(self.numel, dtype=torch.int32)
        take_at(rest[~torch.isin(rest, stream.indices)])
        raise RuntimeError("the network is gone")


@pytest.mark.parametrize("memory_name", MEMORIES)
def test_a_failed_exchange_loses_nothing(memory_name: str) -> None:
    method = method_of("topk", memory_name)
    g = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))

    def worker(transport: Transport) -> None:
        bucket = bucket_of(transport, NUMEL, 30, ExactTopK, Lost, method.memory)
        with pytest.raises(RuntimeError, match="network is gone"):
            step_of(bucket, [g])
        for tensor in bucket.memory.tensors().values():
            assert not tensor.any()  # as before the step

    run_ranks(1, worker, timeout_s=10.0)


class Hopeless(ExactTopK):
    """Fails before it has taken anything, and so before the gradients are added."""

    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        accumulator.sample(1, 1, 7)
        raise RuntimeError("no threshold")


@on_every_device
@pytest.mark.parametrize("memory_name", MEMORIES)
def test_a_step_that_fails_early_goes_back_to_its_own_beginning(
    memory_name: str, device: torch.device
) -> None:
    """And not to that of the step before it, whose results were applied."""
    options = method_of("topk", memory_name).memory
    g = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).to(device)

    def worker(transport: Transport) -> None:
        bucket = bucket_of(transport, NUMEL, 30, Hopeless, IndexUnion, options, device)
        hopeless, memory = bucket.selector, bucket.memory
        with pytest.raises(RuntimeError, match="no threshold"):
            step_of(bucket, [g])
        assert not any(tensor.any() for tensor in memory.tensors().values())
        bucket.selector = ExactTopK()
        step_of(bucket, [g])
        before = copy.deepcopy(memory.tensors())
        assert all(tensor.any() for tensor in before.values())
        bucket.selector = hopeless
        with pytest.raises(RuntimeError, match="no threshold"):
            step_of(bucket, [g])
        for name, tensor in memory.tensors().items():
            assert torch.equal(tensor, before[name])

    run_ranks(1, worker, timeout_s=10.0)


@pytest.mark.parametrize("memory_name", ["momentum", "global"])
def test_a_step_that_fails_before_its_pass_has_changed_nothing(
    memory_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory runs out for what the last step's entries do to momentum."""
    options = method_of("topk", memory_name).memory
    g = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))

    def fail(*_: object) -> Tensor:
        raise MemoryError("no room")

    def worker(transport: Transport) -> None:
        bucket = bucket_of(transport, NUMEL, 30, ExactTopK, IndexUnion, options)
        step_of(bucket, [g])
        memory = bucket.memory
        before = memory.residual.clone()
        with monkeypatch.context() as patch:
            patch.setattr(ops, "on", fail)
            patch.setattr(Tensor, "index_fill_", fail)
            with pytest.raises(MemoryError):
                memory.accumulate([g], 30)
        memory.roll_back()
        assert torch.equal(memory.residual, before)

    run_ranks(1, worker, timeout_s=10.0)


@pytest.mark.parametrize(("name", "momentum"), [("dgc", 0.0), ("topk", 0.0), ("topk", 0.9)])
def test_a_residual_stays_finite_where_a_loss_scale_grows(name: str, momentum: float) -> None:
    """Else its entry would spoil every step from then on."""

    def worker(transport: Transport) -> None:
        engine = Engine(METHODS[name](density=0.1, momentum=momentum).make())
        engine.connect(transport)
        for factor, is_finite in ((8.0, True), (0.125, False), (1.0, True)):
            engine.submit(TensorSpec("w", (10,), "torch.float32"), torch.full((10,), 1e38))
            engine.scale = 1.0
            assert bool(engine.result("w").isfinite().all()) is is_finite  # or a scaler skips it
            engine.settle(() if is_finite else engine.residuals.changed)
            engine.rescale(factor)
            state = engine.state_dict()
            held = [*state["residual"].values(), *state["momentum"].values()]
            assert all(each.isfinite().all() for each in held)
        engine.disconnect()
        engine.rescale(1e38)
        assert engine.state_dict()["residual"]["w"].isfinite().all()

    run_ranks(1, worker, timeout_s=60.0)


def test_methods_change_in_mid_training() -> None:
    """Density, compressor and memory change; what was not sent stays."""

    def worker(transport: Transport) -> list[int]:
        engine = Engine(method_of("dgc", momentum=0.9))
        engine.connect(transport)
        counts = []
        for method in (
            method_of("dgc", momentum=0.9, density=0.2),
            method_of("exdyna", density=0.1),
            method_of("oktopk", density=0.02, momentum=0.5),
        ):
            for step in range(4):
                train_step(engine, transport.rank, step)
            before = engine.state_dict()["residual"]["w"]
            engine.reassign(method)
            assert torch.equal(engine.state_dict()["residual"]["w"], before)
            train_step(engine, transport.rank, 4)
            counts.append(int(engine.stats().buckets[0].history[0].nnz_applied))
        engine.disconnect()
        return counts

    for dgc, exdyna, oktopk in run_ranks(3, worker, timeout_s=60.0):
        assert 120 <= dgc <= 3 * 120 * 1.1
        assert 54 <= exdyna <= 66
        assert 10 <= oktopk <= 14


def layered(step: int, rank: int, numel: int) -> Tensor:
    """Most large values lie in one tenth of the vector."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    g = torch.randn(numel, generator=generator)
    g[numel // 10 : numel // 5] *= 30.0
    g[numel // 2 :] *= 0.1
    return g


@pytest.mark.parametrize("world_size", [4, 7])
def test_exdyna_balances_partitions_and_holds_density(world_size: int) -> None:
    """f(t) (equation 5) after 50 steps, and the density from the tenth step on."""
    numel, k = 100_000, 1000

    def worker(transport: Transport, dynamic: bool) -> tuple[list[float], list[int]]:
        bucket = bucket_of(transport, numel, k, OnlineThreshold, partial(ExDyna, dynamic=dynamic))
        imbalance, applied = [], []
        for step in range(80):
            g = layered(step, transport.rank, numel)
            applied.append(step_of(bucket, [g])[1].reduced.nnz)
            counts = bucket.stats.partition_nnz
            imbalance.append(len(counts) * max(counts) / sum(counts))
        return imbalance, applied

    still, _ = run_ranks(world_size, lambda t: worker(t, False), timeout_s=60.0)[0]
    moving, applied = run_ranks(world_size, lambda t: worker(t, True), timeout_s=60.0)[0]
    assert min(still[50:]) > 2.0
    assert max(moving[50:]) < 1.3
    assert all(abs(nnz - k) <= 0.1 * k for nnz in applied[10:]), applied


@pytest.mark.parametrize("kind", ["jump up", "jump down", "ties", "heavy tail"])
def test_exdyna_holds_density_through_changes(kind: str) -> None:
    numel, k = 20_000, 200

    def worker(transport: Transport) -> list[int]:
        bucket = bucket_of(transport, numel, k, OnlineThreshold, ExDyna)
        generator = torch.Generator().manual_seed(transport.rank)
        applied = []
        for step in range(30):
            g = torch.randn(numel, generator=generator)
            if kind == "heavy tail":
                g = g**5
            elif kind == "ties":
                g = torch.full((numel,), 2.0)
            elif step >= 15:
                g *= 1000.0 if kind == "jump up" else 1e-3
            applied.append(step_of(bucket, [g])[1].reduced.nnz)
        return applied

    for applied in run_ranks(3, worker, timeout_s=60.0):
        assert all(abs(nnz - k) <= 0.1 * k for nnz in applied), applied


@pytest.mark.parametrize("name", ["dgc", "dragonn", "exdyna"])
def test_a_large_odd_size(name: str) -> None:
    numel = 2**24 + 1
    method = method_of(name, density=0.001)
    k = method.k(numel)

    def worker(transport: Transport) -> None:
        bucket = bucket_by(method, transport, numel)
        g = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        g[-1] = 100.0
        _, reduction = step_of(bucket, [g.clone()])
        assert abs(reduction.reduced.nnz - k) <= 0.1 * k
        assert int(reduction.reduced.indices[-1]) == numel - 1
        residual = bucket.memory.residual
        residual[reduction.reduced.indices.long()] += reduction.reduced.values
        assert torch.equal(residual, g)

    run_ranks(1, worker, timeout_s=60.0)
