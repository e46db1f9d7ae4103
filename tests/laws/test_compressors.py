"""The laws of an exchange for every selector, and for exchanges that take at others' indices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from hvd_sparse.collectives import Collective, IndexUnion
from hvd_sparse.collectives.registry import ALGORITHMS
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.selectors import (
    BisectionTopK,
    ExactTopK,
    GaussianThreshold,
    GroupedTopK,
    HardThreshold,
    HashedExtraction,
    OnlineThreshold,
    RandomK,
    ReusedThreshold,
    SampledThreshold,
    Selector,
    SidcoThreshold,
    ThresholdSelector,
)
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from hvd_sparse.wire import WIRES
from tests.devices import in_worlds
from tests.laws.buckets import bucket_of, step_of
from tests.laws.test_exchange import (
    GRADIENTS,
    SIZES,
    WORLDS,
    Seen,
    check_laws,
    steps_of_one_rank,
)
from tests.streams import dense

SELECTORS: dict[str, Callable[[], Selector]] = {
    "exact": ExactTopK,
    "reused": partial(ReusedThreshold, 3),
    "sampled": lambda: ThresholdSelector(SampledThreshold()),
    "hashed": lambda: ThresholdSelector(SampledThreshold(), HashedExtraction()),
    "hashed single": lambda: ThresholdSelector(SampledThreshold(), HashedExtraction(4.0, 1)),
    "gaussian": lambda: ThresholdSelector(GaussianThreshold(), tolerance=float("inf")),
    "sidco": lambda: ThresholdSelector(SidcoThreshold()),
    "bisection": BisectionTopK,
    "hard": partial(HardThreshold, 40.0),
    "random": RandomK,
    "grouped": partial(GroupedTopK, 64),
    "online": OnlineThreshold,
}
COLLECTIVES: dict[str, Callable[..., Collective]] = {a.name: a.collective for a in ALGORITHMS}
FED_BACK = [
    a.name
    for a in ALGORITHMS
    if a.keeps_state or issubclass(a.collective, IndexUnion) or a.name == "topk_allgather"
]
"""Those whose steps depend on more than the streams; of the others, one stands for all, as
tests/collectives has them in every world."""


@in_worlds(WORLDS)
@pytest.mark.parametrize("collective", FED_BACK)
@pytest.mark.parametrize("selector", SELECTORS)
def test_mass_is_conserved_and_ranks_agree(
    world_size: int, collective: str, selector: str, device: torch.device
) -> None:
    cases = [(1000, 10, name) for name in GRADIENTS] if world_size == 3 else []
    if collective in ("exdyna", "clt_k"):
        cases += [(n, max(1, n // 100) if n else 0, "spread") for n in SIZES if n < 2000]
    cases += [(1000, 1000, "spread"), (1000, 10, "heavy tail")]
    for numel, k, gradient in cases:
        worker = partial(
            steps_of_one_rank,
            numel=numel,
            k=k,
            selector=SELECTORS[selector],
            collective=COLLECTIVES[collective],
            gradient=GRADIENTS[gradient],
            steps=3,
            device=device,
        )
        check_laws(run_ranks(world_size, worker, timeout_s=20.0))


@in_worlds((3,))
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name not in FED_BACK])
@pytest.mark.parametrize("selector", SELECTORS)
def test_the_laws_hold_for_every_collective(
    world_size: int, collective: str, selector: str, device: torch.device
) -> None:
    test_mass_is_conserved_and_ranks_agree(world_size, collective, selector, device)


@pytest.mark.parametrize("wire", sorted(WIRES))
@pytest.mark.parametrize("name", ["exdyna", "clt_k", "index_union"])
def test_what_a_wire_rounds_off_stays_in_the_residual(name: str, wire: str) -> None:
    collective = COLLECTIVES[name]
    for numel, k in ((1000, 10), (5, 1), (0, 0)):

        def worker(transport: Transport, numel: int = numel, k: int = k) -> list[Seen]:
            return steps_of_one_rank(
                transport,
                numel,
                k,
                ExactTopK if name == "index_union" else OnlineThreshold,
                partial(collective, wire=WIRES[wire]),
                lambda g, n, rank: torch.randn(n, generator=g),
                20,
            )

        ranks = run_ranks(2 + sorted(WIRES).index(wire) % 3, worker, timeout_s=20.0)
        for outcomes in zip(*ranks, strict=True):
            before = sum(o.before.double() + o.gradient.double() for o in outcomes)
            after = sum(o.after.double() for o in outcomes) + dense(outcomes[0].reduced)
            torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
            for other in outcomes[1:]:
                assert torch.equal(outcomes[0].reduced.indices, other.reduced.indices)
                assert torch.equal(outcomes[0].reduced.values, other.reduced.values)


MEMORIES = {
    "plain": MemoryOptions(),
    "local": MemoryOptions(0.5, momentum_kind="local"),
    "local nesterov": MemoryOptions(0.5, nesterov=True, momentum_kind="local"),
    "global": MemoryOptions(0.5, momentum_kind="global"),
    "global nesterov": MemoryOptions(0.5, nesterov=True, momentum_kind="global"),
}


@pytest.mark.slow
@pytest.mark.parametrize("collective", [*COLLECTIVES])
@pytest.mark.parametrize("memory_name", MEMORIES)
def test_any_memory_selector_collective_and_wire_keep_the_law(
    memory_name: str, collective: str
) -> None:
    """Summed over the ranks: residual before + what entered = applied + residual after."""
    numel, k, m = 300, 15, 0.5
    options = MEMORIES[memory_name]

    def worker(transport: Transport, selector: str, wire: str) -> list[tuple[torch.Tensor, ...]]:
        wired = partial(COLLECTIVES[collective], wire=WIRES[wire])
        bucket = bucket_of(transport, numel, k, SELECTORS[selector], wired, options)
        seen: list[tuple[torch.Tensor, ...]] = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + transport.rank)
            g = torch.randn(numel, generator=generator) * 30.0
            memory = bucket.memory
            before, u = memory.residual.double(), memory.tensors().get("momentum", 0.0 * g).double()
            entered = g.double()
            if options.nesterov and options.momentum_kind == "local":
                entered += m * (u + g)
            elif options.momentum:
                entered += m * u
            _, reduction = step_of(bucket, [g])
            seen.append((before + entered, memory.residual.double(), dense(reduction.reduced)))
        return seen

    wires, place = sorted(WIRES), list(MEMORIES).index(memory_name)
    world_size = 2 + place % 3
    for number, selector in enumerate(SELECTORS):  # every wire in turn
        turn = 3 * (place * len(SELECTORS) + number)
        some = {wires[(turn + i) % len(wires)] for i in range(3)}
        for wire in some if collective != "dense" else ("float32",):
            each = partial(worker, selector=selector, wire=wire)
            for outcomes in zip(*run_ranks(world_size, each, timeout_s=20.0), strict=True):
                came, left = (sum(o[i] for o in outcomes) for i in (0, 1))
                assert all(torch.equal(o[2], outcomes[0][2]) for o in outcomes)
                torch.testing.assert_close(
                    left + outcomes[0][2], came, rtol=0, atol=2e-3, msg=f"{selector} over {wire}"
                )


def exchanged_over(
    wire: str, collective: str, world_size: int, numel: int, k: int
) -> list[tuple[list[Seen], int]]:
    """What three steps come to on every rank, and the bytes that it sends."""

    def worker(transport: Transport) -> tuple[list[Seen], int]:
        build = partial(COLLECTIVES[collective], wire=WIRES[wire])
        done = steps_of_one_rank(transport, numel, k, ExactTopK, build, GRADIENTS["spread"], 3)
        return done, transport.traffic.bytes_sent

    return run_ranks(world_size, worker, timeout_s=20.0)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("collective", ["index_union", "exdyna", "clt_k"])
def test_indices_in_another_form_change_only_the_bytes(collective: str, world_size: int) -> None:
    for numel, k in ((0, 0), (1, 1), (5, 2), (1000, 10), (2**16 + 1, 655)):
        plain = exchanged_over("float32", collective, world_size, numel, k)
        coded = exchanged_over("float32+gap", collective, world_size, numel, k)
        check_laws([done for done, _ in coded])
        for (one, plain_bytes), (other, coded_bytes) in zip(plain, coded, strict=True):
            for a, b in zip(one, other, strict=True):
                assert torch.equal(a.reduced.indices, b.reduced.indices)
                assert torch.equal(a.reduced.values, b.reduced.values)
                assert torch.equal(a.after, b.after)
            if k == 655 and world_size > 1 and collective == "index_union":
                saved_bytes = (plain_bytes - coded_bytes) / (3 * k * (world_size - 1))
                assert 2.5 < saved_bytes < 2.9  # of an index's four
