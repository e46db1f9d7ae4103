"""Whether there are two levels: the same answer on all ranks, with the reason."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

import hvd_sparse
from hvd_sparse.adapter.levels import agree_on_levels
from hvd_sparse.collectives.two_levels import Levels, flat, through_memory, two_levels
from hvd_sparse.cost_model import ORDINARY_LINK, Link, Pace
from hvd_sparse.engine import TensorSpec
from hvd_sparse.errors import ConfigError
from hvd_sparse.hosts import Slot
from hvd_sparse.methods import METHODS
from hvd_sparse.planner import Planner
from hvd_sparse.policy import assign, load_policy
from hvd_sparse.transports import LocalTransport, run_ranks
from tests.grids import slots

SLOW = replace(ORDINARY_LINK, beta_s_per_byte=8e-8)  # 100 Mb/s
FREE = Link(0.0, 0.0, pace=Pace(added_values=1e-8))  # but adding dense vectors is not
SPECS = [TensorSpec("w", (1 << 22,), "torch.float32")]


def decided(requested: Any, where: list[Slot], link: Any = SLOW, **changes: Any) -> list[Any]:
    """What each rank is told: the number of hosts and workers, None, or an error's words."""
    assignment = changes.get("assignment", METHODS["topk"](density=0.01).make())

    def worker(transport: LocalTransport) -> Any:
        transport.link = link
        wish = requested[transport.rank] if isinstance(requested, list) else requested
        try:
            below = changes.get("below", {}).get(transport.rank, 0)
            slot = where[transport.rank]
            hosts = agree_on_levels(wish, below, slot, assignment, SPECS, transport)
        except ConfigError as error:
            return str(error)
        return hosts and (hosts.grid.hosts, hosts.grid.local_size)

    return run_ranks(len(where), worker, timeout_s=30.0)


def test_what_is_asked_for_and_possible() -> None:
    assert decided(True, slots(2, 2)) == [(2, 2)] * 4
    assert decided(True, slots(3)) == [(1, 3)] * 3
    assert decided("auto", slots(2, 2)) == [(2, 2)] * 4
    assert decided(False, slots(2, 2)) == [None] * 4
    assert decided(True, slots(1, 1)) == [None] * 2  # each worker is a host: one level
    assert decided(True, slots(1)) == [None]


@pytest.mark.parametrize(
    ("where", "link", "reason"),
    [
        (slots(2, 1), SLOW, "every host must have as many workers"),
        (slots(2, 2)[:3], SLOW, "a process set must have whole hosts"),
        (slots(2), SLOW, "there is one host"),
        (slots(1, 1), SLOW, "each host has one worker"),
        (slots(2, 2), FREE, "the cost model expects"),
    ],
)
def test_auto_takes_one_level_and_says_why(
    where: list[Slot], link: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hvd_sparse"):
        assert decided("auto", where, link) == [None] * len(where)
    told = [record.getMessage() for record in caplog.records]
    assert sum("takes one level" in each and reason in each for each in told) == len(where)


@pytest.mark.parametrize("name", ["oktopk", "topk", "exdyna"])
def test_auto_judges_a_method_by_its_own_collective(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where that loses, what the cost model expects of it is told."""
    method = METHODS[name](density=0.01).make()
    algorithm = "topk_allgather" if name == "topk" else name
    n = SPECS[0].numel
    levels = Levels(2, 2, FREE, through_memory(FREE))
    expected = [
        1e3 * form(algorithm, levels, n, method.k(n)).seconds for form in (two_levels, flat)
    ]
    with caplog.at_level(logging.INFO, "hvd_sparse"):
        assert decided("auto", slots(2, 2), FREE, assignment=method) == [None] * 4
    told = "expects {:.3g} ms a step, and {:.3g} ms of one level".format(*expected)
    assert sum(told in record.getMessage() for record in caplog.records) == 4


def test_what_is_impossible_is_refused_by_name() -> None:
    for answer in decided(True, slots(2, 1)):
        assert answer.startswith("hierarchical=True is impossible: every host must have")
    planned = assign(
        load_policy({"version": 1, "rules": [{"compress": "auto", "compressor": "topk"}]}),
        None,
        None,
    )
    for answer in decided(True, slots(2, 2), assignment=Planner(planned, None)):
        assert answer == "hierarchical=True is impossible: compress: auto plans for one level"
    for answer in decided([True, "auto"], slots(2)):
        assert answer == (
            "hierarchical must be the same on all ranks, got rank 0 True, rank 1 'auto'"
        )
    for answer in decided(False, slots(2), below={1: 1000}):
        assert answer == "dense_below must be the same on all ranks, got rank 0 0, rank 1 1000"


def test_arguments_and_policies_have_it() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="hierarchical must be True, False or 'auto', got 'yes'"):
        hvd_sparse.Compression.topk(model.named_parameters(), hierarchical="yes")
    for value in (True, False, "auto"):
        policy = {"version": 1, "hierarchical": value, "rules": [{"compress": "never"}]}
        assert load_policy(policy).hierarchical == value
    with pytest.raises(ConfigError, match="hierarchical"):
        load_policy({"version": 1, "hierarchical": "yes", "rules": []})
