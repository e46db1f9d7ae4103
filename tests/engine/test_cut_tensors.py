"""A tensor that is cut over several buckets: to those who hand it in, it is one tensor."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives import OkTopk
from hvd_sparse.engine import Choice, Engine, Method, TensorSpec
from hvd_sparse.engine.bucketing import form_buckets
from hvd_sparse.engine.state import EngineState
from hvd_sparse.errors import PlanError
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.methods import METHODS
from hvd_sparse.selectors import ReusedThreshold
from hvd_sparse.transports import Transport, run_ranks

LARGE = TensorSpec("large", (7, 90), "torch.float32")
SMALL = TensorSpec("small", (40,), "torch.float32")
ROWS = {"large[0:2]": (0, 2), "large[2:4]": (2, 4), "large[4:7]": (4, 7)}
PARTS = {name: TensorSpec(name, (b - a, 90), "torch.float32") for name, (a, b) in ROWS.items()}
MEMORIES = {
    "error feedback": MemoryOptions(),
    "global momentum": MemoryOptions(0.5, nesterov=True),
    "momentum correction": MemoryOptions(0.5, momentum_kind="local"),
    "clipped": MemoryOptions(clip_norm=1000.0),
}


@pytest.fixture
def any_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a tensor that is as small as those here."""
    monkeypatch.setattr("hvd_sparse.engine.bucketing.LEAST_CUT_NUMEL", 1)


def method(memory: str = "error feedback", bucket_numel: int = 250) -> Method:
    collective = partial(OkTopk, threshold_interval=3, repartition_interval=5)
    return Method(
        0.05,
        bucket_numel,
        partial(ReusedThreshold, 4),
        collective,
        "cut",
        MEMORIES[memory],
    )


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """The large one does not lie in the order of its rows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    large = torch.randint(-99, 100, (90, 7), generator=generator).float().T
    return {"large": large, "small": torch.randint(-99, 100, (40,), generator=generator).float()}


def in_parts(given: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = {name: given["large"][slice(*rows)] for name, rows in ROWS.items()}
    return {**parts, "small": given["small"]}


def connected(transport: Transport, chosen: Method) -> Engine:
    engine = Engine(chosen)
    engine.connect(transport)
    engine.scale = 0.5
    return engine


def step_of(engine: Engine, given: dict[str, Tensor], frozen: str = "") -> dict[str, Tensor]:
    specs = {**PARTS, "large": LARGE, "small": SMALL}
    for name, gradient in given.items():
        engine.submit(specs[name], gradient, frozen=name.startswith(frozen or "?"))
    engine.scale = 0.5
    return {name: engine.result(name) for name in given}


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == {"large", "small"}
    for name, part in in_parts(ours).items():
        assert torch.equal(part, theirs[name]), name


@pytest.mark.usefixtures("any_is_cut")
def test_where_tensors_are_cut() -> None:
    row = TensorSpec("row", (1, 700), "torch.float32")
    scalar = TensorSpec("scalar", (), "torch.float32")
    plans = form_buckets([scalar, LARGE, SMALL, row], method())
    labels = [[spec.label for spec in plan.specs] for plan in plans]
    assert labels == [["scalar"], *([name] for name in ROWS), ["small"], ["row"]]
    assert [spec.shape for plan in plans[1:4] for spec in plan.specs] == [
        (2, 90),
        (2, 90),
        (3, 90),
    ]


@pytest.mark.usefixtures("any_is_cut")
def test_a_named_bucket_is_one_vector() -> None:
    class Named:
        description = "named"

        def choice_of(self, spec: TensorSpec) -> Choice:
            return Choice(method(), "one")

    # The odd one comes last: see tests/engine/test_assignment.py.
    assert [plan.specs for plan in form_buckets([LARGE, SMALL], Named())] == [(SMALL, LARGE)]


def test_large_tensors_are_cut_by_default() -> None:
    """As many equal parts as fit into buckets; short ones are no parts, however small buckets."""

    def parts_of(numel: int, device: str = "cpu", **options: Any) -> list[int]:
        spec, devices = TensorSpec("x", (numel,), "torch.float32"), {"x": torch.device(device)}
        chosen = METHODS["topk"](**options).make()
        return [plan.specs[0].numel for plan in form_buckets([spec], chosen, devices)]

    assert parts_of(1 << 23) == [1 << 23]
    assert parts_of(14_700_000) == [14_700_000]
    assert parts_of(20_000_000) == [10_000_000, 10_000_000]
    assert parts_of(1 << 24, bucket_numel=1) == [1 << 24]
    assert parts_of(1 << 25, bucket_numel=1) == [1 << 24, 1 << 24]
    assert parts_of(1 << 25, "cuda:1") == [1 << 25]
    assert parts_of(1 << 26, "cuda:1") == [1 << 25, 1 << 25]
    assert parts_of(1 << 25, "cuda:1", bucket_numel=1 << 23) == [1 << 24, 1 << 24]


def test_buckets_are_larger_on_a_device() -> None:
    specs = [TensorSpec(str(i), (1 << 22,), "torch.float32") for i in range(16)]
    for device, count in (("cpu", 8), ("cuda:0", 2)):
        devices = {spec.name: torch.device(device) for spec in specs}
        assert len(form_buckets(specs, METHODS["topk"]().make(), devices)) == count


@pytest.mark.usefixtures("any_is_cut")
@pytest.mark.parametrize("memory", MEMORIES)
def test_it_is_reduced_as_its_parts_would_be(memory: str) -> None:
    """Bit for bit: results, residuals, momenta; also frozen, not finite, forgotten, reloaded."""

    def worker(transport: Transport) -> None:
        whole = connected(transport, method(memory))
        apart = connected(transport, method(memory, 300))
        result: Tensor | None = None
        for step in range(12):
            given = gradients(transport.rank, step)
            if step == 4 and transport.rank == 1:
                given["large"][3, 5] = float("nan")
            if step == 6:
                lost = [whole.forget(["large"]), apart.forget(list(PARTS))]
                assert lost[0] == pytest.approx(lost[1], rel=1e-12)
            if step == 8:
                for engine in (whole, apart):
                    engine.load_state_dict(engine.state_dict())
            frozen = "large" if step in (9, 10) else ""
            if frozen:
                given["large"] = torch.zeros_like(given["large"])
            theirs = step_of(apart, in_parts({n: g.clone() for n, g in given.items()}), frozen)
            if result is not None and step % 3 == 2:  # as after zero_grad(set_to_none=False)
                given["large"] = result.copy_(given["large"])
            ours = step_of(whole, given, frozen)
            if step == 4:
                assert not all(bool(part.isfinite().all()) for part in ours.values())
            else:
                assert_alike(ours, theirs)
            assert step in (0, 8) or ours["large"] is result
            result = ours["large"]
            for engine in (whole, apart):
                engine.settle(engine.residuals.changed if step == 4 else ())
            states = [engine.state_dict() for engine in (whole, apart)]
            assert bool(states[0]["momentum"]) == ("momentum" in memory)
            for kind in ("residual", "momentum") if "momentum" in memory else ("residual",):
                assert_alike(states[0][kind], states[1][kind])
        for engine in (whole, apart):
            engine.disconnect()

    run_ranks(2, worker, timeout_s=60.0)


@pytest.mark.usefixtures("any_is_cut")
def test_state_goes_from_whole_tensors_to_parts_and_back() -> None:
    def worker(transport: Transport) -> None:
        engine = connected(transport, method("global momentum"))
        for step in range(3):
            step_of(engine, gradients(transport.rank, step))
        state = engine.state_dict()
        assert [bucket["names"] for bucket in state["buckets"]] == [*([n] for n in ROWS), ["small"]]
        engine.reassign(method("global momentum", 640))
        step_of(engine, gradients(transport.rank, 3))
        assert [bucket.names for bucket in engine.stats().buckets] == [("large",), ("small",)]
        engine.load_state_dict(state)
        again = engine.state_dict()
        for kind in ("residual", "momentum"):
            for name in ("large", "small"):
                assert torch.equal(again[kind][name], state[kind][name])
        engine.disconnect()
        kept = EngineState.from_dict(state)
        kept.drop(["large"])
        assert [bucket["names"] for bucket in kept.buckets] == [["small"]]

    run_ranks(2, worker, timeout_s=60.0)


@pytest.mark.usefixtures("any_is_cut")
def test_a_tensor_without_its_gradient_is_named_once() -> None:
    def worker(transport: Transport) -> None:
        engine = connected(transport, method())
        step_of(engine, gradients(0, 0))
        engine.submit(SMALL, torch.ones(40))
        with pytest.raises(PlanError, match=r"^no gradient came for large$"):
            engine.result("small")
        engine.disconnect()

    run_ranks(1, worker, timeout_s=60.0)
