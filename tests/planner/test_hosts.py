"""Plans for hosts with several ranks and one card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_sparse.cli.main import FAILED, main
from hvd_sparse.collectives.two_levels import Levels, flat, shared, two_levels
from hvd_sparse.cost_model import Link
from hvd_sparse.lab.offline_plan import dense_ring, modelled_on_hosts
from hvd_sparse.planner.costs import Line, MethodCosts, Place
from hvd_sparse.policy.load import load_policy

NOTHING = Line(0.0, 0.0)
METHODS = {"topk": MethodCosts("topk_allgather", 0.01, Line(1e-4, 8e-9), NOTHING, NOTHING)}
LEVELS = Levels(4, 8, shared(Link(3e-5, 3.2e-10), 8), Link(1e-5, 1e-10))
MODEL = "def make():\n    import torch\n    return torch.nn.Linear(1000, 500)\n"


@pytest.mark.parametrize("numel", [1 << 20, 10_000_000])
@pytest.mark.parametrize("hierarchical", [False, True])
def test_costs_are_those_of_the_cost_model(numel: int, hierarchical: bool) -> None:
    place = Place("", 32, "modelled", "")
    profile = modelled_on_hosts(place, LEVELS, METHODS, hierarchical=hierarchical)
    costs, form = profile.methods["topk"], two_levels if hierarchical else flat
    expected = form("topk_allgather", LEVELS, numel, numel // 100).seconds
    assert costs.exchange.at(numel) == pytest.approx(expected, rel=1e-3)
    assert profile.dense.at(numel) == pytest.approx(dense_ring(LEVELS, numel).seconds, rel=1e-3)
    encoded = numel / 8 if hierarchical else numel
    assert costs.encode.at(numel) == pytest.approx(1e-4 + 8e-9 * encoded)


def test_the_command_takes_the_better_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "hosts_models.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hvd_sparse.planner.measure.NUMELS", (1 << 8, 1 << 12))
    world = ["--bandwidth", "100mbit", "--local-bandwidth", "300gbyte", "--latency", "1us"]
    work = ["plan", "hosts_models:make", "--hosts", "4", "--local", "8", *world]
    policy = tmp_path / "policy.yaml"
    assert main([*work, "--json", "--write-policy", str(policy)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == 32
    flat_s, levels_s = report["forms"].values()
    assert report["costs"].endswith("4 hosts x 8 ranks, two levels")
    assert report["predicted_s"] == levels_s < flat_s / 3
    assert levels_s < report["dense_s"]
    assert load_policy(policy).hierarchical == "auto"
    assert main([*work[:4], "--local", "1", *world, "--write-policy", str(policy)]) == 0
    assert load_policy(policy).hierarchical is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0"], "--hosts must be a whole number of at least 1, got 0"),
        (["--hosts", "2", "--local", "0"], "--local must be a whole number of at least 1, got 0"),
        (["--hosts", "1"], "--ranks must be a whole number of at least 2, got 1"),
        (["--hosts", "2", "--profile", "x.json"], "--hosts takes no --profile"),
    ],
)
def test_wrong_hosts_are_named(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["plan", "torch.nn:Identity", *arguments]) == FAILED
    assert message in capsys.readouterr().err


def test_a_model_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("hvd_sparse.planner.measure.NUMELS", (1 << 8, 1 << 12))
    assert main(["plan", "torch.nn:Identity"]) == FAILED
    told = "model 'torch.nn:Identity' has no parameter that is trained and can be compressed"
    assert told in capsys.readouterr().err
