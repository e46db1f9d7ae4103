"""Assignments: per-tensor plans, agreed by all ranks, changed in mid-training."""

from __future__ import annotations

import time
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives import OkTopk, TopkAllgather
from hvd_sparse.engine import Choice, Engine, Method, TensorSpec
from hvd_sparse.engine.bucket import Bucket, Phase
from hvd_sparse.engine.bucketing import MethodId, agree_on_plan, differing, form_buckets
from hvd_sparse.engine.worker import Worker
from hvd_sparse.errors import PlanError
from hvd_sparse.methods.catalogue import TopkOptions
from hvd_sparse.selectors import ExactTopK, ReusedThreshold
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks

SHAPES = {"a": (30, 20), "b": (70,), "c": (200,), "d": (40, 10), "e": (900,)}
SMALL = Method(0.05, 500, partial(ReusedThreshold, 4), TopkAllgather, "allgather 0.05")
LARGE = Method(0.02, 5000, ExactTopK, partial(OkTopk, threshold_interval=3), "oktopk 0.02")


class Table:
    """An assignment that is written down."""

    def __init__(self, **choices: Choice) -> None:
        self.choices = choices
        self.description = repr(choices)

    def choice_of(self, spec: TensorSpec) -> Choice:
        return self.choices.get(spec.name, Choice(None))


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def step_of(engine: Engine, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """One step as the adapter does it; dense tensors are given back as they would be handed on."""
    specs = {name: TensorSpec(name, SHAPES[name], "torch.float32") for name in grads}
    sparse = [name for name in grads if engine.takes(specs[name])]
    dense = {}
    for name, gradient in grads.items():
        if name in sparse:
            engine.submit(specs[name], gradient)
        else:
            leftover = engine.residuals.release(name, gradient)
            dense[name] = gradient if leftover is None else gradient + leftover
            engine.residuals.flushed(name)
    engine.scale = engine.scale or 1.0
    results = dense | {name: engine.result(name).clone() for name in sparse}
    engine.settle()
    return results


def test_buckets_hold_one_method_type_and_name() -> None:
    named = Choice(SMALL, "x")
    table = Table(
        a=Choice(SMALL), b=Choice(LARGE), c=named, d=named, e=Choice(LARGE), half=Choice(SMALL)
    )
    specs = [TensorSpec(name, SHAPES[name], "torch.float32") for name in SHAPES]
    specs.append(TensorSpec("half", SHAPES["d"], "torch.float16"))
    formed = [(sorted(s.name for s in p.specs), p.method) for p in form_buckets(specs, table)]
    assert formed == [
        (["a"], SMALL),
        (["c", "d"], SMALL),  # named: one bucket, although it is above the method's bucket_numel
        (["b", "e"], LARGE),
        (["half"], SMALL),
    ]


@pytest.mark.parametrize(
    ("there", "agree"), [(("cuda:0", "cpu"), True), (("cuda:3", "cpu"), True), (("cpu",), False)]
)
def test_a_bucket_is_on_one_device_and_ranks_place_tensors_alike(
    there: tuple[str, ...], agree: bool
) -> None:
    specs = [TensorSpec(name, (8,), "torch.float32") for name in "abcd"]

    def rank(transport: Transport) -> list[list[str]] | str:
        names = ("cuda:0", "cpu") if transport.rank == 0 else there
        places = cycle(map(torch.device, names))
        devices = {spec.name: place for spec, place in zip(specs, places, strict=False)}
        try:
            plan = agree_on_plan(specs, SMALL, transport, devices)
        except PlanError as error:
            return str(error)
        return [[spec.name for spec in bucket.specs] for bucket in plan]

    refusal = "ranks have different gradients for 'a': rank 0 torch.float32(8,) on device cuda:0"
    for found in run_ranks(2, rank):
        assert found == [["a", "c"], ["b", "d"]] if agree else str(found).startswith(refusal)


def test_tensors_that_misalign_others_come_last_in_their_bucket() -> None:
    specs = [TensorSpec(f"t{n}", (n,), "torch.float32") for n in (10, 8, 7, 400, 92, 3, 12)]
    [first, second] = form_buckets(specs, TopkOptions(bucket_numel=500).make())
    assert [spec.numel for spec in first.specs] == [8, 400, 10, 7]
    assert [spec.numel for spec in second.specs] == [92, 12, 3]


def test_each_tensor_is_exchanged_by_its_own_method() -> None:
    table = Table(a=Choice(SMALL), b=Choice(SMALL), e=Choice(LARGE))

    def worker(transport: Transport) -> dict[str, int]:
        engine = Engine(table)
        engine.connect(transport)
        for step in range(4):
            step_of(engine, gradients(transport.rank, step))
        kinds = {name: bucket.k for bucket in engine.stats().buckets for name in bucket.names}
        engine.disconnect()
        return kinds

    for kinds in run_ranks(3, worker):
        assert kinds == {"a": 30, "b": 4, "e": 18}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_mass_is_lost_over_changes_of_the_assignment(world_size: int) -> None:
    """What was given is what was applied and what still waits, whatever became dense or sparse."""
    everything = {name: Choice(SMALL) for name in SHAPES}
    plans = [
        Table(**everything),
        Table(a=Choice(LARGE), b=Choice(SMALL, "own"), e=Choice(SMALL)),
        Table(),
        Table(**{name: Choice(LARGE) for name in SHAPES}),
    ]

    def worker(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = Engine(plans[0])
        engine.connect(transport)
        applied = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(20):
            if step in (5, 10, 15):
                engine.reassign(plans[step // 5])
            for name, result in step_of(engine, gradients(transport.rank, step)).items():
                sparse = engine.takes(TensorSpec(name, SHAPES[name], "torch.float32"))
                applied[name] += result / world_size if sparse else result
        state = engine.state_dict()["residual"]
        engine.disconnect()
        return applied, state

    done = run_ranks(world_size, worker)
    for name, shape in SHAPES.items():
        given = sum(
            (gradients(r, s)[name] for r in range(world_size) for s in range(20)),
            torch.zeros(shape),
        )
        kept = sum(applied[name] + state[name] for applied, state in done)
        torch.testing.assert_close(kept, given, rtol=1e-4, atol=1e-4)
        assert any(state[name].any() for _, state in done)


def test_a_background_thread_that_is_slow_to_end_costs_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_while = Worker._wait_while

    def slow_to_end(worker: Worker, bucket: Bucket, *phases: Phase) -> bool:
        goes_on = wait_while(worker, bucket, *phases)
        if not goes_on:
            time.sleep(0.3)
        return goes_on

    monkeypatch.setattr(Worker, "_wait_while", slow_to_end)

    def worker(transport: Transport) -> None:
        engine = Engine(SMALL)
        engine.connect(transport)
        step_of(engine, gradients(transport.rank, 0))
        engine.reassign(LARGE)
        engine.agree()
        engine.disconnect()

    run_ranks(2, worker, timeout_s=10.0)


def test_a_leftover_survives_in_the_state() -> None:
    def worker(transport: Transport) -> None:
        engine = Engine(Table(a=Choice(SMALL), b=Choice(SMALL)))
        engine.connect(transport)
        step_of(engine, {name: gradients(0, 0)[name] for name in "ab"})
        residual = engine.state_dict()["residual"]["b"]
        engine.reassign(Table(a=Choice(SMALL)))
        step_of(engine, {"a": gradients(0, 1)["a"]})  # b has no gradient in this step
        assert torch.equal(engine.state_dict()["residual"]["b"], residual)
        leftover = engine.residuals.leftover("b")
        assert leftover is not None
        assert torch.equal(leftover, residual)
        assert engine.residuals.release("b", 9.0 + gradients(0, 1)["b"]) is leftover
        engine.residuals.flushed("b")
        assert set(engine.state_dict()["residual"]) == {"a"}
        engine.disconnect()

    run_ranks(1, worker)


def test_a_gradient_of_another_type_is_refused_until_all_reassign() -> None:
    def worker(transport: Transport) -> None:
        engine = Engine(SMALL)
        engine.connect(transport)
        gradient = torch.arange(70.0)
        step_of(engine, {"b": gradient})
        former = engine.state_dict()["residual"]["b"]
        narrow = TensorSpec("b", (70,), "torch.bfloat16")
        told = (
            r"'b' changed from torch.float32\(70,\) to torch.bfloat16\(70,\): after such a change"
        )
        with pytest.raises(PlanError, match=told):
            engine.submit(narrow, gradient.bfloat16())
        engine.reassign(SMALL)
        engine.submit(narrow, gradient.bfloat16())
        engine.scale = 1.0
        applied = engine.result("b").float()
        kept = engine.state_dict()["residual"]["b"]
        assert torch.equal(former + gradient, kept + applied / 2)
        engine.disconnect()

    run_ranks(2, worker)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"density": 0.02}, "rank 0 density=0.01, rank 1 density=0.02"),
        ({"wire": "float16", "momentum": 0.9}, "rank 0 wire=auto momentum=0.0, rank 1 wire"),
    ],
)
def test_an_error_tells_only_what_differs(change: dict[str, Any], told: str) -> None:
    def worker(transport: Transport) -> None:
        options = TopkOptions(**(change if transport.rank else {}))
        engine = Engine(options.make())
        engine.connect(transport)
        with pytest.raises(PlanError, match=f"ranks compress differently: {told}"):
            engine.agree()
        engine.disconnect()

    run_ranks(2, worker)


def test_descriptions_with_other_keys_are_told_whole() -> None:
    topk, oktopk = (MethodId(name, (("a", 1), ("b", 2))) for name in ("topk", "oktopk"))
    other = MethodId("topk", (("a", 1), ("c", 2)))
    assert differing(topk, oktopk) == ("topk a=1 b=2", "oktopk a=1 b=2")
    assert differing(topk, other) == ("topk a=1 b=2", "topk a=1 c=2")
    assert differing(MethodId("none"), topk) == ("none", "topk a=1 b=2")


def test_ranks_with_other_assignments_are_told_so() -> None:
    def worker(transport: Transport) -> None:
        engine = Engine(Table(a=Choice(LARGE if transport.rank else SMALL)))
        engine.connect(transport)
        with pytest.raises(PlanError, match=r"ranks compress differently: rank 0 .*rank 1"):
            step_of(engine, {"a": gradients(0, 0)["a"]})
        engine.disconnect()

    run_ranks(2, worker)

    def early(transport: Transport) -> None:
        engine = Engine(Table(a=Choice(LARGE)) if transport.rank else Table())
        engine.connect(transport)
        with pytest.raises(PlanError, match=r"ranks compress differently: rank 0 .*rank 1"):
            engine.agree()
        engine.disconnect()

    run_ranks(2, early)


def test_an_assignment_that_is_not_a_function_of_the_tensor_is_found_out() -> None:
    def worker(transport: Transport) -> None:
        table = Table(a=Choice(LARGE if transport.rank else SMALL))
        table.description = "the same words"
        engine = Engine(table)
        engine.connect(transport)
        with pytest.raises(PlanError, match=r"'a': rank 0 .*allgather 0.05, rank 1 .*oktopk"):
            step_of(engine, {"a": gradients(0, 0)["a"]})
        engine.disconnect()

    run_ranks(2, worker)
