"""Units for each element change what is selected, and nothing of what is sent, kept and applied.

Gradients are whole numbers and units are powers of two: the laws are equalities.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.engine import Engine
from hvd_sparse.hosts import Hosts
from hvd_sparse.memories import Preconditioned
from hvd_sparse.methods import METHODS
from hvd_sparse.selectors import ExactTopK
from hvd_sparse.transports import LocalTransport, run_ranks
from tests.devices import on_every_device
from tests.grids import regular_grid
from tests.laws.test_step_commit import REQUIRED
from tests.laws.test_two_levels import SHAPES, gradients_of, reduced, residuals_of

STEPS, SKIPPED, DENSE_STEPS = 24, (7, 13), 2


class Units:
    """Exponents as an optimizer has them: the same on all ranks, new objects now and then."""

    def __init__(self) -> None:
        self.now: dict[str, Tensor] = {}

    def refresh(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for name, shape in SHAPES.items():
            self.now[name] = torch.randint(-9, 3, shape, generator=generator).to(torch.int8)


def engine_of(
    transport: LocalTransport, units: Units, grid: tuple[int, int] | None, **arguments: Any
) -> Engine:
    name = arguments.pop("name")
    options = {"density": 0.05, "bucket_numel": 600, "momentum": 0.0, **REQUIRED.get(name, {})}
    method = METHODS[name](**options, preconditioned=True, dense_steps=DENSE_STEPS, **arguments)
    engine = Engine(method.make())
    engine.connect(transport)
    if grid is not None:
        engine.hosts = Hosts(transport, regular_grid(*grid, transport.rank))
    engine.exponents_of = units.now.get
    return engine


CASES: list[tuple[str, tuple[int, int] | None, str]] = [
    *((name, None, "float32") for name in METHODS),
    *(("topk", grid, "float32") for grid in ((2, 1), (1, 2), (2, 2), (3, 2))),
    *((name, None, wire) for name in ("topk", "oktopk") for wire in ("float16+gap", "qsgd4")),
]


@pytest.mark.parametrize(("name", "grid", "wire"), CASES)
def test_nothing_is_lost_over_skipped_steps_and_restarts(
    name: str, grid: tuple[int, int] | None, wire: str
) -> None:
    world_size = 3 if grid is None else grid[0] * grid[1]
    exact = wire == "float32"

    def worker(transport: LocalTransport) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        units = Units()
        engine = engine_of(transport, units, grid, name=name, wire=wire)
        books = {key: torch.zeros(shape).double() for key, shape in SHAPES.items()}
        applied = copy.deepcopy(books)
        for step in range(STEPS):
            gradients = gradients_of(step, transport.rank)
            given = copy.deepcopy(gradients)
            before = copy.deepcopy(residuals_of(engine)) if step in SKIPPED else {}
            results = reduced(engine, gradients)
            if step in SKIPPED:
                engine.settle(engine.residuals.changed)
                after = residuals_of(engine)
                assert before.keys() == after.keys()
                assert all(torch.equal(after[key], before[key]) for key in before)
                continue
            for key in books:
                books[key] += given[key]
                applied[key] += results[key]
            engine.settle()
            if step % 3 == 2:
                units.refresh(step)
            if step == 16:  # goes on from a state, in units that have changed meanwhile
                engine.load_state_dict(copy.deepcopy(engine.state_dict()))
        for key, residual in residuals_of(engine).items():
            books[key] -= residual
        engine.disconnect()
        return books, applied

    ranks = run_ranks(world_size, worker, timeout_s=60.0)
    for key in SHAPES:
        assert all(torch.equal(applied[key], ranks[0][1][key]) for _, applied in ranks)
        brought = torch.stack([books[key] for books, _ in ranks]).sum(0)
        torch.testing.assert_close(ranks[0][1][key], brought, rtol=0, atol=0 if exact else 2e-2)


def test_a_state_goes_on_bit_for_bit() -> None:
    """Thresholds are kept, too, and units that are older than the state."""

    def worker(transport: LocalTransport) -> None:
        units = Units()
        first, second = (engine_of(transport, units, None, name="oktopk") for _ in range(2))
        units.refresh(0)
        for step in range(12):
            if step == 6:
                second.load_state_dict(copy.deepcopy(first.state_dict()))
            results = reduced(first, gradients_of(step, transport.rank))
            if step >= 6:
                again = reduced(second, gradients_of(step, transport.rank))
                assert all(torch.equal(results[key], again[key]) for key in SHAPES), step
        first.disconnect()
        second.disconnect()

    run_ranks(2, worker, timeout_s=60.0)


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_longest_steps_are_sent(dtype: torch.dtype, device: torch.device) -> None:
    memory = Preconditioned(6, device)
    memory.precondition(0, torch.tensor([0, 0, -4], dtype=torch.int8, device=device))
    memory.precondition(3, torch.tensor([-4, 3, 3], dtype=torch.int8, device=device))
    g = torch.tensor([9.0, 1.0, 2.0, 1.0, 50.0, 8.0], device=device)
    taken = ExactTopK().select(memory.accumulate([g[:2].to(dtype), g[2:].to(dtype)], 3), 3)
    assert taken.indices.tolist() == [0, 2, 3]
    assert memory.applied(taken).values.tolist() == [9.0, 2.0, 1.0]
    memory.precondition(4, torch.tensor([-9], dtype=torch.int8, device=device))
    assert memory.residual.tolist() == [0.0, 1.0, 0.0, 0.0, 50.0 * 2**9, 1.0]
    assert memory.tensors()["residual"].tolist() == [0.0, 1.0, 0.0, 0.0, 50.0, 8.0]


def test_what_is_let_go_is_counted_in_units_of_the_gradients() -> None:
    memory = Preconditioned(2, torch.device("cpu"), decay=0.5)
    memory.precondition(0, torch.tensor([-4, 4], dtype=torch.int8))
    taken = ExactTopK().select(memory.accumulate([torch.tensor([3.0, 8.0])], 1), 1)
    memory.give_back(taken, taken.where(taken.indices < 0))
    assert (taken.indices.tolist(), memory.let_go_l1) == ([0], 4.0)
