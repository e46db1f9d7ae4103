"""Whether a world has two levels: what is asked for, possible and worth it; alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from hvd_sparse.collectives.automatic import AutomaticCollective, link_of
from hvd_sparse.collectives.registry import LOSSLESS_CANDIDATES, name_of
from hvd_sparse.collectives.two_levels import Levels, flat, through_memory, two_levels
from hvd_sparse.engine import Assignment, Method, TensorSpec
from hvd_sparse.errors import ConfigError, logger
from hvd_sparse.hosts import Grid, Hosts, Slot, grid_of
from hvd_sparse.planner import planner_of
from hvd_sparse.planner.costs import REFERENCE_NUMEL
from hvd_sparse.transports import Transport
from hvd_sparse.transports.point_to_point import PointToPointTransport
from hvd_sparse.transports.transport import gather_json

CHANNEL = "levels"
AUTO: Literal["auto"] = "auto"
Hierarchical: TypeAlias = bool | Literal["auto"]


def check_hierarchical(name: str, value: Hierarchical) -> Hierarchical:
    """True, False or "auto"."""
    if not isinstance(value, bool) and value != AUTO:
        raise ConfigError(f"{name} must be True, False or 'auto', got {value!r}")
    return value


def agree_on_levels(
    requested: Hierarchical,
    dense_below: int,
    slot: Slot,
    assignment: Assignment,
    specs: Sequence[TensorSpec],
    transport: Transport,
) -> Hosts | None:
    """Two levels, or None for one; all ranks call this together, once they are connected.

    Args:
        requested: What the user wants.
        dense_below: Compared with the others', as what is requested.
        slot: Where this rank is.
        assignment: How tensors are reduced; the same on all ranks.
        specs: The tensors.
        transport: Connects the ranks.

    Raises:
        ConfigError: On every rank, where they want different things, or what is impossible.
    """
    mine = {"hierarchical": requested, "dense_below": dense_below}
    told = gather_json(transport, [mine, list(slot)], CHANNEL)
    for rank, (theirs, _) in enumerate(told):
        for name, value in told[0][0].items():
            if theirs[name] != value:
                raise ConfigError(
                    f"{name} must be the same on all ranks, got rank 0 {value!r}, rank {rank} "
                    f"{theirs[name]!r}"
                )
    if requested is False or transport.world_size == 1:
        return None
    slots = [Slot(*each) for _, each in told]
    try:
        if planner_of(assignment) is not None:
            raise ConfigError("compress: auto plans for one level")
        grid = grid_of(slots, transport.rank)
        if requested == AUTO:
            _check_that_it_pays(grid, assignment, specs, transport)
        hosts = _connected(grid, transport)
    except ConfigError as error:
        if requested is True:
            raise ConfigError(f"hierarchical=True is impossible: {error}") from None
        logger.info("rank %d: hierarchical='auto' takes one level: %s", transport.rank, error)
        return None
    logger.info("rank %d: %s exchange on two levels", transport.rank, grid)
    return hosts


def _check_that_it_pays(
    grid: Grid, assignment: Assignment, specs: Sequence[TensorSpec], transport: Transport
) -> None:
    """By the cost model, and by the link among all ranks at once, which share the hosts' cards."""
    if grid.hosts == 1:
        raise ConfigError("there is one host")
    if grid.local_size == 1:
        raise ConfigError("each host has one worker")
    link = link_of(transport)
    levels = Levels(grid.hosts, grid.local_size, link, through_memory(link))
    methods: dict[str, tuple[Method, int]] = {}
    for spec in specs:
        method = assignment.choice_of(spec).method
        if method is not None:
            _, numel = methods.get(method.description, (method, 0))
            methods[method.description] = method, numel + spec.numel
    vectors = [  # the tensors of each method as one
        (_algorithms(method, transport), numel, method.k(numel))
        for method, numel in methods.values()
    ]
    mine = [
        sum(min(form(name, levels, n, k).seconds for name in names) for names, n, k in vectors)
        for form in (flat, two_levels)
    ]
    one_s, two_s = gather_json(transport, mine, CHANNEL)[0]
    if not two_s < one_s:
        raise ConfigError(
            f"the cost model expects {1e3 * two_s:.3g} ms a step, and {1e3 * one_s:.3g} ms of one "
            "level"
        )


def _algorithms(method: Method, transport: Transport) -> Sequence[str]:
    """A method's collective, or those that it may choose from; all ranks call this together."""
    made = method.collective(transport, REFERENCE_NUMEL, method.k(REFERENCE_NUMEL))
    if isinstance(made, AutomaticCollective):
        return list(made.candidates)
    return [name_of(made)] if name_of(made) else LOSSLESS_CANDIDATES


def _connected(grid: Grid, transport: Transport) -> Hosts | None:
    """What exchanges on two levels; None where each worker is a host."""
    if grid.local_size == 1:
        return None
    assert isinstance(transport, PointToPointTransport)
    hosts = Hosts(transport, grid)
    for problem in filter(None, gather_json(transport, hosts.problem(), CHANNEL)):
        raise ConfigError(f"the workers of a host cannot share memory: {problem}")
    return hosts
