"""Options that describe hosts with several ranks each, for `hvd-sparse plan`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hvd_sparse.checks import check_count
from hvd_sparse.cli.units import bytes_per_s, seconds
from hvd_sparse.collectives.two_levels import Levels, shared
from hvd_sparse.cost_model import Link
from hvd_sparse.planner.levels import modelled_on_hosts
from hvd_sparse.planner.profile import MethodCosts, Profile, place_of


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """How many hosts there are, and what is inside them."""
    add = parser.add_argument_group("hosts of several ranks, in the place of --ranks").add_argument
    add("--hosts", type=int, help="H; --bandwidth is that of a host's card")
    add("--local", type=int, default=1, help="ranks of a host (default: %(default)s)")
    add(
        "--local-bandwidth",
        type=bytes_per_s,
        default="10gbyte",
        help="between two ranks of a host (default: %(default)s)",
    )
    add("--local-latency", type=seconds, default="10us", help="there (default: %(default)s)")


def levels_of(options: argparse.Namespace) -> Levels:
    """What the options describe.

    Raises:
        ConfigError: One is out of its range.
    """
    hosts = check_count("--hosts", options.hosts, 1)
    local_size = check_count("--local", options.local, 1)
    card = Link(options.latency, 1 / options.bandwidth)
    inside = Link(options.local_latency, 1 / options.local_bandwidth)
    return Levels(hosts, local_size, shared(card, local_size), inside)


def profiles_of_hosts(levels: Levels, costs: Mapping[str, MethodCosts]) -> list[Profile]:
    """Costs of the flat form, and of two levels where there are two."""
    place = place_of("modelled", levels.world_size, levels.hosts)
    forms = (False, True) if min(levels.hosts, levels.local_size) > 1 else (False,)
    return [modelled_on_hosts(place, levels, costs, hierarchical=form) for form in forms]
