"""The planner: an assignment that rank 0 decides from measured costs, and reviews.

Rank 0 alone decides, by its own measurements; it broadcasts what it decided, and every rank
follows. A rank that fails while planning aborts the transport, so that the others fail as well, at
once, and none trains by a plan that another does not have.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

from hvd_sparse.engine.plan import Choice, Method, TensorSpec, text_tensor
from hvd_sparse.engine.stats import Stats
from hvd_sparse.errors import HvdSparseError, PlanError
from hvd_sparse.planner.choose import ChosenPlan, Placement, PlannedTensor, choose_plan
from hvd_sparse.planner.measure import DenseAllreduce, measure_profile
from hvd_sparse.planner.profile import Place, Profile, place_of
from hvd_sparse.transports import Transport

logger = logging.getLogger("hvd_sparse")

DENSE = Choice(None)
FIRST_REVIEW_STEPS = 20
"""Steps to the first review, which knows when gradients become ready."""
REVIEW_INTERVAL_STEPS = 500
TOLERATED_ERROR = 0.25
"""Share by which costs may be off before the plan is made anew."""
PROBE_NUMEL = 1 << 18
PROBES = 3


class PlannableRules(Protocol):
    """An assignment that leaves some tensors to a planner; the same on all ranks."""

    @property
    def description(self) -> str:
        """See `Assignment.description`."""

    def choice_of(self, spec: TensorSpec) -> Choice:
        """How a tensor without candidates is reduced."""

    def candidates_of(self, spec: TensorSpec) -> tuple[Method, ...]:
        """Methods of which the planner may choose one for the tensor, or dense."""


@dataclass(frozen=True)
class World:
    """What a planner measures with.

    Attributes:
        transport: Carries sparse exchanges.
        dense_allreduce: Horovod's allreduce.
    """

    transport: Transport
    dense_allreduce: DenseAllreduce


class Planner:
    """An assignment whose plannable tensors are decided in the world that trains them.

    Args:
        rules: Which tensors are plannable, and how all others are reduced.
        profile_path: A profile that `hvd-sparse profile` has saved; None: costs are measured when
            the ranks first meet.

    Attributes:
        profile: The costs that rank 0 goes by; on other ranks, what they measured themselves.
        plan: What was decided; None before.
    """

    def __init__(
        self, rules: PlannableRules, profile_path: str | os.PathLike[str] | None = None
    ) -> None:
        self.rules = rules
        self.profile_path = profile_path
        self.profile: Profile | None = None
        self.plan: ChosenPlan | None = None
        self._methods: dict[str, Method] = {}

    # -- an assignment -----------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """See `Assignment.description`."""
        placed = {} if self.plan is None else self.plan.placements
        words = "; ".join(f"{name}: {p.method} in {p.bucket}" for name, p in sorted(placed.items()))
        return f"{self.rules.description}; planned: {words or 'all dense'}"

    def choice_of(self, spec: TensorSpec) -> Choice:
        """See `Assignment.choice_of`; plannable tensors are dense until they are decided on."""
        if not self.rules.candidates_of(spec):
            return self.rules.choice_of(spec)
        placement = None if self.plan is None else self.plan.placements.get(spec.name)
        if placement is None:
            return DENSE
        return Choice(self._methods[placement.method], placement.bucket)

    # -- decisions, which all ranks take together --------------------------------------------------

    def decide(self, specs: Sequence[TensorSpec], world: World) -> None:
        """Measure, or read the profile, and follow rank 0's plan.

        Args:
            specs: The model's tensors in the order in which their gradients may come.
            world: What to measure with.

        Raises:
            PlanError: On every rank, where rank 0 cannot plan.
            TransportError: Another rank failed.
        """
        self._methods = {
            method.description: method
            for spec in specs
            for method in self.rules.candidates_of(spec)
        }
        if not self._methods:
            self.plan = ChosenPlan({}, 0.0, 0.0, 0.0)
            return
        with _aborting(world.transport):
            place = meet(world.transport)
            if self.profile_path is None:
                self.profile = measure_profile(
                    world.transport, world.dense_allreduce, self._methods, place
                )
            self._follow_rank_0(specs, {}, world.transport, place)

    def review(
        self,
        specs: Sequence[TensorSpec],
        ready_s: Mapping[str, float],
        stats: Stats,
        world: World,
    ) -> bool:
        """Compare what was predicted with what was measured, and plan anew where they differ.

        Args:
            specs: As in `decide`.
            ready_s: When gradients became ready in the last step, from the first one on.
            stats: What the engine measured since the plan was made.
            world: What to measure with.

        Returns:
            Whether the plan is another one.

        Raises:
            PlanError: As in `decide`.
            TransportError: As in `decide`.
        """
        if not self._methods:
            return False
        assert self.plan is not None
        before = dict(self.plan.placements)
        with _aborting(world.transport):
            sparse = self._sparse_error(stats, world.transport)
            dense = self._dense_error(world)
            if self.profile is not None and max(_off(sparse), _off(dense)) > TOLERATED_ERROR:
                logger.info("costs were %.2f (dense) and %.2f of those predicted", dense, sparse)
                self.profile = self.profile.calibrated(dense, sparse)
            self._follow_rank_0(specs, ready_s, world.transport, None)
        return before != dict(self.plan.placements)

    def _follow_rank_0(
        self,
        specs: Sequence[TensorSpec],
        ready_s: Mapping[str, float],
        transport: Transport,
        place: Place | None,
    ) -> None:
        message: dict[str, Any] = {}
        if transport.rank == 0:
            message = self._planned(specs, ready_s, place)
        sent = transport.broadcast((text_tensor(json.dumps(message)),), 0, channel="planner")
        message = json.loads(bytes(sent.numpy()))
        if "error" in message:
            raise PlanError(f"rank 0 cannot plan: {message['error']}")
        placements = {name: Placement(**p) for name, p in message.pop("placements").items()}
        mine = {spec.name for spec in specs}
        strangers = sorted(placements.keys() - mine)
        if strangers:
            raise PlanError(f"rank 0 plans for {', '.join(strangers)}, which this rank has not")
        self.plan = ChosenPlan(placements, **message)

    def _planned(
        self, specs: Sequence[TensorSpec], ready_s: Mapping[str, float], place: Place | None
    ) -> dict[str, Any]:
        """Rank 0's plan as a message, or why there is none."""
        try:
            if self.profile is None:
                assert self.profile_path is not None
                assert place is not None
                self.profile = Profile.load(self.profile_path).carried_over(place)
                if self.profile.source != "measured":
                    logger.warning("the planner's costs were %s", self.profile.source)
            tensors = [
                PlannedTensor(spec, ready_s.get(spec.name, 0.0), self.rules.candidates_of(spec))
                for spec in specs
            ]
            return asdict(choose_plan(self.profile, tensors))
        except (HvdSparseError, OSError) as error:
            return {"error": str(error)}

    # -- what was measured in training -------------------------------------------------------------

    def _sparse_error(self, stats: Stats, transport: Transport) -> float:
        """Measured over predicted seconds of the sparse buckets; 1 where there are none.

        The exchange is the quickest rank's: the others waited for a peer in theirs.
        """
        assert self.plan is not None
        planned = [b for b in stats.buckets if b.names[0] in self.plan.placements]
        steps = max((bucket.steps for bucket in planned), default=0)
        totals = Stats(stats.transport, planned).totals
        work_s = totals.accumulate_s + totals.select_s + totals.decode_s
        mine = torch.tensor([work_s, totals.exchange_s], dtype=torch.float64)
        ranks = [
            message.view(torch.float64)
            for message in transport.allgather((mine,), channel="review")
        ]
        if not steps:
            return 1.0
        measured_s = float(ranks[0][0] + min(rank[1] for rank in ranks)) / steps
        return measured_s / self.plan.sparse_s

    def _dense_error(self, world: World) -> float:
        """Measured over predicted seconds of one dense allreduce."""
        seconds = []
        probe = torch.ones(PROBE_NUMEL)
        for _ in range(PROBES):
            world.transport.allreduce_sum(torch.zeros(1, dtype=torch.int64), channel="meet")
            start = perf_counter()
            world.dense_allreduce(probe)
            seconds.append(perf_counter() - start)
        if self.profile is None:
            return 1.0
        return median(seconds) / self.profile.dense.at(PROBE_NUMEL)


def meet(transport: Transport) -> Place:
    """Where the ranks are; host names tell how many hosts there are."""
    names = transport.allgather((text_tensor(socket.gethostname()),), channel="hosts")
    hosts = len({bytes(name.numpy()) for name in names})
    return place_of(transport.name, transport.world_size, hosts)


def _off(ratio: float) -> float:
    """How far a ratio is from 1, in either direction."""
    return max(ratio, 1 / ratio) - 1 if ratio > 0 else float("inf")


@contextmanager
def _aborting(transport: Transport) -> Iterator[None]:
    """Let the peers' waits fail where this rank does."""
    try:
        yield
    except BaseException:
        transport.abort()
        raise
