"""`stats()`: snapshots, what lies between two of them, and their text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.engine.stats import FIGURES, BucketStats, Stats
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks

NUMEL = 10_000
SPECS = [TensorSpec(f"layer{i}.weight", (NUMEL,), "torch.float32") for i in range(3)]
OPTIONS: dict[str, Any] = {"bucket_numel": NUMEL, "wire": "float16+gap", "residual_decay": 0.9}


def take_steps(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        for spec in SPECS:
            engine.submit(spec, torch.randn(NUMEL))
        engine.scale = 0.5
        for spec in SPECS:
            engine.result(spec.name)


def snapshots() -> dict[str, Stats]:
    """Before the first step, after 2 and 5, and after 4 more by another method."""

    def worker(transport: Transport) -> dict[str, Stats]:
        torch.manual_seed(transport.rank)
        warm = METHODS["topk"](
            density=0.01, collective="topk_allgather", warmup_steps=4, **OPTIONS
        ).make()
        engine, found = Engine(warm), {}
        engine.connect(transport)
        found["none"] = engine.stats()
        take_steps(engine, 2)
        found["two"] = engine.stats()
        take_steps(engine, 3)
        found["five"] = engine.stats()
        engine.reassign(METHODS["oktopk"](density=0.02).make())
        found["reassigned"] = engine.stats()
        take_steps(engine, 4)
        found["nine"] = engine.stats()
        engine.disconnect()
        found["closed"] = engine.stats()
        return found

    return run_ranks(2, worker, timeout_s=60.0)[0]


@pytest.fixture(scope="module")
def of() -> dict[str, Stats]:
    return snapshots()


def test_a_snapshot_stays_what_it_was(of: dict[str, Stats]) -> None:
    assert [each.steps for each in of.values()] == [0, 2, 5, 5, 9, 9]
    for bucket in of["two"].buckets:
        assert (bucket.steps, len(bucket.history)) == (2, 2)
        for name in FIGURES:
            total = sum(getattr(step, name) for step in bucket.history)
            assert getattr(bucket, name) == pytest.approx(total), name


def test_totals_never_go_back(of: dict[str, Stats]) -> None:
    assert of["reassigned"].buckets == ()
    for name in FIGURES:
        counts = [getattr(each.totals, name) for each in of.values()]
        assert counts == sorted(counts), name
    assert of["reassigned"].totals == of["five"].totals != of["nine"].totals
    assert of["nine"].let_go_l1 > of["two"].let_go_l1 > 0


def test_what_lies_between_two_snapshots(of: dict[str, Stats]) -> None:
    between = of["five"].since(of["two"])
    assert between.steps == 3
    for bucket, then, now in zip(
        between.buckets, of["two"].buckets, of["five"].buckets, strict=True
    ):
        assert bucket.steps == len(bucket.history) == 3
        assert bucket.bytes_sent == now.bytes_sent - then.bytes_sent > 0
        assert bucket.bytes_sent == sum(step.bytes_sent for step in bucket.history)
        assert bucket.density == pytest.approx(bucket.nnz_applied / 3 / NUMEL)
        assert bucket.let_go_l1 == now.let_go_l1 - then.let_go_l1 > 0
        assert bucket.names == now.names
    assert between.totals.bytes_sent == sum(b.bytes_sent for b in between.buckets)
    over = of["nine"].since(of["five"])  # another plan: its buckets began after the first one
    assert (over.steps, [b.steps for b in over.buckets]) == (4, [4])
    assert over.totals.bytes_sent == over.buckets[0].bytes_sent
    assert of["nine"].since(of["nine"]).totals == type(over.totals)()
    with pytest.raises(ValueError, match="9 steps"):
        of["five"].since(of["nine"])


def test_a_bucket_says_how_it_is_compressed(of: dict[str, Stats]) -> None:
    told = [(b.compressor, b.collective, b.wire, b.density_target) for b in of["five"].buckets]
    assert told == [("topk", "topk_allgather", "float16+gap", 0.01)] * 3
    (last,) = of["nine"].buckets
    assert (last.compressor, last.collective, last.wire) == ("oktopk", "oktopk", "float32")
    for bucket in (*of["five"].buckets, last):
        assert bucket.threshold > 0
    first: BucketStats = of["two"].buckets[0]
    assert first.density_wanted > 10 * first.density_target  # the warm-up begins at 0.25
    assert first.nnz_selected == pytest.approx(first.nnz_wanted, rel=0.1)


def test_the_text_is_a_short_table(of: dict[str, Stats]) -> None:
    text = str(of["five"])
    assert text.splitlines()[0].startswith("5 steps by local: ")
    assert len(text.splitlines()) == 7
    sent = sum(bucket.bytes_sent for bucket in of["five"].buckets)
    assert f"({of['five'].dense_bytes / sent:.3g} × less than dense)" in text
    for bucket in of["five"].buckets:  # one rank's share, and that of all ranks together
        assert bucket.density_selected <= bucket.density
    for word in ("topk", "topk_allgather", "float16+gap", "layer0.weight", "let go"):
        assert word in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert str(of["none"]) == "no step yet (one worker alone exchanges nothing)"
    dense = str(replace(of["five"], dense={"under dense_below=1024": ["a", "b"]}))
    assert "\ndense, under dense_below=1024: a … b (2)" in dense
    assert "9 steps" in str(of["closed"])
    buckets = tuple(BucketStats(names=(f"w{i}",), numel=i, k=1, steps=1) for i in range(500))
    many = str(Stats("gloo", buckets, steps=1))
    assert len(many.splitlines()) < 20
    assert "w499" in many
    assert "and 488 smaller buckets" in many
