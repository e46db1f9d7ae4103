"""What a transport's messages cost: measured once, by a short ping that all ranks take part in.

Steps: every rank r sends to r + s and receives from r - s, for changing s, first a few bytes (α),
then a megabyte (β); then every rank sends to several at once (g); each rank sums two
streams (γ). The largest of all ranks' figures count, so that every rank has the same.

Cost: some 40 α and 5 MB of β: 50 ms at 1 Gb/s.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from statistics import median
from time import perf_counter

import torch

from hvd_sparse import ops
from hvd_sparse.cost_model import MESSAGES_IN_FLIGHT, ORDINARY_LINK, Link
from hvd_sparse.streams import ENTRY_BYTES
from hvd_sparse.transports import Transport

PINGS, LARGE_PINGS = 15, 4
LARGE_BYTES = 1 << 20
"""Well above what a shaper lets through at once."""
SUMMED_ENTRIES = 1 << 14


def link_of(transport: Transport) -> Link:
    """α, β, γ and g: as given in `transport.link`, or else measured now, and kept there.

    Collective: all ranks call this together. They get the same figures.

    Raises:
        TransportError: A peer is gone or did not answer.
    """
    if transport.link is None:
        transport.link = measure_link(transport)
    return transport.link


def measure_link(transport: Transport) -> Link:
    """Measure α, β, γ and g; see `link_of`."""
    P, rank = transport.world_size, transport.rank
    if P == 1:
        return ORDINARY_LINK

    turns = count()

    def ping(nbytes: int) -> Callable[[], object]:
        payload = (torch.zeros(nbytes, dtype=torch.uint8),)

        def exchange() -> None:
            s = 1 + next(turns) % (P - 1)
            transport.exchange(payload, (rank + s) % P, (rank - s) % P, channel="ping").wait()

        return exchange

    small_s = _typical_s(ping(ENTRY_BYTES), PINGS)
    large_s = _typical_s(ping(LARGE_BYTES), LARGE_PINGS)
    beta = max(0.0, large_s - small_s) / LARGE_BYTES
    figures = [small_s, beta, _reduction_s_per_byte(), _gap_s(transport, small_s)]
    mine = torch.tensor(figures, dtype=torch.float64)
    gathered = torch.stack(
        [m.view(torch.float64) for m in transport.allgather((mine,), channel="link")]
    )
    alpha_s, beta, gamma, gap_s = gathered.amax(0).tolist()
    return Link(alpha_s, beta, gamma, min(gap_s, alpha_s))


def _gap_s(transport: Transport, alpha_s: float) -> float:
    """g, from messages to several ranks at once; α where there is but one."""
    peers = min(transport.world_size - 1, MESSAGES_IN_FLIGHT)
    if peers == 1:
        return alpha_s
    payload = (torch.zeros(ENTRY_BYTES, dtype=torch.uint8),)
    P, rank = transport.world_size, transport.rank

    def burst() -> None:
        handles = [
            transport.exchange(payload, (rank + s) % P, (rank - s) % P, channel="ping")
            for s in range(1, peers + 1)
        ]
        for handle in handles:
            handle.wait()

    return max(0.0, _typical_s(burst, PINGS) - alpha_s) / (peers - 1)


def _reduction_s_per_byte() -> float:
    """γ, from a sum of two streams of which one has been received."""
    numel = 64 * SUMMED_ENTRIES
    places = torch.arange(SUMMED_ENTRIES, dtype=torch.int32)
    streams = [(places * 64 + shift, torch.ones(SUMMED_ENTRIES)) for shift in (0, 7)]
    seconds = _typical_s(lambda: ops.merge_sum(streams, numel), 5)
    return seconds / (SUMMED_ENTRIES * ENTRY_BYTES)


def _typical_s(function: Callable[[], object], repeats: int) -> float:
    """Median seconds, after one call for connections and buffers."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        function()
        times.append(perf_counter() - start)
    return median(times[1:])
