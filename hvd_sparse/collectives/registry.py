"""All collectives: one entry each, from which everything that names them derives.

A new one takes its own file, its formula in `cost_model.py` and an entry here. Then `collective=`,
policies and their schema, the planner, the simulator, the command line and the tests' sweeps know
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from types import MappingProxyType

from hvd_sparse import cost_model
from hvd_sparse.checks import check_choice, check_count
from hvd_sparse.collectives.collective import Collective
from hvd_sparse.collectives.dense_allreduce import DenseAllreduce
from hvd_sparse.collectives.exdyna import EARLY, LEVEL_BYTES, ExDyna
from hvd_sparse.collectives.gtopk import GTopk
from hvd_sparse.collectives.index_union import CyclicLeader, IndexUnion
from hvd_sparse.collectives.oktopk import COUNT_BYTES, HEAD_BYTES, OkTopk
from hvd_sparse.collectives.sparcml import (
    DsarSplitAllgather,
    SsarRecursiveDouble,
    SsarSplitAllgather,
)
from hvd_sparse.collectives.spardl import SparDL
from hvd_sparse.collectives.topk_allgather import TopkAllgather
from hvd_sparse.cost_model import NOTHING, PLAIN_BYTES, CostRange, Formula, Link, WireBytes
from hvd_sparse.errors import ConfigError


@dataclass(frozen=True)
class Algorithm:
    """A collective as users, the planner and the simulator know it.

    Attributes:
        name: Its paper's.
        collective: Its class.
        formula: What it costs.
        aliases: Names that other papers have for it.
        is_lossless: Whether it applies all entries that the ranks send.
        is_selectable: Whether `collective=` may name it. What scopes selection has a method of its
            own instead.
        keeps_state: Whether a step depends on the one before.
        control_bytes: Channels, and how much of each rank's payload there does not grow with n or
            k.
    """

    name: str
    collective: type[Collective]
    formula: Formula
    aliases: tuple[str, ...] = ()
    is_lossless: bool = False
    is_selectable: bool = True
    keeps_state: bool = False
    control_bytes: Mapping[str, float] = field(default_factory=dict, hash=False)

    def cost(self, world_size: int, numel: int, k: int, wire: WireBytes = PLAIN_BYTES) -> CostRange:
        """What one allreduce costs a rank.

        Args:
            world_size: P, at least 1.
            numel: n, at least 0.
            k: Entries of each rank, in `[0, numel]`.
            wire: Where it says that the dense form is shorter, sums are sent dense.

        Raises:
            ConfigError: An argument is out of its range.
        """
        check_count("world_size", world_size, 1)
        check_count("numel", numel, 0)
        if not 0 <= k <= numel:
            raise ConfigError(f"k must be in [0, numel = {numel}], got {k!r}")
        return self.formula(world_size, numel, k, wire) if world_size > 1 else NOTHING


_lossless = partial(Algorithm, is_lossless=True)
_scoped = partial(Algorithm, is_selectable=False, keeps_state=True)

ALGORITHMS = (
    Algorithm("dense", DenseAllreduce, cost_model.dense, is_lossless=True, is_selectable=False),
    _lossless("topk_allgather", TopkAllgather, cost_model.topk_allgather),
    _lossless("ssar_recursive_double", SsarRecursiveDouble, cost_model.ssar_recursive_double),
    _lossless(
        *("ssar_split_allgather", SsarSplitAllgather, cost_model.ssar_split_allgather),
        aliases=("topk_dsa",),
    ),
    _lossless("dsar_split_allgather", DsarSplitAllgather, cost_model.dsar_split_allgather),
    Algorithm("gtopk", GTopk, cost_model.gtopk),
    Algorithm(
        *("oktopk", OkTopk, partial(cost_model.oktopk, head_bytes=COUNT_BYTES + HEAD_BYTES)),
        keeps_state=True,
        control_bytes={"shares": inf, "split": COUNT_BYTES, "allgather": HEAD_BYTES},
    ),
    Algorithm("spardl", SparDL, cost_model.spardl, keeps_state=True),
    Algorithm("index_union", IndexUnion, cost_model.index_union, is_lossless=True),
    _scoped("exdyna", ExDyna, partial(cost_model.exdyna, head_bytes=LEVEL_BYTES, early=EARLY)),
    _scoped("clt_k", CyclicLeader, cost_model.clt_k, is_lossless=True),
)
"""Every one of them once; where two cost the same, the first one is taken."""

BY_NAME: Mapping[str, Algorithm] = MappingProxyType(
    {name: entry for entry in ALGORITHMS for name in (entry.name, *entry.aliases)}
)
"""The entries by all their names, aliases included."""


def names_of(wanted: Callable[[Algorithm], bool], *, aliases: bool = False) -> tuple[str, ...]:
    """Names of the algorithms that `wanted` accepts, in order."""
    return tuple(
        name for name, entry in BY_NAME.items() if wanted(entry) and (aliases or name == entry.name)
    )


STREAMED = names_of(lambda entry: not issubclass(entry.collective, IndexUnion))
"""Those that exchange streams alone: what the simulator can run. The others also sum what the ranks
did not select."""
SELECTABLE = names_of(lambda entry: entry.is_selectable, aliases=True)
"""What `collective=` may name, beside "auto"."""
CHOOSABLE = names_of(lambda entry: entry.is_selectable and entry.name in STREAMED, aliases=True)
"""What a user may list to choose from."""
LOSSLESS_CANDIDATES = names_of(lambda entry: entry.is_lossless and entry.name in CHOOSABLE)
"""Those of them that apply everything: what `collective="auto"` chooses from. With two ranks the
first two send the same."""


def name_of(collective: Collective) -> str:
    """The name of the algorithm by which a collective works; "" if it has no entry."""
    return next((a.name for a in ALGORITHMS if a.collective is type(collective.chosen)), "")


def cost(
    algorithm: str, world_size: int, numel: int, k: int, wire: WireBytes = PLAIN_BYTES
) -> CostRange:
    """What one allreduce by the algorithm of that name costs a rank; see `Algorithm.cost`."""
    return BY_NAME[check_choice("algorithm", algorithm, BY_NAME)].cost(world_size, numel, k, wire)


def cheapest(
    algorithms: Iterable[str],
    world_size: int,
    numel: int,
    k: int,
    link: Link,
    wire: WireBytes = PLAIN_BYTES,
) -> str:
    """The algorithm with the least expected time over a wire; the first named of equals.

    A pure function: ranks that give the same arguments get the same answer.
    """
    return min(
        algorithms,
        key=lambda name: cost(name, world_size, numel, k, wire).expected.seconds(link, wire),
    )
