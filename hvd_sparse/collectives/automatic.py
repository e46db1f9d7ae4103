"""The choice of a collective from the costs in Ok-Topk's Table 1."""

from __future__ import annotations

from math import ceil, log2

from hvd_sparse.collectives.base import Collective
from hvd_sparse.collectives.oktopk import OkTopk
from hvd_sparse.collectives.topk_allgather import TopkAllgather
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire

ALPHA_S = 1e-4
"""α: what a message costs on an ordinary TCP network."""
BETA_S_PER_WORD = 3.2e-8
"""β: what a word of four bytes costs at 1 Gb/s."""


def topk_allgather_s(world_size: int, k: int) -> float:
    """Cost of TopkA: α log P + 2k (P-1) β."""
    return ceil(log2(world_size)) * ALPHA_S + 2 * k * (world_size - 1) * BETA_S_PER_WORD


def oktopk_s(world_size: int, k: int) -> float:
    """Cost of Ok-Topk: (2P + 2 log P) α + 6k (P-1)/P β."""
    messages = 2 * world_size + 2 * ceil(log2(world_size))
    return messages * ALPHA_S + 6 * k * (world_size - 1) / world_size * BETA_S_PER_WORD


def automatic_collective(
    transport: Transport, numel: int, k: int, *, wire: Wire = PLAIN
) -> Collective:
    """TopkA where the world or k is small, Ok-Topk elsewhere; the same on every rank."""
    world_size = transport.world_size
    if topk_allgather_s(world_size, k) <= oktopk_s(world_size, k):
        return TopkAllgather(transport, numel, k, wire=wire)
    return OkTopk(transport, numel, k, wire=wire)
