"""The choice of a collective, and of a wire, by size, density, world and link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse.checks import check_choice
from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.collectives.registry import BY_NAME, LOSSLESS_CANDIDATES, cheapest
from hvd_sparse.cost_model import ORDINARY_LINK, PLAIN_BYTES, Link, Pace
from hvd_sparse.errors import logger
from hvd_sparse.streams import ENTRY_BYTES, DenseSum, Part, SparseStream, merge
from hvd_sparse.topology import MESSAGES_IN_FLIGHT
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, WIRES, Wire

PINGS, LARGE_PINGS, SUMS = 15, 4, 5
LARGE_BYTES = 1 << 20
"""Well above what a shaper lets through at once."""
ENTRIES, VALUES = 1 << 14, 1 << 18
"""What work is measured on."""
GAPS = WIRES["float32+gap"]
LEAST_SAVED_S = 250e-6
"""By how much gaps must shorten an exchange: their calls take some of it, whatever their number."""


class AutomaticCollective(Collective):
    """The cheapest of some collectives; see `cheapest_algorithm`.

    All of the candidates by default apply every entry that is sent. So the choice, which depends on
    a measurement, changes what a step takes, and not what it computes. It is kept in the state: a
    run that goes on from one repeats it, in a world of the same size. `algorithm` is the chosen
    one's name among the `candidates`.
    """

    def __init__(
        self,
        transport: Transport,
        numel: int,
        k: int,
        *,
        wire: Wire = PLAIN,
        algorithms: Sequence[str] = LOSSLESS_CANDIDATES,
    ) -> None:
        super().__init__(transport, numel, k, wire=wire)
        self.candidates = {
            name: BY_NAME[name].collective(transport, numel, k, wire=wire) for name in algorithms
        }
        self.algorithm = cheapest_algorithm(transport, numel, k, algorithms, wire)
        self._tell("chosen by the cost model")

    @property
    @override
    def chosen(self) -> Collective:
        return self.candidates[self.algorithm]

    @override
    def reads_on(self, device: torch.device) -> bool:
        return self.chosen.reads_on(device)

    @override
    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        reduction = self.chosen.reduce(stream, take_at)
        self.step = self.chosen.step
        return reduction

    @override
    def aim(self, k: int) -> None:
        super().aim(k)
        self.chosen.aim(k)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "algorithm": self.algorithm,
            "world_size": self.transport.world_size,
            "candidates": {name: each.state_dict() for name, each in self.candidates.items()},
        }

    @override
    def common(self, state: Mapping[str, Any]) -> dict[str, Any]:
        every = state["candidates"]
        return {**state, "candidates": [c.common(every[n]) for n, c in self.candidates.items()]}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with its choice in a world of the same size; ConfigError if it is unknown."""
        algorithm = check_choice("algorithm", state["algorithm"], self.candidates)
        if int(state["world_size"]) == self.transport.world_size and algorithm != self.algorithm:
            self.algorithm = algorithm
            self._tell("as in the state that was loaded")
        super().load_state_dict(state)
        for name, each in self.candidates.items():
            each.load_state_dict(state["candidates"][name])
        if not BY_NAME[self.algorithm].keeps_state:  # one that does may begin anew
            self.chosen.step = self.step  # where another one was chosen before

    def _tell(self, why: str) -> None:
        logger.info(
            "rank %d of %d sums %d of %d elements by %s: %s",
            *(self.transport.rank, self.transport.world_size, self.k, self.numel),
            *(self.algorithm, why),
        )


def cheapest_algorithm(
    transport: Transport,
    numel: int,
    k: int,
    algorithms: Sequence[str] = LOSSLESS_CANDIDATES,
    wire: Wire = PLAIN,
) -> str:
    """The algorithm with the least expected time on a transport; the same on every rank.

    Collective: the first call on a transport measures its link, unless that is known already; see
    `link_of`. A rank has k of n entries. Among equals of the `algorithms` the first one wins.

    Raises:
        TransportError: A peer is gone or did not answer.
    """
    P, link = transport.world_size, link_of(transport)
    if transport.feeds_device:  # which sums far faster than entries arrive: 18 a nanosecond
        link = replace(link, reduction_s_per_byte=0.0, pace=None)
    return cheapest(algorithms, P, numel, k, link, wire.expected_bytes(numel, k))


def lossless_wire(transport: Transport, numel: int, k: int) -> Wire:
    """`float32+gap` where shorter indices save more time than coding takes; otherwise `float32`.

    Collective, as `cheapest_algorithm`; the same on every rank. Both wires carry the same bits, so
    the choice changes the time of a step alone. An entry is taken to be coded and read in the time
    in which it is merged.
    """
    if transport.world_size == 1 or transport.device is not None:  # gaps are coded on the host
        return PLAIN
    link, plain, gaps = link_of(transport), PLAIN_BYTES, GAPS.expected_bytes(numel, k)
    saved_s = (plain.index_bytes - gaps.index_bytes) * link.beta_s_per_byte
    return GAPS if k * (saved_s - link.computing.merged_entries) > LEAST_SAVED_S else PLAIN


def link_of(transport: Transport) -> Link:
    """α, β, γ and g: as given in `transport.link`, or measured now.

    Collective: all ranks call this together, and get the same figures.

    Raises:
        TransportError: A peer is gone or did not answer.
    """
    if transport.link is None:
        alone = transport.world_size == 1
        transport.link = ORDINARY_LINK if alone else measure_link(transport)
    return transport.link


def measure_link(transport: Transport) -> Link:
    """Measures α, β, γ and g between at least two ranks, by a short ping.

    Steps: every rank r sends to r + s and receives from r - s, for changing s, first a few bytes
    (α), then as many to several ranks at once (g), then a megabyte (β). Each rank does some work of
    each kind (γ): it merges, scatters, adds, scans and selects. The slowest rank's time of each
    repetition counts, since a collective waits for it; all ranks get the same figures. Large
    messages have a channel of their own. The first between two ranks is cut in two: one α more.

    Cost: some 40 α and 5 MB of β: 50 ms at 1 Gb/s.
    """
    P, rank = transport.world_size, transport.rank
    turns = count(1)

    def ping(nbytes: int, channel: str, peers: int = 1) -> Callable[[], object]:
        payload = (torch.zeros(nbytes, dtype=torch.uint8, device="cpu"),)

        def exchange() -> None:
            shifts = [1 + next(turns) % (P - 1) for _ in range(peers)]
            ends = [((rank + s) % P, (rank - s) % P) for s in shifts]
            handles = [transport.exchange(payload, *each, channel=channel) for each in ends]
            for handle in handles:
                handle.wait()

        return exchange

    in_flight = min(P - 1, MESSAGES_IN_FLIGHT)
    kinds = _kinds_of_work()
    measured = [
        (ping(ENTRY_BYTES, "ping"), PINGS),
        (ping(ENTRY_BYTES, "ping", in_flight), PINGS),
        (ping(LARGE_BYTES, "ping.large"), LARGE_PINGS),
        *((function, SUMS) for function, _ in kinds),
    ]
    mine = torch.cat([_times(function, repeats) for function, repeats in measured])
    gathered = torch.stack(
        [message.view(torch.float64) for message in transport.allgather((mine,), channel="link")]
    )
    # A round is over when its slowest rank is through.
    slowest = gathered.amax(0).split([repeats for _, repeats in measured])
    alpha_s, burst_s, large_s, *work_s = (float(times.median()) for times in slowest)
    pace = Pace(*(seconds / count for seconds, (_, count) in zip(work_s, kinds, strict=True)))
    return Link(
        alpha_s,
        max(0.0, large_s - alpha_s) / LARGE_BYTES,
        pace.merged_entries / ENTRY_BYTES,
        min(alpha_s, max(0.0, burst_s - alpha_s) / max(1, in_flight - 1)),
        pace,
    )


def _kinds_of_work() -> list[tuple[Callable[[], object], int]]:
    """Some work of each kind, in the order of `Pace`, and how many entries or values it takes."""
    places = torch.arange(ENTRIES, dtype=torch.int32, device="cpu") * (VALUES // ENTRIES)
    ones = torch.ones(ENTRIES, dtype=torch.float32, device="cpu")
    stream, other = (SparseStream(places + shift, ones, VALUES) for shift in (0, 7))
    values = torch.ones(VALUES, dtype=torch.float32, device="cpu")
    out = torch.empty_like(values)
    total = DenseSum((Part(None, values, 0, VALUES),), VALUES)

    def scatter() -> None:
        at = places.long()
        out[at] = torch.add(out[at], ones)

    def scan() -> None:
        total.write(out, 1.0)

    def select() -> None:
        stream.reaching(0.5)
        stream.without(other.indices)

    return [
        (lambda: merge([stream, other], VALUES), 2 * ENTRIES),
        (scatter, ENTRIES),
        (lambda: torch.add(values, values), VALUES),
        (scan, VALUES),
        (select, 2 * ENTRIES),
    ]


def _times(function: Callable[[], object], repeats: int) -> Tensor:
    """Seconds of each call, float64 `(repeats,)`, after one for connections and buffers."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        function()
        times.append(perf_counter() - start)
    return torch.tensor(times[1:], dtype=torch.float64, device="cpu")
