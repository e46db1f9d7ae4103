"""What benchmarks.convergence trains and reports."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.convergence import Runs, run_all
from benchmarks.convergence_adamw import ADAMW_DENSITIES, Recommender
from benchmarks.convergence_cases import (
    DENSITIES,
    MAX_MEAN_DENSITY,
    OTHERS,
    PAPER_MEMORY,
    PROMISED,
    SEEDS,
    SGD_TASKS,
    TRIED_MEMORIES,
    Case,
    cases,
)
from benchmarks.convergence_report import markdown, plot, rows_of
from benchmarks.convergence_run import Run
from benchmarks.convergence_tasks import Budget, Digits, Sources
from benchmarks.powersgd import Compressed
from hvd_sparse.engine import Method
from hvd_sparse.memories import (
    ErrorFeedback,
    GlobalMomentum,
    MomentumCorrection,
    Preconditioned,
)
from hvd_sparse.transports import Transport, run_ranks

KINDS = {
    "plain": ErrorFeedback,
    "local": MomentumCorrection,
    "global": GlobalMomentum,
    "beta1=0": ErrorFeedback,
    "sparse_adamw": Preconditioned,
}


def case_of(method: str, memory: str, density: float = 0.01, wire: str = "float32") -> Case:
    return Case("digits", method, memory, density, wire, 0)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = {d: Budget(steps=24, lr=5 * d**0.5, dense_steps=2, warmup_steps=4) for d in DENSITIES}
    monkeypatch.setattr(Digits, "budgets", budgets)


@pytest.mark.parametrize("memory", KINDS)
@pytest.mark.parametrize("method", [*PROMISED, *OTHERS])
def test_a_method_has_the_memory_that_its_row_names(method: str, memory: str) -> None:
    made = case_of(method, memory).make()
    assert isinstance(made, Method)
    assert type(made.memory.make(8, torch.device("cpu"), 4)) is KINDS[memory]


def test_every_promised_method_is_trained_with_its_papers_memory_and_the_best() -> None:
    done = {case._replace(seed=0) for case in cases() if case.wire == "float32"}
    for task in (each.name for each in SGD_TASKS):
        for density in DENSITIES:
            for method in PROMISED:
                for memory in (PAPER_MEMORY.get(method, "plain"), *TRIED_MEMORIES):
                    assert Case(task, method, memory, density, "float32", 0) in done


def test_lossy_wires_have_rows() -> None:
    assert {case.wire for case in cases()} == {"float32", "float16+gap", "qsgd4"}


def test_recipes_were_not_chosen_on_the_seeds_that_are_reported() -> None:
    assert 0 not in SEEDS
    assert {case.seed for case in cases()} == set(SEEDS)


def test_at_density_0_001_a_whole_run_stays_below_the_promised_mean() -> None:
    """Dense steps and warm-up included."""
    for case in cases():
        made = case.make()
        if case.density == 0.001 and isinstance(made, Method) and not case.has_adamw:
            steps = case.budget.steps
            density = sum(made.warmup.density_at(s, made.density) for s in range(steps)) / steps
            assert density <= MAX_MEAN_DENSITY, case


def test_a_run_that_was_stopped_goes_on(short: None, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    chosen = [case_of("dense", "plain"), case_of("oktopk", "global")]
    run_all(chosen[:1], Runs(path))
    path.write_text(path.read_text() + '{"case": {"task"')
    run_all(chosen, Runs(path))
    assert len(path.read_text().splitlines()) == 2
    first, second = (Runs(path).get(case) for case in chosen)
    assert first is not None
    assert second is not None
    assert first.updates == 24
    assert first.mbytes == first.dense_mbytes > second.mbytes
    # 18 steps after 6 of warm-up, each of a hundredth of the parameters.
    assert second.updates == pytest.approx(18 * 0.01, rel=0.1)
    # Two dense steps and the warm-up beside them; a gradient that is exactly 0 is not counted.
    assert 0.07 < second.applied < (2 + 4 * 0.1 + 18 * 0.011) / 24
    assert second.late_applied == pytest.approx(0.01, rel=0.1)


def test_adamw_is_trained_without_a_second_momentum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Recommender, "budgets", dict.fromkeys(ADAMW_DENSITIES, Budget(60, 0.003, 4, 0))
    )
    sparse = Case("recommender", "topk", "sparse_adamw", 0.003, "float32", 0, rate=3.0, workers=2)
    chosen = [sparse.dense, sparse, sparse._replace(memory="plain")]
    assert [case.beta1 for case in chosen] == [0.9, 0.0, 0.9]
    assert chosen[0].density == ADAMW_DENSITIES[0]
    runs = Runs(tmp_path / "runs.jsonl")
    run_all(chosen, runs)
    finals = [run.final for case in chosen if (run := runs.get(case)) is not None]
    assert len(set(finals)) == 3
    assert max(finals) < 0.7
    found = {case: run for case in chosen if (run := runs.get(case)) is not None}
    assert "| recommender | 0.003 | topk, rate x 3, P = 2 | sparse_adamw | " in markdown(found)


def test_a_training_by_another_recipe_is_done_again(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of("dense", "plain")
    run_all([case], Runs(tmp_path / "runs.jsonl"))
    longer = Budget(steps=25, lr=0.05, dense_steps=2, warmup_steps=4)
    monkeypatch.setattr(Digits, "budgets", {0.01: longer})
    assert Runs(tmp_path / "runs.jsonl").get(case) is None


def test_rows_say_schedule_densities_updates_and_bytes(short: None, tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs.jsonl")
    chosen = [case_of("dense", "plain", 0.001), case_of("dgc", "local", 0.001, "qsgd4")]
    run_all(chosen, runs)
    found = {case: run for case in chosen if (run := runs.get(case)) is not None}
    rows = {row.metric: row for row in rows_of(found) if row.case != "digits, dense, 24 steps"}
    assert {row.case for row in rows.values()} == {"digits, density 0.001, dgc, local, qsgd4"}
    assert rows["mean density over the run"].baseline == "4 steps from density 0.25; 24 steps"
    assert rows["mean density over the run"].met is False  # it is far too short
    for metric in (
        "test accuracy, one seed",
        "worse than dense by",
        "density of the last quarter",
        "updates per parameter after the warm-up",
        "megabytes sent by a rank",
    ):
        assert metric in rows
    assert "| digits | 0.001 | dgc | local | qsgd4 | 1 | " in markdown(found)
    plot(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_larger_text_is_larger() -> None:
    task = Sources()
    assert len(task.train) + len(task.test) > 10_000_000
    assert sum(p.numel() for p in task.model(0).parameters()) > 2_000_000
    assert task.data() == Sources().data()


def test_two_levels_stand_beside_the_flat_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(steps=12, lr=0.05, dense_steps=1, warmup_steps=3)
    monkeypatch.setattr(Digits, "budgets", {0.001: budget})
    flat, levels = (case_of("oktopk", "global", 0.001)._replace(hosts=h) for h in (0, 2))
    done = {case._replace(seed=0) for case in cases()}
    assert {flat, levels} <= done
    runs = Runs(tmp_path / "runs.jsonl")
    runs.add(flat.dense, Run(final=90.0))
    chosen = [flat.dense, flat, levels]
    run_all(chosen, runs)
    found = {case: run for case in chosen if (run := runs.get(case)) is not None}
    assert found[levels].late_applied == pytest.approx(found[flat].late_applied, rel=0.3)
    # A rank selects of its shard alone; two exchange half of what four do.
    assert found[levels].density == pytest.approx(found[flat].density / 2, rel=0.1)
    assert found[levels].mbytes < found[flat].mbytes
    named = {row.case for row in rows_of(found)}
    assert "digits, density 0.001, oktopk, global, float32, 2 hosts x 2" in named
    assert "| oktopk, 2 hosts x 2 | global |" in markdown(found)


def test_trainings_of_before_there_were_two_levels_are_read(short: None, tmp_path: Path) -> None:
    case, path = case_of("dense", "plain"), tmp_path / "runs.jsonl"
    Runs(path).add(case, Run(final=90.0))
    assert '"hosts": 0' in path.read_text()
    path.write_text(path.read_text().replace(', "hosts": 0', ""))
    assert Runs(path).get(case) is not None


def test_power_sgd_loses_nothing_of_what_it_has_not_sent() -> None:
    ranks = [torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]

    def worker(transport: Transport) -> tuple[Tensor, Tensor]:
        def mean(x: Tensor) -> Tensor:
            return transport.allreduce_sum(x.reshape(-1), channel="x").view_as(x) / 2

        compressed, total = Compressed(2, mean), torch.zeros(6, 4, 3)
        for _ in range(200):
            total += compressed.average("x", ranks[transport.rank])
        return total / 200, compressed.average("x", ranks[transport.rank])

    (mean, last), (other_mean, other_last) = run_ranks(2, worker)
    assert torch.equal(mean, other_mean)
    assert torch.equal(last, other_last)
    assert torch.linalg.matrix_rank(last.flatten(1)) == 2
    torch.testing.assert_close(mean, (ranks[0] + ranks[1]) / 2, atol=0.1, rtol=0)
