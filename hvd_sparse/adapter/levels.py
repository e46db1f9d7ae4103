"""Whether a world has two levels: what is asked for, possible and worth it; alike on all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from hvd_sparse.engine import Assignment
from hvd_sparse.errors import ConfigError
from hvd_sparse.hosts import Grid, Hosts, Place, grid_of
from hvd_sparse.planner import planner_of
from hvd_sparse.transports import Transport
from hvd_sparse.transports.point_to_point import PointToPointTransport

logger = logging.getLogger("hvd_sparse")

AUTO: Literal["auto"] = "auto"
Hierarchical: TypeAlias = bool | Literal["auto"]


def check_hierarchical(name: str, value: Any) -> None:
    """True, False or "auto"."""
    if not isinstance(value, bool) and value != AUTO:
        raise ConfigError(f"{name} must be True, False or 'auto', got {value!r}")


def place_of_this_rank() -> Place:
    """Where Horovod says that this rank is."""
    import horovod.torch as hvd

    return Place(hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())


def agree_on_levels(
    requested: Hierarchical, place: Place, assignment: Assignment, transport: Transport
) -> Hosts | None:
    """Two levels, or None for one; all ranks call this together, once they are connected.

    Args:
        requested: What the user wants.
        place: Where this rank is.
        assignment: How tensors are reduced.
        transport: Connects the ranks.

    Raises:
        ConfigError: On every rank, where they want different things, or what is impossible.
    """
    told = _told(transport, [requested, list(place)])
    wanted = [each[0] for each in told]
    for rank, theirs in enumerate(wanted):
        if theirs != wanted[0]:
            raise ConfigError(
                f"hierarchical must be the same on all ranks, got rank 0 {wanted[0]!r}, "
                f"rank {rank} {theirs!r}"
            )
    if requested is False or transport.world_size == 1:
        return None
    try:
        hosts = _hosts(requested, [Place(*each[1]) for each in told], assignment, transport)
    except ConfigError as error:
        if requested is True:
            raise ConfigError(f"hierarchical=True is impossible: {error}") from None
        logger.info("rank %d: hierarchical='auto' takes one level: %s", transport.rank, error)
        return None
    if hosts is not None:
        logger.info("rank %d: two levels, %s", transport.rank, hosts.grid)
    return hosts


def _hosts(
    requested: Hierarchical, places: Sequence[Place], assignment: Assignment, transport: Transport
) -> Hosts | None:
    """See `agree_on_levels`.

    Raises:
        ConfigError: There can be no two levels, or they do not pay; says why.
    """
    if not isinstance(transport, PointToPointTransport):
        raise ConfigError(f"transport {transport.name!r} exchanges with all ranks at once only")
    if planner_of(assignment) is not None:
        raise ConfigError("compress: auto plans for one level")
    grid = grid_of(places, transport.rank)
    if requested == AUTO:
        _check_that_it_pays(grid)
    if grid.local_size == 1:
        return None  # each worker is a host
    hosts = Hosts(transport, grid)
    problems = _told(transport, hosts.problem())
    for problem in filter(None, problems):
        raise ConfigError(problem)
    return hosts


def _check_that_it_pays(grid: Grid) -> None:
    """Between hosts, two levels send what one worker of each would: an L-th of the flat form's.

    Raises:
        ConfigError: There is nothing to save.
    """
    if grid.hosts == 1:
        raise ConfigError("there is one host")
    if grid.local_size == 1:
        raise ConfigError("each host has one worker")


def _told(transport: Transport, mine: object) -> list[Any]:
    """What every rank says."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    messages = transport.allgather((text,), channel="levels")
    return [json.loads(bytes(message.numpy())) for message in messages]
