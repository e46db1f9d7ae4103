"""The adapter under horovodrun: real processes, gloo and MPI."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hvd_sparse.lab.report.log import read_runs
from hvd_sparse.lab.report.page import report_page
from tests.launch import horovodrun, launch_environment, python_command
from tests.ranks import Ranks, World, with_ranks
from tests.workers.adapter_alone import train_alone
from tests.workers.adapter_elastic import train_through_a_death
from tests.workers.adapter_equalities import PLANNED, SCENARIOS, check
from tests.workers.adapter_join import join_in_the_middle
from tests.workers.adapter_ledger import keep_the_books
from tests.workers.adapter_planned import train_through_changes
from tests.workers.adapter_refusals import refuse_a_second_optimizer, refuse_operations
from tests.workers.adapter_strangers import train_with_a_stranger
from tests.workers.adapter_transitions import clip_all_tensors, freeze_a_layer
from tests.workers.adapter_uncalled import train_by_defaults
from tests.workers.adapter_waiting import cpu_shares

LOSSLESS_IN = {World(2): "topk", World(3): "oktopk", World(3, "mpi"): "topk"}


@with_ranks(*LOSSLESS_IN)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_lossless_exchange_trains_to_the_same_weights(ranks: Ranks, scenario: str) -> None:
    ranks.run(check, scenario, LOSSLESS_IN[ranks.world])


@with_ranks(World(2))
@pytest.mark.parametrize("scenario", PLANNED)
def test_a_planner_hands_momentum_over(ranks: Ranks, scenario: str) -> None:
    ranks.run(check, scenario, "topk")


@with_ranks(World(2))
def test_no_norm_spikes_when_a_planner_restarts_or_changes_its_mind(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(train_through_changes, str(tmp_path / "run.jsonl"))
    runs = read_runs(tmp_path / "run.jsonl")
    told = [[(t["chosen"] > 0, t["recalled"]) for t in run.trials] for run in runs]
    assert told == [[(True, False)], [(True, True), (False, False), (True, True)]]
    page = report_page(runs, runs[1])
    assert "The planner chose plan" in page
    assert "as an earlier run had found" in page
    assert "The planner stayed dense, at step" in page


@with_ranks(World(3))
@pytest.mark.parametrize("place", ["large", "bias", "other", "table.weight"])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_skipped_step_costs_no_gradient(ranks: Ranks, place: str, scaled: bool) -> None:
    for method, arguments in (
        ("oktopk", {"density": 0.02}),
        ("dgc", {"density": 0.02, "momentum": 0.0, "bucket_numel": 2000}),
        ("exdyna", {"density": 0.02, "dense_below": 2500}),
    ):
        if not (scaled and place == "table.weight"):
            ranks.run(keep_the_books, place, scaled, method, arguments)


@with_ranks(World(3, "mpi"))
def test_a_skipped_step_costs_no_gradient_under_mpi(ranks: Ranks) -> None:
    ranks.run(keep_the_books, "bias", True, "oktopk", {"density": 0.02})
    ranks.run(keep_the_books, "table.weight", False, "oktopk", {"density": 0.02})


@with_ranks(World(2))
@pytest.mark.parametrize("scenario", ["average", "process_sets", "num_groups"])
@pytest.mark.parametrize("transport", [pytest.param("horovod", marks=pytest.mark.slow), "gloo"])
def test_every_transport_can_be_asked_for(ranks: Ranks, scenario: str, transport: str) -> None:
    ranks.run(check, scenario, "topk", env={"HVD_SPARSE_TRANSPORT": transport})


@with_ranks(World(2), World(3))
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_clipping_is_over_all_tensors_of_a_rank(ranks: Ranks, op: str) -> None:
    for limit in (0.5, 1e6):
        ranks.run(clip_all_tensors, limit, op)


@with_ranks(World(2))
@pytest.mark.parametrize("kind", ["local", "global"])
def test_a_frozen_layer_stays_where_it_is(ranks: Ranks, kind: str) -> None:
    ranks.run(freeze_a_layer, kind)


@with_ranks(World(2), World(2, "mpi"))
def test_what_cannot_work_is_refused_by_name(ranks: Ranks) -> None:
    for rank in ranks.run(refuse_operations):
        for op in ("Min", "Max", "Product", "Adasum"):
            assert f"REFUSED op=hvd.{op} " in rank.output
    ranks.run(refuse_a_second_optimizer)


@pytest.mark.slow
@with_ranks(World(2))
def test_a_rank_that_waits_leaves_its_processor_alone(ranks: Ranks) -> None:
    """Horovod's own wait takes all of one: a share of 1."""
    shares = ranks.run(cpu_shares)[1].result
    assert len(shares) == 6
    assert max(shares) < 0.3, shares


@with_ranks(World(2, "gloo"))
def test_a_constructor_that_was_not_called_has_its_defaults(ranks: Ranks) -> None:
    assert all(told.result == [3, 3] for told in ranks.run(train_by_defaults))


@with_ranks(World(2, "gloo"))
def test_a_parameter_that_the_compression_was_not_given_is_named(ranks: Ranks) -> None:
    ranks.run(train_with_a_stranger)


@pytest.mark.launches
def test_join_is_refused_and_no_rank_hangs() -> None:
    done = horovodrun(3, join_in_the_middle, timeout=90, check=False)
    assert done.returncode != 0
    assert "hvd.join() cannot be used" in done.stdout + done.stderr


@pytest.mark.launches
def test_an_impossible_transport_says_why() -> None:
    env = {"HVD_SPARSE_TRANSPORT": "mpi"}
    done = horovodrun(2, check, "average", "topk", env=env, timeout=90, check=False)
    assert done.returncode != 0
    assert "HVD_SPARSE_TRANSPORT" in done.stdout + done.stderr


@pytest.mark.parametrize("elastic", ["", "1"])
def test_a_process_of_its_own(elastic: str) -> None:
    done = subprocess.run(
        python_command(train_alone),
        env=launch_environment({"HOROVOD_ELASTIC": elastic}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TRAINED" in done.stdout


@pytest.mark.launches
def test_elastic_recovers_with_its_residuals() -> None:
    done = horovodrun(
        2,
        train_through_a_death,
        hosts="localhost:1,127.0.0.1:1",
        options=["--min-np", "1", "--network-interface", "lo"],
        timeout=150,
    )
    assert "RECOVERED world 1" in done.stdout
