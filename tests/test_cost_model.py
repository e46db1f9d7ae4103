"""The cost model: the papers' formulas, and what the simulator counts."""

from __future__ import annotations

from math import log2

import pytest
import torch

from hvd_sparse.collectives.oktopk import COUNT_BYTES, HEAD_BYTES
from hvd_sparse.collectives.registry import STREAMED, cheapest, cost
from hvd_sparse.cost_model import WORD_BYTES, Cost, Link, Pace, WireBytes, Work, expected_nnz
from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.simulator import (
    ALGORITHMS,
    Network,
    SyntheticStreams,
    Workload,
    simulate,
)
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.transports.framing import HEADER_BYTES
from hvd_sparse.wire import WIRES, CompactWire, PlainWire, Wire

LINK = Link(1e-5, 1e-9, 1e-10)
COMPACT_WIRES: dict[str, Wire] = {
    wire.name: wire
    for wire in (
        WIRES["float16+gap"],
        WIRES["qsgd4+gap"],
        CompactWire("float32", "gap", dense_values="qsgd2"),
    )
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 16, 32])
@pytest.mark.parametrize("density", [0.01, 0.05, 0.3])
def test_predictions_are_what_the_simulator_counts(
    algorithm: str, world_size: int, density: float
) -> None:
    numel = 60_000
    k = round(density * numel)
    outcome = simulate(
        algorithm, world_size, Workload(numel, k), Network(LINK), SyntheticStreams(), stretch=1.0
    )
    model = cost(algorithm, world_size, numel, k)
    headers = (HEADER_BYTES // 4 + 1) * outcome.messages.worst
    control = headers + 10 * world_size  # and tables of sizes
    received, messages = outcome.received_words, outcome.messages.worst
    words = received.mean
    if algorithm == "gtopk":  # its root first receives, then sends
        words = received.worst + outcome.sent_words.worst
    assert words == pytest.approx(model.expected.words, rel=0.1, abs=control)
    assert model.least.words * 0.9 <= received.worst <= model.most.words * 1.02 + control
    assert messages <= model.most.messages
    assert outcome.exchange_s == pytest.approx(model.expected.seconds(LINK), rel=0.15, abs=2e-5)


@pytest.mark.parametrize("world_size", [3, 5, 7, 31])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_worlds_take_the_predicted_time(algorithm: str, world_size: int) -> None:
    numel, k = 60_000, 1_200
    outcome = simulate(
        algorithm, world_size, Workload(numel, k), Network(LINK), SyntheticStreams(), stretch=1.0
    )
    expected = cost(algorithm, world_size, numel, k).expected
    assert outcome.exchange_s == pytest.approx(expected.seconds(LINK), rel=0.2, abs=2e-5)


@pytest.mark.parametrize("wire", COMPACT_WIRES.values(), ids=COMPACT_WIRES)
@pytest.mark.parametrize("algorithm", [name for name in STREAMED if name != "dense"])
@pytest.mark.parametrize(("world_size", "density"), [(3, 0.02), (8, 0.02), (4, 0.3)])
def test_compact_wires_take_the_predicted_bytes(
    algorithm: str, world_size: int, density: float, wire: Wire
) -> None:
    numel = 240_000
    k = round(density * numel)
    by_bytes = Link(0.0, 1.0)
    outcome = simulate(
        algorithm,
        world_size,
        Workload(numel, k),
        Network(by_bytes),
        SyntheticStreams(),
        stretch=1.0,
        wire=wire,
    )
    room = wire.expected_bytes(numel, k)
    expected = cost(algorithm, world_size, numel, k, room).expected
    predicted = expected.seconds(by_bytes, room)
    # Indices are taken for those of one rank's entries: a sum of eight has gaps of three bits less.
    # Control: headers, tables, scales; the first 128 gaps may have the bits of the first index.
    control = 300 * outcome.messages.worst
    assert outcome.exchange_s == pytest.approx(predicted, rel=0.2, abs=control)


def oktopk_control_words(world_size: int) -> float:
    return (COUNT_BYTES + HEAD_BYTES) / WORD_BYTES * (world_size - 1)


def test_rows_of_table_1() -> None:
    P, n, k = 64, 1_000_000, 1_000
    share = (P - 1) / P
    dense = cost("dense", P, n, k).expected
    assert (dense.messages, dense.words) == (2 * log2(P), 2 * n * share)
    assert dense.work == Work(0, k, n * (1 + share), n)
    assert cost("topk_allgather", P, n, k).expected.work == Work(k * P)
    assert cost("topk_allgather", P, n, k).most.words == 2 * k * (P - 1)
    assert cost("topk_allgather", P, n, k).most.messages == log2(P)
    assert cost("gtopk", P, n, k).most.words == 4 * k * log2(P)
    dsa = cost("dsar_split_allgather", P, n, k)
    assert dsa.expected.words == (2 * k + n) * share
    assert dsa.most.messages <= P + 2 * log2(P)
    oktopk = cost("oktopk", P, n, k)
    control = oktopk_control_words(P)
    assert oktopk.least.words == 2 * k * share
    assert oktopk.most.words - control == 6 * k * share
    assert oktopk.most.messages <= 2 * P + 2 * log2(P)


def test_lemma_5_1_bounds_what_sums_everything() -> None:
    """SparCML's lemma 5.1: 2 (P-1)/P k β_d at least if all overlap, and log P messages."""
    P, n, k = 32, 1_000_000, 500
    for name in ("topk_allgather", "ssar_recursive_double", "ssar_split_allgather"):
        least = cost(name, P, n, k).least
        assert least.words >= 2 * (P - 1) / P * k
        assert least.messages >= log2(P)
    double = cost("ssar_recursive_double", P, n, k)
    assert double.least.entries == k * log2(P)
    assert double.most.entries == k * (P - 1)
    split = cost("ssar_split_allgather", P, n, k)
    assert split.least.entries == 2 * k * (P - 1) / P
    assert split.most.entries == k * P
    filling = cost("topk_dsa", P, n, n // 10).most
    assert filling.words == (2 * (n // 10) + n) * (P - 1) / P


def test_intervals_are_in_order() -> None:
    for name in ALGORITHMS:
        for P in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 1024):
            for n, k in ((0, 0), (1, 1), (1000, 10), (1000, 1000), (10**8, 10**6)):
                c = cost(name, P, n, k)
                # Table 1 counts no control words; a sum that fills up is sent dense.
                control = oktopk_control_words(P) if name == "oktopk" and P > 1 else 0
                assert c.expected.words <= c.most.words + control + 1e-6
                assert c.expected.messages <= c.most.messages


def test_fill_in() -> None:
    assert expected_nnz(1000, 10, 1) == pytest.approx(10)
    assert expected_nnz(1000, 0, 8) == 0
    assert expected_nnz(1000, 1000, 3) == 1000
    assert expected_nnz(0, 0, 3) == 0
    assert expected_nnz(1_000_000, 10_000, 16) == pytest.approx(148_542, rel=1e-3)


def test_the_cheapest_changes_with_size_and_link() -> None:
    names = ("topk_allgather", "oktopk", "dense")
    slow, quick = Link(1e-4, 8e-9), Link(1e-3, 1e-12)
    assert cheapest(names, 64, 10**7, 10**5, slow) == "oktopk"
    assert cheapest(names, 64, 10**7, 10**5, quick) == "topk_allgather"
    assert cheapest(names, 64, 10**7, 10, slow) == "topk_allgather"
    assert cheapest(names, 64, 10**7, 10**7, slow) == "dense"
    assert cheapest(names, 1, 10**7, 10**7, slow) == "topk_allgather"


def test_a_smaller_wire_costs_less() -> None:
    received = Cost(3, entries=1000, dense_words=500, plain_entries=10, plain_words=7)
    assert received.nbytes() == 4 * received.words
    wire = WireBytes(1.25, 2, 0.5)
    assert received.nbytes(wire) == 3250 + 250 + 80 + 28
    by_bytes = Link(0.0, 1.0)
    assert received.seconds(by_bytes, wire) == received.nbytes(wire)
    rows = WireBytes(4, 64, 64, 64)
    assert received.nbytes(rows) == 1000 * 68 + 500 * 64 + 10 * 68 + 7 * 64


def test_work_takes_its_time_by_what_it_is() -> None:
    work = Work(5, 6, 7, 8, 9)
    in_memory = Link(0.0, 0.0, 1.0)
    assert Cost(0, work=work).seconds(in_memory) == 8 * (5 + 6 + 9) + 4 * (7 + 8)
    doubles = WireBytes(4, 8, 8, 8)
    assert Cost(0, work=work).seconds(in_memory, doubles) == 12 * (5 + 6 + 9) + 8 * (7 + 8)
    rows = WireBytes(4, 64, 64, 64)
    assert Cost(0, work=work).seconds(in_memory, rows) == 68 * (5 + 6 + 9) + 64 * (7 + 8)
    by_kind = Link(0.0, 0.0, 1.0, pace=Pace(1.0, 10.0, 100.0, 1e3, 1e4))
    assert Cost(0, work=work).seconds(by_kind) == 98_765
    with pytest.raises(ConfigError, match="scanned_values must be a finite number of at least 0"):
        Pace(scanned_values=-1.0)


KINDS_OF_WORK = {
    "merged_entries": Pace(merged_entries=1e-8),
    "scattered_entries": Pace(scattered_entries=1e-8),
    "added_values": Pace(added_values=1e-8),
    "scanned_values": Pace(scanned_values=1e-8),
    "selected_entries": Pace(selected_entries=1e-8),
}


@pytest.mark.parametrize("kind", KINDS_OF_WORK)
@pytest.mark.parametrize("algorithm", STREAMED)
@pytest.mark.parametrize(("world_size", "density"), [(4, 0.01), (8, 0.05), (8, 0.3)])
def test_predicted_work_is_what_the_collectives_do(
    algorithm: str, world_size: int, density: float, kind: str
) -> None:
    """By the simulator's clock, which a collective's own account of its work moves."""
    numel = 60_000
    k = round(density * numel)
    link = Link(0.0, 0.0, pace=KINDS_OF_WORK[kind])
    outcome = simulate(
        algorithm, world_size, Workload(numel, k), Network(link), SyntheticStreams(), stretch=1.0
    )
    expected = cost(algorithm, world_size, numel, k).expected.seconds(link)
    assert outcome.exchange_s == pytest.approx(expected, rel=0.15, abs=2e-7 * world_size)


@pytest.mark.parametrize("value_bytes", [4, 64])
def test_a_sum_turns_dense_by_its_values_bytes(value_bytes: int) -> None:
    """A row of 64 bytes has one index: sparse takes less room until nearly every row is there."""
    wire = PlainWire(torch.float32, (value_bytes // 4,)).expected_bytes(10_000, 2_000)
    expected = cost("ssar_recursive_double", 8, 10_000, 2_000, wire).expected
    assert (expected.dense_words > 0) == (value_bytes == 4)


def test_merging_counts_in_the_choice() -> None:
    """At P = 8 and density 0.05 recursive doubling sends 5 % less, and merges 70 % more."""
    n, k = 1_000_000, 50_000
    candidates = ("ssar_recursive_double", "topk_allgather")
    double, gathered = (cost(name, 8, n, k).expected for name in candidates)
    assert double.words < gathered.words
    assert double.work.merged_entries > 1.6 * gathered.work.merged_entries
    link = Link(1e-4, 8e-9, 1e-9, pace=Pace(1e-8, 1e-8, 1e-9, 1e-9, 1e-8))
    assert cheapest(candidates, 8, n, k, link) == "topk_allgather"
    assert cheapest(candidates, 8, n, k, Link(1e-4, 8e-9)) == "ssar_recursive_double"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_messages_in_flight_take_the_gap(algorithm: str, world_size: int) -> None:
    link = Link(1e-3, 1e-12, gap_s=2e-4)
    outcome = simulate(
        algorithm, world_size, Workload(1000, 20), Network(link), SyntheticStreams(), stretch=1.0
    )
    expected = cost(algorithm, world_size, 1000, 20).expected
    assert outcome.exchange_s == pytest.approx(expected.seconds(link), rel=0.1)
    assert (expected.in_flight > 0) == (expected.seconds(link) < expected.messages * 9.9e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("magic", 2, 10, 1), "algorithm must be one of"),
        (("oktopk", 0, 10, 1), "world_size"),
        (("oktopk", 2, -1, 0), "numel"),
        (("oktopk", 2, 10, 11), r"k must be in \[0, numel = 10\], got 11"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost(*arguments)
    with pytest.raises(ConfigError, match="alpha_s"):
        Link(-1.0, 0.0)
    for gap_s in (2e-5, -1e-9, float("nan")):
        with pytest.raises(ConfigError, match=r"gap_s must be in \[0, alpha_s = 1e-05\]"):
            Link(1e-5, 0.0, gap_s=gap_s)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("name", ["exdyna", "clt_k", "index_union"])
def test_what_sums_accumulators_receives_the_predicted_bytes(name: str, world_size: int) -> None:
    """The mean of the ranks, over as many steps as there are ranks: CLT-k's leader goes round."""
    numel, k = 60_000, 600
    arguments = {"collective": name} if name == "index_union" else {}
    method = METHODS["topk" if arguments else name](density=k / numel, **arguments).make()

    def worker(transport: Transport) -> tuple[int, int]:
        engine = Engine(method)
        engine.connect(transport)
        before = transport.traffic.snapshot()
        for step in range(19 + world_size):
            if step == 19:  # ExDyna has found its threshold
                before = transport.traffic.snapshot()
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            gradient = torch.randn(numel, generator=generator)
            engine.submit(TensorSpec("w", (numel,), "torch.float32"), gradient)
            engine.scale = 1.0
            engine.result("w")
            engine.settle()
        after = transport.traffic.snapshot()
        engine.disconnect()
        received = after.bytes_received - before.bytes_received
        return received, after.messages_received - before.messages_received

    ranks = run_ranks(world_size, worker)
    nbytes, messages = (sum(column) / world_size**2 for column in zip(*ranks, strict=True))
    model = cost(name, world_size, numel, k)
    nbytes -= HEADER_BYTES * messages
    if name == "exdyna":  # it asks once more where its threshold was off
        assert 0.98 * model.least.nbytes() <= nbytes <= 1.1 * model.most.nbytes()
    else:
        assert nbytes == pytest.approx(model.expected.nbytes(), rel=0.1)
    assert model.least.messages <= messages <= model.most.messages
