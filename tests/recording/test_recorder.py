"""The recorder: what it writes, adds up and costs, on ranks that are threads."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from time import sleep

import pytest
import torch

from hvd_sparse import ConfigError, Recorder
from hvd_sparse.collectives import TopkAllgather
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.engine import account as account_module
from hvd_sparse.lab.report.summary import slowest_rank
from hvd_sparse.recording.recorder import SAVED_S, Budget
from hvd_sparse.selectors import ReusedThreshold
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from tests.plans import AllDense
from tests.recordings import NUMEL, last_run, page_of, record, train


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is recorded, whatever it costs."""
    monkeypatch.setattr(Budget, "covers", lambda self, cost_s: True)


@pytest.mark.usefixtures("unlimited")
def test_what_is_recorded_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engines = run_ranks(
        2, lambda t: (train(t, lambda rank: Recorder(path)), t.traffic), timeout_s=30.0
    )
    recording = last_run(path)
    assert recording.run["world_size"] == 2
    assert recording.run["transport"] == "local"
    assert recording.torn_lines == 0
    (plan,) = recording.plans
    assert [b["names"] for b in plan.buckets] == [[f"layer{i}.weight"] for i in range(3)]
    assert [b["k"] for b in plan.buckets] == [150] * 3
    counted = sum(line["steps"] for line in plan.steps)
    assert counted == plan.steps[-1]["step"]
    sent = sum(sum(line["bytes_sent"]) for line in plan.steps)
    assert sent >= 8 * 3 * 135 * counted
    assert sent <= engines[0][1].bytes_sent
    assert plan.residuals
    assert {r["bucket"] for r in plan.residuals} <= {0, 1, 2}
    assert all(r["norm"] > 0 for r in plan.residuals)
    assert all(line["faults"] >= 0 for line in plan.steps)
    assert sum(line["faults"] for line in plan.steps) > 0
    spans = plan.steps[-1]["spans"][0]
    assert set(spans) == {"stage_s", "accumulate_select_s", "exchange_s", "decode_s", "wait_s"}
    start_s, seconds = spans["accumulate_select_s"]
    assert 0 < start_s <= spans["exchange_s"][0]
    assert start_s + seconds <= spans["exchange_s"][0] + 2e-6


@pytest.mark.usefixtures("unlimited")
def test_only_rank_0_writes_unless_the_name_has_a_rank(tmp_path: Path) -> None:
    record(tmp_path / "one.jsonl", world_size=3, steps=3)
    assert [p.name for p in tmp_path.iterdir()] == ["one.jsonl"]
    record(tmp_path / "run-{rank}.jsonl", world_size=3, steps=3)
    for rank in range(3):
        assert last_run(tmp_path / f"run-{rank}.jsonl").run["rank"] == rank


@pytest.mark.parametrize("recording_rank", [0, 1])
def test_ranks_need_not_all_record(tmp_path: Path, recording_rank: int) -> None:
    path = tmp_path / "run-{rank}.jsonl"

    def recorder(rank: int) -> Recorder | None:
        return Recorder(path) if rank == recording_rank else None

    run_ranks(2, lambda t: train(t, recorder, steps=70))
    recording = last_run(tmp_path / f"run-{recording_rank}.jsonl")
    assert bool(recording.ranks) == (recording_rank == 0)


@pytest.mark.usefixtures("unlimited")
def test_the_slowest_rank_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account_module, "COMPARISON_INTERVAL", 4)

    def work(rank: int) -> None:
        if rank == 1:
            sleep(0.01)

    record(tmp_path / "run.jsonl", world_size=3, steps=12, between=work)
    recording = last_run(tmp_path / "run.jsonl")
    assert len(recording.ranks) == 3
    assert len(recording.ranks[0]["exchange_s"]) == 3
    assert slowest_rank(recording) == 1


@pytest.mark.usefixtures("unlimited")
def test_changes_of_the_plan_are_recorded(tmp_path: Path) -> None:
    """Another density after 3 steps, all dense after 6."""
    path = tmp_path / "run.jsonl"
    densities = {0: 0.05, 3: 0.2, 6: None}

    def worker(transport: Transport) -> None:
        spec = TensorSpec("w", (NUMEL,), "torch.float32")
        engine = Engine(AllDense(), Recorder(path))
        engine.connect(transport)
        for step in range(8):
            if step in densities:
                density = densities[step]
                words = f"test {density}"
                engine.reassign(
                    Method(density, NUMEL, ReusedThreshold, TopkAllgather, words)
                    if density
                    else AllDense()
                )
            if engine.takes(spec):
                engine.submit(spec, torch.randn(NUMEL))
                engine.scale = 1.0
                engine.result("w")
        engine.disconnect()

    run_ranks(2, worker)
    plans = [(plan.step, len(plan.buckets)) for plan in last_run(path).plans]
    assert plans == [(0, 0), (0, 1), (3, 0), (3, 1), (6, 0)]
    page = page_of(path)
    assert "3 in this run" in page
    assert "all dense" in page


class StoppedClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_is_kept() -> None:
    clock = StoppedClock()
    budget = Budget(0.01, clock)
    paid = 0
    for _ in range(10_000):
        clock.now += 0.01
        if budget.covers(0.0):
            with budget.paying():
                clock.now += 0.002
            paid += 1
    assert budget.spent_s == pytest.approx(0.002 * paid)
    assert 0.009 <= budget.spent_s / clock.now <= 0.0101
    clock.now += 1e6
    assert budget.covers(SAVED_S)
    with budget.paying():
        clock.now += 2 * SAVED_S
    assert not budget.covers(0.0)


def test_the_cost_is_below_one_percent_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, gradients = itertools.count(), itertools.count()
    tick_s = 1e-4  # from one look at the clock to the next; ten for the writer's gradient

    def now() -> float:
        return tick_s * (next(looks) + 10 * next(gradients))

    monkeypatch.setattr("hvd_sparse.recording.recorder.Budget", lambda share: Budget(share, now))
    recorders = [Recorder(tmp_path / "run.jsonl"), None]
    run_ranks(
        2,
        lambda t: train(
            *(t, recorders.__getitem__),
            steps=100,
            buckets=10,
            between=lambda rank: next(gradients) if rank == 0 else None,
        ),
    )
    assert recorders[0] is not None
    assert 0 < recorders[0].spent_s < 0.01 * now() + 20 * tick_s  # one line over
    recording = last_run(tmp_path / "run.jsonl")
    assert 0 < len(recording.steps) < 100


@pytest.mark.usefixtures("unlimited")
def test_the_file_grows_with_the_logarithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_sparse.recording.recorder.ENTRIES_BEFORE_THINNING", 16)
    record(tmp_path / "run.jsonl", world_size=1, steps=61)
    steps = [line["step"] for line in last_run(tmp_path / "run.jsonl").steps]
    assert steps == [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 36, 44, 52, 60, 61]  # and the last


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.setdefault(tag, []).append((global_step, scalar_value))


@pytest.mark.usefixtures("unlimited")
def test_tensorboard_gets_scalars_on_rank_0() -> None:
    writers = [Writer(), Writer()]
    run_ranks(
        2,
        lambda t: train(t, lambda rank: Recorder(tensorboard=writers[rank])),
        timeout_s=30.0,
    )
    assert not writers[1].scalars
    tags = writers[0].scalars
    assert {"hvd_sparse/bytes_sent", "hvd_sparse/wait_s", "hvd_sparse/exchange_s"} <= set(tags)
    for name in ("density", "threshold", "residual_norm"):
        assert tags[f"hvd_sparse/bucket_0/{name}"][-1][1] > 0
    assert all(0.04 < value < 0.12 for _, value in tags["hvd_sparse/bucket_0/density"])


def test_a_recorder_is_pickled_as_its_arguments() -> None:
    copy = pickle.loads(pickle.dumps(Recorder("x.jsonl", share=0.5)))
    assert (copy.path, copy.share) == ("x.jsonl", 0.5)


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_share_is_checked(share: float) -> None:
    with pytest.raises(ConfigError, match=f"share must be .*, got {share}"):
        Recorder("x", share=share)
