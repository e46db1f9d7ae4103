"""Two levels or flat: what a reduction costs where several ranks share a host's network card.

Symbols: H hosts of L ranks each, P = H L, n elements, k entries of a rank. β between hosts is that
of a rank's *share*: L ranks of a host send at the same time, so it is L times the card's β.

| form | a rank selects | what leaves a host |
|---|---|---|
| flat | k of n | of what each of L ranks sends over P ranks: what goes to other hosts |
| two levels | k/L of n/L | all that each of L ranks sends over H ranks, of a shard |

Two levels: the ranks of a host sum their gradients densely, each ending with one shard of n/L;
ranks of the same local index reduce that shard among the H hosts, by any collective; the reduced
shards are gathered inside the host.

Which of a flat algorithm's messages stay inside a host follows from its partners. Ranks of a host
follow one another, so the first log L rounds of a hypercube stay inside. In a split phase a rank
sends to all others alike. In Bruck's allgather d of L ranks reach another host at a distance d < L.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hvd_sparse.checks import check_count
from hvd_sparse.collectives.registry import BY_NAME, cost
from hvd_sparse.cost_model import (
    NOTHING,
    PLAIN_BYTES,
    WORD_BYTES,
    Cost,
    Link,
    WireBytes,
    Work,
    expected_nnz,
)
from hvd_sparse.topology import DIRECT_ALLGATHER_RANKS, bruck_rounds, cube_positions, in_flight

INSIDE_ALPHA_S = 1e-5
"""Seconds in which processes of one host meet, where nothing is measured."""

RECEIVED = tuple(
    item.name for item in fields(Cost) if item.name not in ("messages", "in_flight", "work")
)
"""The parts of a cost that are bytes."""
FARTHEST_FIRST = ("dense",)
"""Hypercubes whose bytes fall from round to round, and begin with the farthest partner."""
NEAREST_FIRST = ("ssar_recursive_double", "gtopk")
"""Hypercubes and trees that begin with the nearest partner."""
TREES = ("gtopk",)
"""Where on the way up one rank of a host goes abroad, and on the way down all of them do; `flat`
takes them to share the card on both."""
BRUCK_TWICE = ("spardl",)
"""Algorithms that scatter by Bruck's rounds, too, before they gather."""
GATHERING = {"topk_allgather": 0, "ssar_split_allgather": 1, "dsar_split_allgather": 1, "oktopk": 1}
"""Algorithms that end in an allgather, and how many split phases of k entries come before. An
algorithm that is not named here is taken to send to all others alike."""


@dataclass(frozen=True)
class Levels:
    """Equal hosts, each with one network card.

    Attributes:
        hosts: H, at least 1.
        local_size: L, ranks of a host, at least 1.
        between: α, g, γ, and β of a rank's share of the card (see `shared`).
        inside: α and β between two ranks of a host; its γ is not used.
    """

    hosts: int
    local_size: int
    between: Link
    inside: Link

    def __post_init__(self) -> None:
        check_count("hosts", self.hosts, 1)
        check_count("local_size", self.local_size, 1)

    @property
    def world_size(self) -> int:
        return self.hosts * self.local_size


@dataclass(frozen=True)
class Prediction:
    """What one reduction takes, selection included.

    Attributes:
        seconds: Until the last rank has the sum.
        inside_s: What of that goes to messages inside the hosts.
        card_bytes: What a host's card receives, without headers. Where hosts are no equals (gTopk,
            and cubes over no power of two), what the busiest receives and sends is a bound for it.
    """

    seconds: float
    inside_s: float
    card_bytes: float


def shared(card: Link, local_size: int) -> Link:
    """A rank's share of a host's card, while all ranks of the host use it."""
    return replace(card, beta_s_per_byte=card.beta_s_per_byte * local_size)


def through_memory(link: Link) -> Link:
    """The link inside a host where nobody has measured it: a byte takes what adding it takes."""
    beta = link.computing.added_values / WORD_BYTES
    return Link(min(INSIDE_ALPHA_S, link.alpha_s), beta)


def encoding(numel: float) -> Work:
    """What a rank computes to accumulate gradients and to select of them."""
    return Work(added_values=numel, scanned_values=numel)


def flat(
    algorithm: str, levels: Levels, numel: int, k: int, wire: WireBytes = PLAIN_BYTES
) -> Prediction:
    """All P ranks select k of n, and exchange as if each were a host; see `Algorithm.cost`."""
    whole = cost(algorithm, levels.world_size, numel, k, wire).expected
    leaving, staying = _parted(algorithm, levels, numel, k, wire)
    inside_s = _on_the_way(staying, levels.inside, wire)
    between_s = _on_the_way(leaving, levels.between, wire)
    work = whole.work + encoding(numel)
    seconds = inside_s + between_s + _computing_s(work, levels, wire)
    L = levels.local_size
    at_once = (1 + L) / 2 if BY_NAME[algorithm].name in TREES else L
    return Prediction(seconds, inside_s, at_once * leaving.nbytes(wire))


def two_levels(
    algorithm: str, levels: Levels, numel: int, k: int, wire: WireBytes = PLAIN_BYTES
) -> Prediction:
    """Dense sums inside a host, the algorithm between hosts on L shards, a gather inside."""
    H, L = levels.hosts, levels.local_size
    shard, share = -(-numel // L), -(-k // L)
    between = cost(algorithm, H, shard, share, wire).expected
    summed, gathered = inside_costs(levels, numel, applied_entries(algorithm, H, shard, share))
    inside_s = sum(_on_the_way(each, levels.inside) for each in (summed, gathered))
    work = summed.work + encoding(shard) + between.work
    between_s = _on_the_way(between, levels.between, wire)
    seconds = inside_s + between_s + _computing_s(work, levels, wire)
    return Prediction(seconds, inside_s, L * between.nbytes(wire))


def applied_entries(algorithm: str, ranks: int, numel: int, k: int) -> float:
    """How many entries of a sum are applied: all of them, or k."""
    if not BY_NAME[algorithm].is_lossless:
        return float(k)
    return expected_nnz(numel, k, ranks)


def inside_costs(levels: Levels, numel: int, applied: float) -> tuple[Cost, Cost]:
    """What a rank pays inside its host: the dense sum of its shard, and the gather in the end.

    A reduced shard has as many entries as are `applied`.
    """
    others = levels.local_size - 1
    if others == 0:
        return NOTHING.expected, NOTHING.expected
    shard, hidden = -(-numel // levels.local_size), in_flight(others)
    words = min(2 * applied, shard)  # what fills up is gathered dense
    added = Work(added_values=others * shard)
    return (
        Cost(others, dense_words=others * shard, in_flight=hidden, work=added),
        Cost(others, dense_words=others * words, in_flight=hidden),
    )


def _computing_s(work: Work, levels: Levels, wire: WireBytes) -> float:
    return levels.between.computing.seconds(work, wire.read_value_bytes)


def _on_the_way(cost: Cost, link: Link, wire: WireBytes = PLAIN_BYTES) -> float:
    """Seconds of messages, without what is computed."""
    return cost.latency_s(link) + cost.nbytes(wire) * link.beta_s_per_byte


def _parted(
    algorithm: str, levels: Levels, numel: int, k: int, wire: WireBytes
) -> tuple[Cost, Cost]:
    """A rank's messages in the flat form: what goes to other hosts, and what stays inside."""
    P, L, name = levels.world_size, levels.local_size, BY_NAME[algorithm].name
    whole = cost(name, P, numel, k, wire).expected
    if L == 1 or levels.hosts == 1:
        return (whole, NOTHING.expected) if L == 1 else (NOTHING.expected, whole)
    is_cube = cube_positions(P) == P  # and so are H and L
    if is_cube and name in FARTHEST_FIRST:
        leaving = cost(name, levels.hosts, numel, k, wire).expected
        return leaving, _difference(whole, leaving)
    if is_cube and name in NEAREST_FIRST:
        staying = cost(name, L, numel, k, wire).expected
        return _difference(whole, staying), staying
    share = (P - L) / (P - 1)
    if name in BRUCK_TWICE:
        share = (_bruck_share(P, L) + _gather_share(P, L)) / 2
    elif name in GATHERING:
        nbytes = whole.nbytes(wire)
        split = min(nbytes, GATHERING[name] * k * (P - 1) / P * wire.entry_bytes)
        gathered = _gather_share(P, L)
        share = gathered if split == 0 else (split * share + (nbytes - split) * gathered) / nbytes
    # A round is as slow as its slowest message: all of them count as going abroad.
    return _scaled(whole, share, whole.messages), _scaled(whole, 1 - share, 0)


def _gather_share(P: int, L: int) -> float:
    """Of what an allgather sends, the share that reaches other hosts."""
    return (P - L) / (P - 1) if P <= DIRECT_ALLGATHER_RANKS else _bruck_share(P, L)


def _bruck_share(P: int, L: int) -> float:
    """The same of Bruck's rounds, in either order."""
    return sum(n * min(d, P - d, L) / L for d, n in bruck_rounds(P)) / (P - 1)


def _scaled(cost: Cost, share: float, messages: float) -> Cost:
    """A share of the bytes, with so many of the messages."""
    parts = {name: share * getattr(cost, name) for name in RECEIVED}
    hidden = cost.in_flight if messages else 0.0
    return Cost(messages=messages, in_flight=hidden, **parts)


def _difference(whole: Cost, part: Cost) -> Cost:
    names = ("messages", "in_flight", *RECEIVED)
    return Cost(**{name: getattr(whole, name) - getattr(part, name) for name in names})
