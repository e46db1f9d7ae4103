"""What a transport's messages cost: measured once, by a short ping that all ranks take part in.

Steps: in a ring, every rank sends to the next one and receives from the one before, first a few
bytes (α), then a megabyte (β); each rank sums two streams (γ). The largest of all ranks' figures
count, so that every rank has the same.

Cost: some 20 α and 5 MB of β: 50 ms at 1 Gb/s.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from hvd_sparse import ops
from hvd_sparse.cost_model import ORDINARY_LINK, Link
from hvd_sparse.stream import ENTRY_BYTES
from hvd_sparse.transports import Transport

PINGS, LARGE_PINGS = 15, 4
LARGE_BYTES = 1 << 20
"""Well above what a shaper lets through at once."""
SUMMED_ENTRIES = 1 << 14


def link_of(transport: Transport) -> Link:
    """α, β and γ: as given in `transport.link`, or else measured now, and kept there.

    Collective: all ranks call this together. They get the same figures.

    Raises:
        TransportError: A peer is gone or did not answer.
    """
    if transport.link is None:
        transport.link = measure_link(transport)
    return transport.link


def measure_link(transport: Transport) -> Link:
    """Measure α, β and γ; see `link_of`."""
    P, rank = transport.world_size, transport.rank
    if P == 1:
        return ORDINARY_LINK

    def ping(nbytes: int) -> Callable[[], object]:
        payload = (torch.zeros(nbytes, dtype=torch.uint8),)
        peers = (rank + 1) % P, (rank - 1) % P
        return lambda: transport.exchange(payload, *peers, channel="ping").wait()

    small_s = _typical_s(ping(ENTRY_BYTES), PINGS)
    large_s = _typical_s(ping(LARGE_BYTES), LARGE_PINGS)
    mine = torch.tensor(
        [small_s, max(0.0, large_s - small_s) / LARGE_BYTES, _reduction_s_per_byte()],
        dtype=torch.float64,
    )
    gathered = transport.allgather((mine,), channel="link")
    alpha_s, beta, gamma = torch.stack([m.view(torch.float64) for m in gathered]).amax(0).tolist()
    return Link(alpha_s, beta, gamma)


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
