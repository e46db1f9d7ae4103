"""The laws of an exchange for every selector, and for exchanges that take at others' indices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from hvd_sparse.collectives import (
    Collective,
    CyclicLeader,
    ExDyna,
    IndexUnion,
    OkTopk,
    TopkAllgather,
)
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
from tests.laws.test_exchange import (
    GRADIENTS,
    SIZES,
    WORLDS,
    Outcome,
    check_laws,
    dense,
    steps_of_one_rank,
)

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
COLLECTIVES: dict[str, Callable[..., Collective]] = {
    "topk_allgather": TopkAllgather,
    "oktopk": OkTopk,
    "union": IndexUnion,
    "exdyna": ExDyna,
    "clt_k": CyclicLeader,
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("selector", SELECTORS)
def test_mass_is_conserved_and_ranks_agree(world_size: int, collective: str, selector: str) -> None:
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
        )
        check_laws(run_ranks(world_size, worker, timeout_s=20.0))


@pytest.mark.parametrize("wire", ["float16", "qsgd4+gap", "bfloat16"])
@pytest.mark.parametrize("name", ["exdyna", "clt_k", "index_union"])
def test_what_a_wire_rounds_off_stays_in_the_residual(name: str, wire: str) -> None:
    collective = {**COLLECTIVES, "index_union": IndexUnion}[name]
    for numel, k in ((1000, 10), (5, 1), (0, 0)):

        def worker(transport: Transport, numel: int = numel, k: int = k) -> list[Outcome]:
            return steps_of_one_rank(
                transport,
                numel,
                k,
                ExactTopK if name == "index_union" else OnlineThreshold,
                partial(collective, wire=WIRES[wire]),
                lambda g, n, rank: torch.randn(n, generator=g),
                20,
            )

        ranks = run_ranks(3, worker, timeout_s=20.0)
        for outcomes in zip(*ranks, strict=True):
            before = sum(o.before.double() + o.gradient.double() for o in outcomes)
            after = sum(o.after.double() for o in outcomes) + dense(outcomes[0].reduced)
            torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
            for other in outcomes[1:]:
                assert torch.equal(outcomes[0].reduced.values, other.reduced.values)
