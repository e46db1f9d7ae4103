"""What each allreduce costs: messages, words, the work of a rank, and the time they take.

Sources: Table 1 of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning"
(PPoPP '22); section 5.3 of Renggli et al., "SparCML" (SC '19).

Symbols: P ranks, n elements, k entries per rank, K entries of the sum, α `alpha_s`, β
`beta_s_per_byte`, g `gap_s`, γ the rank's computing: `pace` by kind of work, or
`reduction_s_per_byte` for every byte. A word has four bytes; an entry is two words. SparCML's β_s
is the time of an entry, β_d that of a word; on a compact wire they follow from its `WireBytes`.

Algorithms have the names of `collectives/registry.py`. Both papers give intervals where a cost
depends on how far the ranks' indices coincide. `expected` lies in between: it takes indices as
drawn independently, and their fill-in from `expected_nnz`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from math import ceil, log2

from hvd_sparse.checks import check_not_negative
from hvd_sparse.errors import ConfigError
from hvd_sparse.topology import (
    allgather_in_flight,
    allgather_messages,
    batches,
    bruck_rounds,
    cube_positions,
    in_flight,
)

WORD_BYTES = 4


@dataclass(frozen=True)
class Work:
    """What a rank computes, in entries and values. Copies of messages count in β instead.

    Attributes:
        merged_entries: Entries of sparse parts that are merged into a sparse one.
        scattered_entries: Entries written, or added, into a dense part.
        added_values: Values of dense parts that are filled, copied or added.
        scanned_values: Values of a dense sum that are read and scaled into a gradient.
        selected_entries: Entries among which some are selected, by magnitude or by index.
    """

    merged_entries: float = 0.0
    scattered_entries: float = 0.0
    added_values: float = 0.0
    scanned_values: float = 0.0
    selected_entries: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, n) + getattr(other, n) for n in KINDS))

    def times(self, factor: float) -> Work:
        """The same work, a number of times."""
        return Work(*(getattr(self, n) * factor for n in KINDS))


KINDS = tuple(item.name for item in fields(Work))
NO_WORK = Work()


@dataclass(frozen=True)
class Pace:
    """Seconds of each kind of `Work`, per entry or value of float32."""

    merged_entries: float = 0.0
    scattered_entries: float = 0.0
    added_values: float = 0.0
    scanned_values: float = 0.0
    selected_entries: float = 0.0

    def __post_init__(self) -> None:
        for name in KINDS:
            check_not_negative(name, getattr(self, name))

    @staticmethod
    def of_bytes(seconds: float) -> Pace:
        """The same seconds for every byte in every kind of work."""
        entry_s, value_s = 2 * WORD_BYTES * seconds, WORD_BYTES * seconds
        return Pace(entry_s, entry_s, value_s, value_s, entry_s)

    def seconds(self, work: Work, value_bytes: float = WORD_BYTES) -> float:
        """The seconds of some work, whose values, or rows of values, have `value_bytes` each."""
        by_values = value_bytes / WORD_BYTES
        by_entries = (WORD_BYTES + value_bytes) / (2 * WORD_BYTES)
        total: float = sum(
            getattr(work, name)
            * getattr(self, name)
            * (by_values if name.endswith("values") else by_entries)
            for name in KINDS
        )
        return total


@dataclass(frozen=True)
class Link:
    """Costs of the network and of the local reduction.

    Attributes:
        alpha_s: α, seconds of a message.
        beta_s_per_byte: β, seconds of a byte on the wire.
        reduction_s_per_byte: γ, seconds to reduce a byte in memory.
        gap_s: g, seconds of a message sent while another one is under way, in `[0, α]`; None: α, as
            in the papers.
        pace: γ by kind of work; None: `reduction_s_per_byte` for every byte.
    """

    alpha_s: float
    beta_s_per_byte: float
    reduction_s_per_byte: float = 0.0
    gap_s: float | None = None
    pace: Pace | None = None

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte", "reduction_s_per_byte"):
            check_not_negative(name, getattr(self, name))
        if self.gap_s is not None and not 0 <= self.gap_s <= self.alpha_s:
            raise ConfigError(
                f"gap_s must be in [0, alpha_s = {self.alpha_s:g}], got {self.gap_s!r}"
            )

    @property
    def g(self) -> float:
        """Seconds of a message in flight."""
        return self.alpha_s if self.gap_s is None else self.gap_s

    @property
    def computing(self) -> Pace:
        """Seconds of each kind of work."""
        return Pace.of_bytes(self.reduction_s_per_byte) if self.pace is None else self.pace


ORDINARY_LINK = Link(alpha_s=1e-4, beta_s_per_byte=8e-9, reduction_s_per_byte=1e-9)
"""TCP over 1 Gb/s, where no link has been measured."""


@dataclass(frozen=True)
class WireBytes:
    """Expected bytes of a wire, and of what it decodes to.

    Attributes:
        index_bytes: Of an entry's index.
        value_bytes: Of an entry's value.
        dense_value_bytes: Of a value in a dense part.
        read_value_bytes: Of a decoded value in memory, where an index has a word.
    """

    index_bytes: float = WORD_BYTES
    value_bytes: float = WORD_BYTES
    dense_value_bytes: float = WORD_BYTES
    read_value_bytes: float = WORD_BYTES

    @property
    def entry_bytes(self) -> float:
        """Of an entry."""
        return self.index_bytes + self.value_bytes

    def fills(self, numel: float, entries: float) -> bool:
        """Whether so many entries take no less room in memory than `numel` dense values."""
        return entries * (WORD_BYTES + self.read_value_bytes) >= numel * self.read_value_bytes


PLAIN_BYTES = WireBytes()
"""int32 indices and float32 values."""


@dataclass(frozen=True)
class Cost:
    """The cost of one allreduce for one rank, on its longest path.

    Attributes:
        messages: Messages that follow one another.
        in_flight: Those of them sent while another one is under way.
        entries: Sparse entries received.
        dense_words: Values of dense parts received.
        plain_entries: Entries received that no wire encodes.
        plain_words: Values and counters received that no wire encodes.
        work: What the rank computes.
        indices: Indices received without values.
    """

    messages: float
    entries: float = 0.0
    dense_words: float = 0.0
    plain_entries: float = 0.0
    plain_words: float = 0.0
    in_flight: float = 0.0
    work: Work = NO_WORK
    indices: float = 0.0

    @property
    def words(self) -> float:
        """Words received, with two words an entry and one an index."""
        pairs = 2 * (self.entries + self.plain_entries)
        return pairs + self.indices + self.dense_words + self.plain_words

    def nbytes(self, wire: WireBytes = PLAIN_BYTES) -> float:
        """Bytes received over a wire."""
        coded = self.entries * wire.entry_bytes
        coded += self.dense_words * wire.dense_value_bytes + self.indices * wire.index_bytes
        plain = self.plain_entries * (WORD_BYTES + wire.read_value_bytes)
        return coded + plain + self.plain_words * wire.read_value_bytes

    def latency_s(self, link: Link) -> float:
        """The part of the time that does not depend on sizes: α or g per message."""
        return (self.messages - self.in_flight) * link.alpha_s + self.in_flight * link.g

    def seconds(self, link: Link, wire: WireBytes = PLAIN_BYTES) -> float:
        """Its time: α or g per message, β per byte on the wire, γ for the work."""
        return (
            self.latency_s(link)
            + self.nbytes(wire) * link.beta_s_per_byte
            + link.computing.seconds(self.work, wire.read_value_bytes)
        )


@dataclass(frozen=True)
class CostRange:
    """The interval of a cost, and its value for independently drawn indices."""

    least: Cost
    expected: Cost
    most: Cost


NOTHING = CostRange(Cost(0), Cost(0), Cost(0))


def expected_nnz(numel: int, k: float, ranks: float) -> float:
    """K: entries in a sum of streams of k entries each, drawn independently (fill-in)."""
    if numel == 0 or ranks == 1:
        return float(k)
    return float(numel * (1.0 - (1.0 - k / numel) ** ranks))


Formula = Callable[[int, int, int, WireBytes], CostRange]
"""The cost of one allreduce of n elements over P > 1 ranks with k entries each."""


def dense(P: int, n: int, k: int, wire: WireBytes) -> CostRange:
    """Rabenseifner: recursive halving, recursive doubling; a fold before and after for odd P."""
    cube = cube_positions(P)
    folds = cube != P
    words = 2 * n * (cube - 1) / cube + 2 * folds * n
    work = Work(0, k, n * (1 + (cube - 1) / cube + folds), n)
    cost = Cost(2 * log2(cube) + 2 * folds, dense_words=words, work=work)
    return CostRange(cost, cost, cost)


def topk_allgather(P: int, n: int, k: int, wire: WireBytes) -> CostRange:
    """TopkA: α log P + 2k (P-1) β."""
    cost = _gathered(P, Cost(1, entries=k * (P - 1), work=Work(k * P)))
    return CostRange(cost, cost, cost)


def ssar_recursive_double(P: int, n: int, k: int, wire: WireBytes) -> CostRange:
    """SparCML 5.3.1: round t brings a sum of 2^t streams, dense where that is shorter.

    The surplus ranks get the result unrounded; rounded again, it would differ from the others'.
    """
    cube = cube_positions(P)
    rounds = int(log2(cube))
    folds = cube != P
    sums = [P / cube * 2**t for t in range(rounds)]
    received = [
        replace(_sum_of_streams(n, k, m, wire), work=_combined_by_two(n, k, m, wire)) for m in sums
    ]
    ends_dense = _sum_of_streams(n, k, P, wire).dense_words > 0
    received.append(Cost(0, work=Work(scanned_values=n * ends_dense)))
    if folds:
        is_dense = received[-2].dense_words > 0
        result = _sum_of_streams(n, k, P, wire if is_dense else PLAIN_BYTES)
        handed = replace(_sum_of_streams(n, k, 1, wire), work=Work(2 * k))
        of_all = Cost(result.messages, plain_entries=result.entries, plain_words=result.dense_words)
        received += [handed, of_all]
    most = [Cost(1, entries=k * (2**t + min(2**t, P - cube))) for t in range(rounds)]
    most += [Cost(1, entries=k), Cost(1, plain_entries=k * P)] * folds
    return CostRange(Cost(rounds, entries=k * rounds), _in_turn(received), _in_turn(most))


def ssar_split_allgather(P: int, n: int, k: int, wire: WireBytes) -> CostRange:
    """SparCML 5.3.2: (P - 1 + log P) α, then from 2k (P-1)/P β_s to kP β_s.

    As in TopkDSA at most (2k + n) (P-1)/P β: a region that fills up is sent dense if that is less.
    """
    messages, share = P - 1 + allgather_messages(P), (P - 1) / P
    regions = _sum_of_streams(n, k, P, wire, share)
    sparse = Cost(messages, entries=k * P)
    filled = Cost(messages, entries=k * share, dense_words=n * share)
    return CostRange(
        Cost(messages, entries=2 * k * share),
        _in_turn([_split(P, n, k, wire), _gathered(P, _scanned(regions, n))]),
        min(sparse, filled, key=lambda cost: cost.words),
    )


def dsar_split_allgather(P: int, n: int, k: int, wire: WireBytes) -> CostRange:
    """SparCML 5.3.3: (P - 1 + log P) α + k β_s + n (P-1)/P β_d at most."""
    messages, share = P - 1 + allgather_messages(P), (P - 1) / P
    dense_part = Cost(1, dense_words=n * share)
    is_sparse = not wire.fills(n / P, k)
    turned_dense = Cost(0, work=Work(0, expected_nnz(n, k, P) / P, n / P).times(is_sparse))
    return CostRange(
        Cost(messages, dense_words=n * share),
        _in_turn([_split(P, n, k, wire), turned_dense, _gathered(P, _scanned(dense_part, n))]),
        Cost(messages, entries=k, dense_words=n * share),
    )


def gtopk(P: int, n: int, k: int, wire: WireBytes) -> CostRange:
    """gTopk: 2 log P α + 4k log P β, a tree up and a tree down."""
    rounds = 2 * ceil(log2(P))
    work = Work(2 * k, selected_entries=2 * k).times(rounds / 2)
    cost = Cost(rounds, entries=k * rounds, work=work)
    return CostRange(Cost(rounds), cost, cost)


def oktopk(P: int, n: int, k: int, wire: WireBytes, *, head_bytes: int) -> CostRange:
    """Ok-Topk: (2P + 2 log P) α, then from 2k (P-1)/P β to 6k (P-1)/P β.

    Expected are k entries in each phase and no balancing, thanks to the boundaries. Ranks ask for
    shares only after an imbalance; `head_bytes` come with each gathered payload. Two ranks send
    each other all they have.
    """
    if P == 2:
        cost = Cost(1, entries=k, work=Work(2 * k, selected_entries=2 * k))
        return CostRange(cost, cost, cost)
    share, gather = (P - 1) / P, allgather_messages(P)
    control = Cost(0, plain_words=head_bytes / WORD_BYTES * (P - 1))  # for the next step
    hidden = in_flight(P - 1) + allgather_in_flight(P)
    work = Work(_merged_in_batches(P, n, k), selected_entries=expected_nnz(n, k, P) / P + k)
    usual = Cost(P - 1 + gather, entries=2 * k * share, in_flight=hidden, work=work)
    return CostRange(
        Cost(P - 1 + gather, entries=k * share),
        _in_turn([usual, control]),
        _in_turn([Cost(2 * (P - 1) + 2 * gather, entries=3 * k * share), control]),
    )


def spardl(P: int, n: int, k: int, wire: WireBytes) -> CostRange:
    """SparDL: 2 log P α + 4k (P-1)/P β; a rank sends at most k/P entries of a block."""
    share, held, blocks, work = (P - 1) / P, float(k), P, Work(selected_entries=k)
    for distance, number in reversed(bruck_rounds(P)):
        ours, left = held * number / blocks, held * distance / blocks
        came = min(ours, k * number / P)
        work += Work(left + came, selected_entries=ours)
        held, blocks = left + came - left / distance * came / max(1, n / P), distance
    work += Work(selected_entries=held)
    scattered = Cost(ceil(log2(P)), entries=k * share, work=work)
    cost = _in_turn([scattered, _gathered(P, Cost(1, entries=k * share))])
    return CostRange(Cost(cost.messages), cost, cost)


def index_union(P: int, n: int, k: int, wire: WireBytes) -> CostRange:
    """All accumulators at the union of all selections: indices gathered, values summed there.

    Every rank gathers k indices of each. Their union has from k to kP entries.
    """
    others = k * (P - 1)
    least, expected, most = (
        _summed_at(P, union, others) for union in (k, expected_nnz(n, k, P), min(n, k * P))
    )
    return CostRange(least, expected, most)


def exdyna(P: int, n: int, k: int, wire: WireBytes, *, head_bytes: int, early: float) -> CostRange:
    """ExDyna: every rank selects k/P in its own partition, so the union has k indices.

    `head_bytes` come with each rank's indices: counts at the levels of the threshold. At most, one
    rank selects four times its part, and all have sent `early` times theirs in vain before.
    """
    share, messages = (P - 1) / P, allgather_messages(P)
    levels = Cost(0, plain_words=head_bytes / WORD_BYTES * (P - 1))
    usual = _in_turn([_summed_at(P, k, k * share), levels])
    loud = _summed_at(P, k, min(P, 4) / P * k * messages)
    in_vain = Cost(messages, indices=early * k / P * messages)
    return CostRange(usual, usual, _in_turn([loud, levels, in_vain]))


def clt_k(P: int, n: int, k: int, wire: WireBytes) -> CostRange:
    """CLT-k: the leader's k indices, at most. A rank leads, and receives none, once in P steps."""
    cost = _summed_at(P, k, k * (P - 1) / P)
    return CostRange(cost, cost, _summed_at(P, k, k * allgather_messages(P)))


def _summed_at(P: int, union: float, indices: float) -> Cost:
    """Indices gathered, then accumulators summed at their union by its owners, and gathered."""
    share, gather = (P - 1) / P, allgather_messages(P)
    hidden = in_flight(P - 1) + 2 * allgather_in_flight(P)
    work = Work(added_values=union * (1 + share), selected_entries=union)
    return Cost(
        P - 1 + 2 * gather,
        dense_words=2 * union * share,
        in_flight=hidden,
        work=work,
        indices=indices,
    )


def _sum_of_streams(n: int, k: int, ranks: float, wire: WireBytes, share: float = 1.0) -> Cost:
    """A message with a share of the sum of several ranks' streams, in the shorter form.

    In memory the entries of the last two operands decide the form, before they are summed. A sparse
    sum is then sent in the form that is shorter on the wire.
    """
    operands = expected_nnz(n, k, max(1.0, ranks / 2)) * min(2.0, ranks)
    entries = expected_nnz(n, k, ranks)
    if wire.fills(n, operands) or entries * wire.entry_bytes >= n * wire.dense_value_bytes:
        return Cost(1, dense_words=n * share)
    return Cost(1, entries=entries * share)


def _merged_in_batches(P: int, n: int, k: int) -> float:
    """Entries that a rank merges when it adds each batch of messages to the sum."""
    merged, streams = 0.0, 1
    for batch in batches(P):
        merged += (expected_nnz(n, k, streams) + len(batch) * k) / P
        streams += len(batch)
    return merged


def _combined_by_two(n: int, k: int, ranks: float, wire: WireBytes) -> Work:
    """The work of combining two sums of `ranks` streams each."""
    if _sum_of_streams(n, k, ranks, wire).dense_words:
        return Work(added_values=2 * n)
    operands = 2 * expected_nnz(n, k, ranks)
    if wire.fills(n, operands):
        return Work(scattered_entries=operands, added_values=n)
    return Work(operands)


def _scanned(regions: Cost, n: int) -> Cost:
    """What was gathered; dense regions are scanned."""
    return replace(regions, work=Work(scanned_values=n * (regions.dense_words > 0)))


def _split(P: int, n: int, k: int, wire: WireBytes) -> Cost:
    """The split phase: each rank's stream goes to the owners of the regions."""
    stream = _sum_of_streams(n, k, 1, wire, (P - 1) / P)
    work = Work(0, k, n / P) if wire.fills(n / P, k) else Work(k)
    return replace(stream, messages=P - 1, in_flight=in_flight(P - 1), work=work)


def _gathered(P: int, received: Cost) -> Cost:
    """What an allgather receives."""
    return replace(received, messages=allgather_messages(P), in_flight=allgather_in_flight(P))


def _in_turn(costs: Iterable[Cost]) -> Cost:
    total = Cost(0)
    for cost in costs:
        total = Cost(*(getattr(total, f.name) + getattr(cost, f.name) for f in fields(Cost)))
    return total
