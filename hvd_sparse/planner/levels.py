"""Profiles of hosts with several ranks and one network card, by the cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hvd_sparse.collectives.registry import COSTED
from hvd_sparse.collectives.two_levels import Levels, Prediction, dense_ring, flat, two_levels
from hvd_sparse.errors import ConfigError
from hvd_sparse.planner.profile import REFERENCE_NUMEL, Line, MethodCosts, Place, Profile


def modelled_on_hosts(
    place: Place, levels: Levels, methods: Mapping[str, MethodCosts], *, hierarchical: bool
) -> Profile:
    """A profile of hosts that are not there.

    Args:
        place: The world.
        levels: The hosts, and the links between and inside them.
        methods: Measured costs of encoding and decoding; their exchanges are not read.
        hierarchical: In two levels, where a rank encodes a shard; else flat.

    Raises:
        ConfigError: A method's collective has no formula.
    """
    form = two_levels if hierarchical else flat
    shards = levels.local_size if hierarchical else 1

    def costs_of(costs: MethodCosts) -> MethodCosts:
        if costs.collective not in COSTED:
            raise ConfigError(f"the cost model has no formula for {costs.collective!r}")

        def predicted(numel: int) -> Prediction:
            k = max(1, round(costs.density * numel))
            return form(costs.collective, levels, numel, k, costs.wire)

        return replace(costs, encode=costs.encode.times(1, 1 / shards), exchange=_line(predicted))

    with_exchange = {name: costs_of(costs) for name, costs in methods.items()}
    words = f"cost model: {levels.hosts} hosts x {levels.local_size} ranks, "
    words += "two levels" if hierarchical else "flat"
    return Profile(place, _line(lambda numel: dense_ring(levels, numel)), with_exchange, words)


def _line(predicted: Callable[[int], Prediction]) -> Line:
    """The line through two sizes: at one density, a prediction is one."""
    one, two = (predicted(factor * REFERENCE_NUMEL).seconds for factor in (1, 2))
    slope = (two - one) / REFERENCE_NUMEL
    return Line(max(0.0, one - slope * REFERENCE_NUMEL), slope)
