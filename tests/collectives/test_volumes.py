"""What goes over the wire, against Ok-Topk's Table 1 and SparCML's lemmas 5.1 and 5.2, in words.

Every exchange is counted at its sender, by channel, without the transport's headers; a part's
message has two words of its own, and a gathered block two more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil, log2
from typing import Any

import pytest
import torch

from benchmarks.patterns import JUMP_STEP, PATTERNS, PatternStreams
from hvd_sparse.collectives import (
    Collective,
    DsarSplitAllgather,
    GTopk,
    OkTopk,
    SsarRecursiveDouble,
    SsarSplitAllgather,
    TopkAllgather,
)
from hvd_sparse.collectives.oktopk import BINS, COUNT_BYTES, FINE, HEAD_BYTES
from hvd_sparse.collectives.registry import BY_NAME, cost
from hvd_sparse.errors import MessageError
from hvd_sparse.streams import SparseStream
from hvd_sparse.topology import allgather_messages
from hvd_sparse.transports import LocalTransport, Payload, run_ranks
from hvd_sparse.transports.framing import payload_nbytes
from hvd_sparse.transports.transport import Done, Handle
from hvd_sparse.wire import WIRES
from tests.streams import dense

WORD_BYTES = 4
MESSAGE_WORDS = 4
"""A part's header, and a block's place in a table."""
WORLDS = (2, 3, 4, 7, 8, 16)
FULL_SUMS: dict[str, Callable[..., Collective]] = {
    "topk_allgather": TopkAllgather,
    "ssar_recursive_double": SsarRecursiveDouble,
    "ssar_split_allgather": SsarSplitAllgather,
    "dsar_split_allgather": DsarSplitAllgather,
}


@dataclass
class Volume:
    """Words and messages of one exchange: by rank, sent and received, on some channels."""

    world_size: int
    records: list[tuple[str, int, int, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, transport: LocalTransport) -> None:
        exchange = transport.exchange

        def counted(
            payload: Payload | None, dst: int | None, src: int | None, *, channel: str
        ) -> Handle:
            if dst is not None and dst != transport.rank:
                with self.lock:
                    words = payload_nbytes(payload) // WORD_BYTES
                    self.records.append((channel, transport.rank, dst, words))
            return exchange(payload, dst, src, channel=channel)

        transport.exchange = counted  # type: ignore[method-assign]

    def words(self, end: int, *channels: str) -> list[int]:
        """By rank: sent (end 0) or received (end 1)."""
        total = [0] * self.world_size
        for channel, *ends, words in self.records:
            if not channels or channel in channels:
                total[ends[end]] += words
        return total

    def messages(self) -> int:
        """The most that a rank sends."""
        senders = [record[1] for record in self.records]
        return max(senders.count(rank) for rank in range(self.world_size))


def spread(numel: int, places: torch.Tensor, seed: int) -> SparseStream:
    values = torch.randn(places.numel(), generator=torch.Generator().manual_seed(seed))
    return SparseStream(places.to(torch.int32), values, numel)


def independent(numel: int, k: int, rank: int, P: int) -> SparseStream:
    generator = torch.Generator().manual_seed(rank)
    return spread(numel, torch.randperm(numel, generator=generator)[:k].sort().values, rank)


def overlapping(numel: int, k: int, rank: int, P: int) -> SparseStream:
    return spread(numel, torch.arange(k) * (numel // k), rank)


def disjoint(numel: int, k: int, rank: int, P: int) -> SparseStream:
    return spread(numel, torch.arange(k) * (numel // k) + rank, rank)


def one_region(numel: int, k: int, rank: int, P: int) -> SparseStream:
    generator = torch.Generator().manual_seed(rank)
    places = torch.randperm(4 * k, generator=generator)[:k].sort().values
    return spread(numel, places + numel // 2, rank)


Streams = Callable[[int, int, int, int], SparseStream]


def volume_of(
    P: int, numel: int, k: int, streams: Streams, build: Callable[..., Collective]
) -> tuple[Volume, SparseStream]:
    volume = Volume(P)

    def worker(transport: LocalTransport) -> SparseStream:
        volume.watch(transport)
        return build(transport, numel, k).reduce(streams(numel, k, transport.rank, P)).reduced

    return volume, run_ranks(P, worker, timeout_s=60.0)[0]


def slack(volume: Volume, P: int) -> int:
    return MESSAGE_WORDS * (volume.messages() + P)


@pytest.mark.parametrize("P", WORLDS)
@pytest.mark.parametrize("streams", [independent, overlapping, disjoint])
def test_rows_of_table_1(P: int, streams: Streams) -> None:
    k, numel = 60 * P, 60 * P * 20
    share, rounds = (P - 1) / P, ceil(log2(P))
    rows = {
        "topk_allgather": (TopkAllgather, 2 * k * (P - 1), 2 * k * (P - 1)),
        "topk_dsa": (SsarSplitAllgather, 4 * k * share, (2 * k + numel) * share),
        "gtopk": (GTopk, 0, 4 * k * rounds),
        "oktopk": (partial(OkTopk, tolerance=0.0), 2 * k * share, 6 * k * share),
    }
    for name, (build, least, most) in rows.items():
        volume, _ = volume_of(P, numel, k, streams, build)
        if name == "oktopk":
            received = volume.words(1, "split", "balance", "allgather")
        else:
            received = volume.words(1)
        assert sum(received) / P >= 0.98 * least, name  # regions hold k/P, give or take some
        assert max(received) <= 1.1 * most + slack(volume, P), name


@pytest.mark.parametrize("P", [2, 4, 8, 16])
def test_sparcml_costs(P: int) -> None:
    """Section 5.3, in entries of two words: exact at both ends of each interval."""
    k, numel = 16 * P, 16 * P * 4 * P
    rounds = int(log2(P))

    volume, _ = volume_of(P, numel, k, overlapping, SsarRecursiveDouble)
    assert volume.words(1) == [rounds * (2 * k + 2)] * P
    volume, _ = volume_of(P, numel, k, disjoint, SsarRecursiveDouble)
    assert volume.words(1) == [2 * k * (P - 1) + 2 * rounds] * P
    assert volume.messages() == rounds

    volume, _ = volume_of(P, numel, k, overlapping, SsarSplitAllgather)
    assert max(volume.words(1)) <= 4 * k * (P - 1) / P + slack(volume, P)
    volume, _ = volume_of(P, numel, k, disjoint, SsarSplitAllgather)
    assert max(volume.words(1)) <= 2 * k * P + slack(volume, P)

    volume, _ = volume_of(P, numel, k, disjoint, DsarSplitAllgather)
    dense_words = numel * (P - 1) / P
    assert min(volume.words(1)) >= dense_words
    assert max(volume.words(1)) <= 2 * k + dense_words + slack(volume, P)


@pytest.mark.parametrize("P", WORLDS)
@pytest.mark.parametrize("name", FULL_SUMS)
def test_lemmas_5_1_and_5_2(name: str, P: int) -> None:
    """No allreduce takes less: in values, (P-1) k and 2 (P-1)/P k; from δ on, δ - k."""
    k, numel = 20 * P, 20 * P * 4 * P
    volume, total = volume_of(P, numel, k, disjoint, FULL_SUMS[name])
    assert total.as_stream().nnz == k * P
    assert min(volume.words(1)) >= (P - 1) * k
    volume, total = volume_of(P, numel, k, overlapping, FULL_SUMS[name])
    assert total.as_stream().nnz == k
    assert sum(volume.words(1)) / P >= 2 * (P - 1) / P * k
    filling = 6 * k
    volume, total = volume_of(P, filling, k, independent, FULL_SUMS[name])
    is_filled = total.as_stream().nnz >= filling / 2
    assert is_filled == (P >= 4)
    if is_filled:
        assert min(volume.words(1)) >= filling / 2 - k


@pytest.mark.parametrize("P", [2, 3, 5, 8, 13, 16, 31, 64])
@pytest.mark.parametrize("streams", [independent, one_region])
@pytest.mark.parametrize("balance_factor", [1.0, 4.0])
def test_oktopk_is_within_its_bounds(P: int, streams: Streams, balance_factor: float) -> None:
    """2k (P-1)/P ≤ words ≤ 6k (P-1)/P (theorem 3.1, equation 3), however it has to balance."""
    k = 40 * P
    build = partial(OkTopk, balance_factor=balance_factor, tolerance=0.0)
    volume, total = volume_of(P, 50 * k, k, streams, build)
    assert total.as_stream().nnz == k
    low, high = 2 * k * (P - 1) / P, 6 * k * (P - 1) / P
    phases = ("split", "balance", "allgather")
    assert sum(volume.words(1, *phases)) / P >= low
    for end in (0, 1):
        assert max(volume.words(end, *phases)) <= high + slack(volume, P)
        # Exact thresholds: four sums of 256 counters; boundaries: two of a histogram; shares.
        control = max(volume.words(end)) - max(volume.words(end, *phases))
        counters = 4 * 512 + 2 * 2 * (max(BINS, 2 * FINE * P) + 3 * P)
        assert control <= counters * (ceil(log2(P)) + 2) + 4 * P * ceil(log2(P))


def test_oktopk_codes_indices_from_the_start_of_a_region() -> None:
    """Gaps are no longer than entries are apart, wherever a region lies."""
    P, k, numel = 8, 400, 40_000
    wire = WIRES["float32+gap"]
    volume, _ = volume_of(P, numel, k, independent, partial(OkTopk, wire=wire))
    entries = P * k * (P - 1) / P
    payload = entries * wire.expected_bytes(numel, k).entry_bytes / WORD_BYTES
    heads = (2 + COUNT_BYTES / WORD_BYTES) * P * (P - 1)
    assert sum(volume.words(0, "split")) <= payload + heads


STEADY = ("uniform", "identical", "layers", "own expert", "own region", "next region")
STEADY += ("hot rows, a quiet rank", "few nonzeros")
"""Patterns that need no more than the usual messages."""


@pytest.mark.parametrize("P", [2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_oktopk_is_within_its_bounds_in_every_step(pattern: str, P: int) -> None:
    """Sent and received, also where all entries jump; with k entries, and none of them lost."""
    k, numel = max(1600, 100 * P), max(1600, 100 * P) * 60
    streams = PatternStreams(pattern=pattern)
    volumes = [Volume(P) for _ in range(2 * JUMP_STEP)]

    def worker(transport: LocalTransport) -> list[tuple[SparseStream, SparseStream, SparseStream]]:
        collective = OkTopk(transport, numel, k)
        exchange, steps = transport.exchange, []
        for step, volume in enumerate(volumes):
            transport.exchange = exchange  # type: ignore[method-assign]
            volume.watch(transport)
            stream = streams.stream(transport.rank, step, numel, k, P)
            reduction = collective.reduce(stream)
            steps.append((stream, reduction.reduced.as_stream(), reduction.returned))
        return steps

    ranks = run_ranks(P, worker, timeout_s=60.0)
    entries = 3 * k * (P - 1) / P * (1 + 1 / FINE)
    for step, (volume, taken) in enumerate(zip(volumes, zip(*ranks, strict=True), strict=True)):
        gathers = sum(r[:2] == ("allgather", 0) for r in volume.records) / allgather_messages(P)
        heads = (COUNT_BYTES + gathers * HEAD_BYTES) / WORD_BYTES * (P - 1)
        worst = max(max(volume.words(end, "split", "balance", "allgather")) for end in (0, 1))
        assert worst <= 2 * entries + heads + slack(volume, P), step
        applied = taken[0][1]
        given = sum(dense(brought) - dense(returned) for brought, _, returned in taken)
        torch.testing.assert_close(dense(applied), given, rtol=1e-4, atol=1e-2)
        there = int(sum(dense(brought) for brought, _, _ in taken).count_nonzero())
        assert abs(applied.nnz - min(k, there)) <= 0.1 * k, step
    if pattern in STEADY and P <= 8:
        usual = 1 if P == 2 else P - 1 + allgather_messages(P)
        assert [volume.messages() for volume in volumes[1:]] == [usual] * (len(volumes) - 1)


def test_oktopk_is_within_its_bounds_where_k_falls() -> None:
    """As after a stage of a warm-up: what owners may get is less from then on."""
    P, numel, ks = 8, 48_000, (12_000, 12_000, 1600, 1600)
    volumes = [Volume(P) for _ in ks]

    def worker(transport: LocalTransport) -> None:
        collective, exchange = OkTopk(transport, numel, ks[-1]), transport.exchange
        generator = torch.Generator().manual_seed(transport.rank)
        for k, volume in zip(ks, volumes, strict=True):
            transport.exchange = exchange  # type: ignore[method-assign]
            volume.watch(transport)
            others = 1600 + torch.randperm(numel - 1600, generator=generator)[: k - 1600]
            magnitudes = torch.cat([torch.arange(1600), others.sort().values])
            collective.aim(k)
            collective.reduce(spread(numel, magnitudes, transport.rank))

    run_ranks(P, worker, timeout_s=60.0)
    for k, volume in zip(ks, volumes, strict=True):
        gathers = sum(r[:2] == ("allgather", 0) for r in volume.records) / allgather_messages(P)
        heads = (COUNT_BYTES + gathers * HEAD_BYTES) / WORD_BYTES * (P - 1)
        worst = max(max(volume.words(end, "split", "balance", "allgather")) for end in (0, 1))
        assert worst <= 6 * k * (P - 1) / P * (1 + 1 / FINE) + heads + slack(volume, P)


@pytest.mark.parametrize("P", [3, 4, 7])
def test_oktopk_follows_magnitudes_that_grow(P: int) -> None:
    """As residuals do at first: what was sent has begun anew, the others come up from below."""
    k, numel = 500, 50_000
    volumes = [Volume(P) for _ in range(30)]

    def worker(transport: LocalTransport) -> None:
        collective, residual = OkTopk(transport, numel, k), torch.zeros(numel)
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))
        exchange = transport.exchange
        for volume in volumes:
            transport.exchange = exchange  # type: ignore[method-assign]
            volume.watch(transport)
            residual += gradient
            indices = residual.abs().topk(k).indices.sort().values
            stream = SparseStream(indices.int(), residual[indices], numel)
            residual[indices] = 0.0
            residual += dense(collective.reduce(stream).returned).float()

    run_ranks(P, worker, timeout_s=60.0)
    evaluated = [any(r[0] == "global_threshold" for r in each.records) for each in volumes]
    assert evaluated[0]
    assert sum(evaluated[1:]) <= 3


def test_oktopk_levels_sums_that_cancelled_out() -> None:
    """At a threshold of 0 they pass, too; where shares are cut, `largest` leaves them behind."""
    P, k, third = 3, 1000, 10_000

    def stream_of(rank: int, step: int) -> SparseStream:
        few = torch.arange(60) + third * rank
        brought = {0: torch.arange(900), 1: torch.cat([torch.arange(450), few]), 2: few}[rank]
        if step == 0:
            brought = (33 * torch.arange(300) + third * torch.arange(P)[:, None]).view(-1)
        values = torch.where((brought < third) & (rank == 1) & (step > 0), -1.0, 1.0)
        return SparseStream(brought.int(), values, P * third)

    def worker(transport: LocalTransport) -> list[torch.Tensor]:
        collective, missing = OkTopk(transport, P * third, k), []
        for step in range(4):
            stream = stream_of(transport.rank, step)
            reduction = collective.reduce(stream)
            applied = dense(reduction.reduced.as_stream())
            missing.append(dense(stream) - dense(reduction.returned) - applied / P)
        return missing

    for step in zip(*run_ranks(P, worker, timeout_s=60.0), strict=True):
        torch.testing.assert_close(sum(step), torch.zeros_like(step[0]))


@pytest.mark.parametrize("P", [2, 4, 8])
def test_oktopk_asks_for_shares_only_after_an_imbalance(P: int) -> None:
    """Two rounds a step, one to split and one to gather, as long as magnitudes are alike."""
    k, numel = 2000, 200_000
    volumes = [Volume(P) for _ in range(12)]
    loud = 6  # from this step on the first quarter is

    def worker(transport: LocalTransport) -> list[int]:
        collective = OkTopk(transport, numel, k)
        exchange = transport.exchange
        applied = []
        for step, volume in enumerate(volumes):
            transport.exchange = exchange  # type: ignore[method-assign]
            volume.watch(transport)
            stream = independent(numel, k, 100 * step + transport.rank, P)
            if step >= loud:
                stream.values[stream.indices < numel // 4] *= 100.0
            applied.append(collective.reduce(stream).reduced.nnz)
        return applied

    for nnz in run_ranks(P, worker, timeout_s=60.0)[0]:
        assert abs(nnz - k) <= 0.1 * k
    rounds = [{record[0] for record in volume.records} for volume in volumes]
    usual = {"split"} if P == 2 else {"split", "allgather"}
    assert rounds[1:loud] == [usual] * (loud - 1)
    assert all("shares" in each for each in rounds[loud + 1 :]) == (P > 2)
    for volume in volumes[1:loud]:
        assert volume.messages() == P - 1 + (P > 2) * allgather_messages(P)


@pytest.mark.parametrize("wire", ["float32", "qsgd4+gap"])
@pytest.mark.parametrize("scale", [1e-3, 0.7, 1.5, 1e3])
def test_oktopk_holds_k_when_magnitudes_jump(scale: float, wire: str) -> None:
    """The exact threshold is found in the same step; what was sent is not sent again."""
    P, k, numel = 4, 2000, 200_000
    volumes = [Volume(P) for _ in range(6)]

    def worker(transport: LocalTransport) -> tuple[list[int], torch.Tensor, list[SparseStream]]:
        collective = OkTopk(transport, numel, k, wire=WIRES[wire])
        exchange = transport.exchange
        applied, lost, reduced = [], torch.zeros(numel, dtype=torch.float64), []
        for step, volume in enumerate(volumes):
            transport.exchange = exchange  # type: ignore[method-assign]
            volume.watch(transport)
            stream = independent(numel, k, 100 * step + transport.rank, P)
            stream = stream.times(scale if step >= 3 else 1.0)
            reduction = collective.reduce(stream)
            lost += dense(stream) - dense(reduction.returned)
            applied.append(reduction.reduced.nnz)
            reduced.append(reduction.reduced)
        return applied, lost, reduced

    ranks = run_ranks(P, worker, timeout_s=60.0)
    applied, _, reduced = ranks[0]
    assert all(abs(nnz - k) <= 0.1 * k for nnz in applied)
    for other in ranks[1:]:
        for mine, theirs in zip(reduced, other[2], strict=True):
            assert torch.equal(mine.indices, theirs.indices)
            assert torch.equal(mine.values, theirs.values)
    given = sum(rank[1] for rank in ranks)
    total = sum((dense(each) for each in reduced), torch.zeros(numel, dtype=torch.float64))
    torch.testing.assert_close(total, given, rtol=0, atol=1e-4 * max(1.0, scale))
    if wire == "float32":
        for volume in volumes:
            worst = max(max(volume.words(end, "split", "allgather")) for end in (0, 1))
            assert worst <= 6 * k * (P - 1) / P + COUNT_BYTES + HEAD_BYTES + slack(volume, P)


@pytest.mark.parametrize("P", [2, 4, 7])
def test_oktopk_goes_on_from_its_state(P: int) -> None:
    """Bit for bit, also in the middle between two exact thresholds, and after an imbalance."""
    k, numel, steps = 500, 50_000, 12

    def stream_of(rank: int, step: int) -> SparseStream:
        stream = independent(numel, k, 100 * step + rank, P)
        stream.values[stream.indices < numel // 10] *= 1.0 + 10.0 * (step % 4 == 2)
        return stream

    def worker(transport: LocalTransport) -> list[list[SparseStream]]:
        runs: list[list[SparseStream]] = [[], []]
        first = OkTopk(transport, numel, k, threshold_interval=7)
        states = []
        for step in range(steps):
            states.append(first.state_dict())
            runs[0].append(first.reduce(stream_of(transport.rank, step)).reduced)
        for step in range(steps):
            again = OkTopk(transport, numel, k, threshold_interval=7)
            again.load_state_dict(states[step])
            runs[1].append(again.reduce(stream_of(transport.rank, step)).reduced)
        return runs

    for one, other in run_ranks(P, worker, timeout_s=60.0):
        for mine, theirs in zip(one, other, strict=True):
            assert torch.equal(mine.indices, theirs.indices)
            assert torch.equal(mine.values, theirs.values)


def test_oktopk_refuses_a_message_without_its_head() -> None:
    def worker(transport: LocalTransport) -> None:
        gather, exchange = transport.allgather, transport.exchange

        def gathered(payload: Payload, *, channel: str) -> list[torch.Tensor]:
            return [message[: HEAD_BYTES - 8] for message in gather(payload, channel=channel)]

        def exchanged(*arguments: Any, channel: str) -> Done:
            return Done(exchange(*arguments, channel=channel).received()[: COUNT_BYTES - 8])

        collective = OkTopk(transport, 1000, 20)
        stream = independent(1000, 20, transport.rank, 3)
        collective.reduce(stream)
        transport.allgather = gathered  # type: ignore[method-assign]
        with pytest.raises(MessageError, match=r"numbers of a step must have 16 bytes .* got 8"):
            collective.reduce(stream)
        transport.exchange = exchanged  # type: ignore[method-assign, assignment]
        with pytest.raises(MessageError, match=r"counts at levels must have 284 bytes .* got 276"):
            collective.reduce(stream)

    run_ranks(3, worker)


@pytest.mark.parametrize("P", [3, 4, 7])
@pytest.mark.parametrize("name", ["topk_allgather", "ssar_recursive_double", "gtopk", "spardl"])
def test_no_pattern_exceeds_a_formula(name: str, P: int) -> None:
    """Sent and received by any rank, against the most that the cost model allows for."""
    k, numel = 100 * P, 100 * P * 60
    most = cost(name, P, numel, k).most.words
    for pattern in PATTERNS:
        streams = PatternStreams(pattern=pattern)

        def drawn(
            numel: int, k: int, rank: int, P: int, streams: PatternStreams = streams
        ) -> SparseStream:
            return streams.stream(rank, 0, numel, k, P)

        volume, _ = volume_of(P, numel, k, drawn, BY_NAME[name].collective)
        channels = {record[0] for record in volume.records} - {"boundaries"}  # of a histogram
        for end in (0, 1):
            sent = max(volume.words(end, *channels))
            assert sent <= 1.1 * most + slack(volume, P), (pattern, end)
