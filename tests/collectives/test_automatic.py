"""The choice of a collective, and the measurement that it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_sparse
from hvd_sparse.collectives import SsarRecursiveDouble, SsarSplitAllgather, TopkAllgather
from hvd_sparse.collectives.automatic import (
    LARGE_PINGS,
    PINGS,
    AutomaticCollective,
    cheapest_algorithm,
    link_of,
    lossless_wire,
    measure_link,
)
from hvd_sparse.collectives.registry import BY_NAME, LOSSLESS_CANDIDATES, name_of
from hvd_sparse.cost_model import KINDS, ORDINARY_LINK, Link, Pace
from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.simulator import Network, SimulatedWorld, SyntheticStreams, Workload, simulate
from hvd_sparse.recording import Recorder
from hvd_sparse.topology import MESSAGES_IN_FLIGHT, allgather_messages
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.wire import WIRES, CompactWire, Wire

SLOW_MERGE = Pace(merged_entries=1e-7)
DENSE_BY_QSGD = CompactWire("float32", "gap", dense_values="qsgd2")


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_all_ranks_measure_the_same_link_once(world_size: int) -> None:
    def measure(transport: Transport) -> tuple[Link, Link, int]:
        link = link_of(transport)
        messages = transport.traffic.messages_sent
        again = link_of(transport)
        assert transport.traffic.messages_sent == messages
        assert transport.traffic.bytes_sent < 6 << 20
        return link, again, messages

    outcomes = run_ranks(world_size, measure)
    first = outcomes[0][0]
    assert all(link == again == first for link, again, _ in outcomes)
    assert first.alpha_s > 0
    assert first.reduction_s_per_byte > 0
    assert all(getattr(first.computing, kind) > 0 for kind in KINDS)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_only_the_first_large_ping_of_a_pair_is_cut_in_two(world_size: int) -> None:
    def measure(transport: Transport) -> int:
        measure_link(transport)
        return transport.traffic.messages_sent

    at_once = min(world_size - 1, MESSAGES_IN_FLIGHT)
    pings = (1 + at_once) * (PINGS + 1) + LARGE_PINGS + 1
    pings += min(world_size - 1, LARGE_PINGS + 1)
    figures = allgather_messages(world_size)
    assert run_ranks(world_size, measure) == [pings + figures] * world_size


def test_a_given_link_is_not_measured() -> None:
    given = Link(1e-5, 1e-9)

    def measure(transport: Transport) -> Link:
        transport.link = given
        link = link_of(transport)
        assert transport.traffic.messages_sent == 0
        return link

    assert run_ranks(3, measure) == [given] * 3


def test_a_world_of_one_measures_nothing() -> None:
    assert run_ranks(1, link_of) == [ORDINARY_LINK]


@pytest.mark.parametrize(
    ("world_size", "k", "link", "expected"),
    [
        (8, 10, Link(1e-3, 1e-9), SsarRecursiveDouble),
        (8, 100_000, Link(1e-6, 1e-8), SsarSplitAllgather),
        (3, 10, Link(1e-3, 1e-8), TopkAllgather),
        (2, 50_000, Link(1e-3, 1e-8), TopkAllgather),
    ],
)
def test_the_collective_follows_from_world_k_and_link(
    world_size: int, k: int, link: Link, expected: type
) -> None:
    def choose(transport: Transport) -> type:
        transport.link = link
        wire = WIRES["float16"]
        collective = AutomaticCollective(transport, 1_000_000, k, wire=wire)
        assert collective.chosen.wire is wire
        assert BY_NAME[collective.algorithm].is_lossless
        return type(collective.chosen)

    assert run_ranks(world_size, choose) == [expected] * world_size


def test_a_device_sums_in_passing() -> None:
    def choose(transport: Transport) -> list[str]:
        transport.link = Link(1e-4, 8e-10, pace=SLOW_MERGE)
        on_host = cheapest_algorithm(transport, 20_000_000, 200_000)
        transport.land_pinned()
        return [on_host, cheapest_algorithm(transport, 20_000_000, 200_000)]

    assert run_ranks(2, choose) == [["ssar_split_allgather", "topk_allgather"]] * 2


def test_a_set_that_a_caller_names_may_lose_entries() -> None:
    def choose(transport: Transport) -> str:
        transport.link = Link(1e-6, 1e-8)
        names = ("oktopk", "topk_allgather")
        return AutomaticCollective(transport, 1_000_000, 50_000, algorithms=names).algorithm

    assert run_ranks(8, choose) == ["oktopk"] * 8
    method = hvd_sparse.Compression.topk(collective="oktopk,topk_allgather").method

    def choose_by_option(transport: Transport) -> str:
        transport.link = Link(1e-6, 1e-8)
        return name_of(method.collective(transport, 1_000_000, 50_000))

    assert run_ranks(8, choose_by_option) == ["oktopk"] * 8
    for wrong in ("oktopk,auto", "oktopk,", "magic", "oktopk,index_union"):
        with pytest.raises(ConfigError, match="collective must be one of"):
            hvd_sparse.Compression.topk(collective=wrong)


def test_the_choice_is_part_of_the_state() -> None:
    """A restart repeats it, though it measures another link; another world chooses anew."""
    quick, slow = Link(1e-3, 1e-12), Link(1e-9, 1e-6)

    def train(transport: Transport, link: Link) -> AutomaticCollective:
        transport.link = link
        return AutomaticCollective(transport, 10_000, 1000)

    def first(transport: Transport) -> dict[str, Any]:
        collective = train(transport, quick)
        stream = SyntheticStreams().stream(transport.rank, 0, 10_000, 1000)
        collective.reduce(stream)
        return collective.state_dict()

    def again(transport: Transport) -> tuple[str, str, int]:
        collective = train(transport, slow)
        measured = collective.algorithm
        collective.load_state_dict(state)
        return measured, collective.algorithm, collective.step

    state = run_ranks(8, first)[0]
    assert state["algorithm"] == "ssar_recursive_double"
    assert run_ranks(8, again) == [("ssar_split_allgather", "ssar_recursive_double", 1)] * 8
    assert run_ranks(3, again) == [("topk_allgather", "topk_allgather", 1)] * 3
    state = {**state, "algorithm": "oktopk"}
    with pytest.raises(ConfigError, match=r"algorithm must be one of .* got 'oktopk'"):
        run_ranks(2, again)


def test_a_choice_that_keeps_no_other_worlds_state_begins_anew() -> None:
    """Ok-Topk has no regions there yet: it draws them, and its volume stays bounded."""
    numel, k = 100_000, 1000

    def worker(transport: Transport) -> tuple[dict[str, Any], int]:
        transport.link = ORDINARY_LINK
        collective = AutomaticCollective(transport, numel, k, algorithms=["oktopk"])
        if states:
            collective.load_state_dict(states[transport.rank])
        streams = SyntheticStreams()
        before = transport.traffic.snapshot()
        collective.reduce(streams.stream(transport.rank, 5, numel, k))
        received = transport.traffic.since(before).bytes_received
        return collective.state_dict(), received

    states: list[dict[str, Any]] = []
    new = [received for _, received in run_ranks(3, worker)]
    states = [state for state, _ in run_ranks(4, worker)]
    assert [received for _, received in run_ranks(3, worker)] == new


def test_the_choice_is_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """In the log, in `stats()`, in the recording and in the state; there a restart finds it."""
    caplog.set_level("INFO", "hvd_sparse")
    spec = TensorSpec("weight", (2000,), "torch.float32")
    method = hvd_sparse.Compression.topk(density=0.1, wire="float32").method

    def step(transport: Transport, engine: Engine) -> tuple[str, dict[str, Any]]:
        engine.connect(transport)
        engine.scale = 1.0
        engine.submit(spec, torch.arange(2000.0))
        engine.result("weight")
        engine.settle()
        return engine.stats().buckets[0].collective, engine.state_dict()

    def train(transport: Transport) -> tuple[str, dict[str, Any]]:
        transport.link = Link(1e-3, 1e-12)
        recorder = Recorder(tmp_path / "run.jsonl")
        told = step(transport, Engine(method, recorder))
        recorder.close()
        return told

    def restart(transport: Transport) -> str:
        transport.link = Link(1e-9, 1e-6)
        engine = Engine(method)
        engine.load_state_dict(told[transport.rank][1])
        return step(transport, engine)[0]

    told = run_ranks(8, train)
    assert {name for name, _ in told} == {"ssar_recursive_double"}
    assert "sums 200 of 2000 elements by ssar_recursive_double" in caplog.text
    assert '"collective":["ssar_recursive_double"]' in (tmp_path / "run.jsonl").read_text()
    assert run_ranks(8, restart) == ["ssar_recursive_double"] * 8
    assert "by ssar_recursive_double: as in the state" in caplog.text


@pytest.mark.parametrize(
    ("k", "wire", "expected"),
    [
        (100_000, WIRES["float32"], "ssar_split_allgather"),
        (100_000, WIRES["float16+gap"], "ssar_recursive_double"),
        (30_000, WIRES["float32"], "ssar_recursive_double"),
        (30_000, DENSE_BY_QSGD, "ssar_split_allgather"),
    ],
)
def test_the_wire_counts(k: int, wire: Wire, expected: str) -> None:
    def choose(transport: Transport) -> str:
        transport.link = Link(1e-4, 1e-8)
        return cheapest_algorithm(transport, 1_000_000, k, wire=wire)

    assert run_ranks(8, choose) == [expected] * 8


@pytest.mark.parametrize(
    ("world_size", "k", "link", "expected"),
    [
        (2, 40_000, Link(1e-4, 8e-9), "float32+gap"),  # 1 Gb/s
        (4, 40_000, Link(1e-4, 8e-9, 1e-9, pace=SLOW_MERGE), "float32"),
        (4, 400, Link(1e-4, 8e-9), "float32"),  # too few to pay for the calls
        (4, 4_000, Link(1e-4, 8e-8), "float32+gap"),  # 100 Mb/s
        (4, 40_000, Link(1e-5, 2e-10), "float32"),
        (1, 40_000, Link(1e-4, 8e-8), "float32"),
    ],
)
def test_gaps_are_taken_where_they_save_time(
    world_size: int, k: int, link: Link, expected: str
) -> None:
    options = {"topk": {"collective": "auto"}, "oktopk": {}, "exdyna": {}}
    methods = [getattr(hvd_sparse.Compression, name)(**options[name]).method for name in options]

    def choose(transport: Transport) -> list[str]:
        transport.link = link
        return [method.collective(transport, 4_000_000, k).wire.name for method in methods]

    assert run_ranks(world_size, choose) == [[expected] * len(methods)] * world_size


def test_a_transport_between_devices_codes_no_gaps() -> None:
    def choose(transport: Transport) -> str:
        transport.link, transport.device = Link(1e-4, 8e-8), torch.device("cuda")
        return lossless_wire(transport, 4_000_000, 40_000).name

    assert run_ranks(2, choose) == ["float32"] * 2


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("name", ["topk", "oktopk", "exdyna"])
def test_lossless_wires_train_the_same_bits(name: str, world_size: int) -> None:
    """In the dense steps and the warm-up, too: with indices and with gaps."""
    spec = TensorSpec("weight", (5000,), "torch.float32")

    def train(wire: str) -> list[torch.Tensor]:
        make = getattr(hvd_sparse.Compression, name)
        method = make(density=0.01, wire=wire, dense_steps=1, warmup_steps=4).method

        def worker(transport: Transport) -> torch.Tensor:
            transport.link = ORDINARY_LINK
            engine = Engine(method)
            engine.connect(transport)
            engine.scale = 1.0
            draws = torch.Generator().manual_seed(transport.rank)
            found = []
            for _ in range(7):
                engine.submit(spec, torch.randn(5000, generator=draws))
                found.append(engine.result("weight").clone())
                engine.settle()
            engine.disconnect()
            return torch.cat(found)

        return run_ranks(world_size, worker)

    for whole, gaps in zip(train("float32"), train("float32+gap"), strict=True):
        assert torch.equal(whole.view(torch.int32), gaps.view(torch.int32))


CANDIDATES = (*LOSSLESS_CANDIDATES, "oktopk", "spardl")


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("density", [0.0005, 0.005, 0.05, 0.3])
@pytest.mark.parametrize(
    "link", [Link(1e-4, 8e-9, 1e-9), Link(1e-5, 1e-9, 1e-9)], ids=["1gbit", "8gbit"]
)
def test_the_pick_is_nearly_the_best_that_is_simulated(
    world_size: int, density: float, link: Link
) -> None:
    numel = 100_000
    workload = Workload(numel, round(density * numel))
    seconds = {
        name: simulate(name, world_size, workload, Network(link), SyntheticStreams()).exchange_s
        for name in CANDIDATES
    }

    def choose(transport: Transport) -> str:
        transport.link = link
        return cheapest_algorithm(transport, numel, workload.k, CANDIDATES)

    picked = SimulatedWorld(world_size, Network(link)).run(choose)[0]
    assert seconds[picked] <= 1.2 * min(seconds.values())
