"""What every transport has to do: functions that take a transport and assert, run on all ranks.

Inputs differ for every (rank, destination, element), so that no mix-up goes unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from hvd_sparse.transports import Traffic, Transport
from hvd_sparse.transports.framing import HEADER_BYTES

Scenario = Callable[[Transport], None]


def content(src: int, dst: int, count: int) -> torch.Tensor:
    """What `src` sends to `dst`, float64 `(count,)`."""
    return torch.arange(count, dtype=torch.float64) + (1000 * src + dst + 1) * 1e6


def equal_bytes(received: torch.Tensor | None, expected: torch.Tensor) -> bool:
    assert received is not None
    assert received.dtype == torch.uint8
    assert received.data_ptr() % 8 == 0
    return received.numel() == expected.nbytes and torch.equal(
        received.view(expected.dtype), expected
    )


def ring(transport: Transport, step: int) -> tuple[int, int]:
    """The ranks that this one sends to and receives from, `step` places on."""
    P, r = transport.world_size, transport.rank
    return (r + step) % P, (r - step) % P


def exchange_with_every_rank(t: Transport) -> None:
    for step in range(t.world_size):
        dst, src = ring(t, step)
        handle = t.exchange((content(t.rank, dst, 10),), dst, src, channel="ring")
        first = handle.wait()
        assert equal_bytes(first, content(src, t.rank, 10))
        assert handle.wait() is first


def exchange_of_nothing(t: Transport) -> None:
    dst, src = ring(t, 1)
    for payload in ((), (torch.empty(0),), (torch.empty(0), torch.empty(0, 3))):
        received = t.exchange(payload, dst, src, channel="nothing").wait()
        assert received is not None
        assert received.numel() == 0
    assert t.exchange(None, None, None, channel="nothing").wait() is None


def exchange_one_way(t: Transport) -> None:
    P, r = t.world_size, t.rank
    if P == 1:
        return
    for sender in range(P):  # to its right neighbour; the others have no end, or one
        receiver = (sender + 1) % P
        received = t.exchange(
            (content(sender, receiver, 5),) if r == sender else None,
            receiver if r == sender else None,
            sender if r == receiver else None,
            channel="one way",
        ).wait()
        if r == receiver:
            assert equal_bytes(received, content(sender, receiver, 5))
        else:
            assert received is None


def exchange_of_several_tensors(t: Transport) -> None:
    dst, src = ring(t, 1)

    def payload(rank: int) -> list[torch.Tensor]:
        return [
            torch.tensor(rank + 0.5, dtype=torch.float32),
            torch.arange(rank + 3, dtype=torch.int32),
            torch.empty(0, dtype=torch.int64),
            torch.full((2, 3), rank, dtype=torch.uint8),
            torch.arange(5, dtype=torch.float16) + rank,
            torch.arange(5).to(torch.bfloat16) + rank,
            torch.tensor([rank % 2 == 0]),
        ]

    received = t.exchange(payload(t.rank), dst, src, channel="several").wait()
    assert received is not None
    expected = b"".join(
        tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in payload(src)
    )
    assert received.numpy().tobytes() == expected


def exchange_of_growing_and_shrinking(t: Transport) -> None:
    dst, src = ring(t, 1)
    # Around the first capacity (4096 bytes, header included), and far beyond any guess.
    small, large = (8, 4080, 4088, 4096), (40_000, 40_000, 50_000, 60_000, 16, 5_000, 0, 100_000)
    for nbytes in (*small, *large, 4_096):
        count = nbytes // 8
        received = t.exchange((content(t.rank, dst, count),), dst, src, channel="growing").wait()
        assert equal_bytes(received, content(src, t.rank, count))


def exchange_of_sizes_by_rank(t: Transport) -> None:
    for round_number in range(4):
        for step in range(t.world_size):
            dst, src = ring(t, step)
            mine, theirs = (
                ((a * 7 + b * 3 + round_number) % 5) ** 5 for a, b in ((t.rank, dst), (src, t.rank))
            )
            received = t.exchange((content(t.rank, dst, mine),), dst, src, channel="sizes").wait()
            assert equal_bytes(received, content(src, t.rank, theirs))


def exchange_of_large(t: Transport) -> None:
    dst, src = ring(t, 1)
    count = (16 << 20) // 8
    for _ in range(2):  # the second one fits the guess
        received = t.exchange((content(t.rank, dst, count),), dst, src, channel="large").wait()
        assert equal_bytes(received, content(src, t.rank, count))


def many_in_flight(t: Transport) -> None:
    P = t.world_size
    handles = []
    for number in range(40):
        dst, src = ring(t, number % P)
        payload = (content(t.rank, dst, 50 * number),)
        handles.append((number, src, t.exchange(payload, dst, src, channel=f"flight {number % 8}")))
    for number, src, handle in reversed(handles):
        assert equal_bytes(handle.wait(), content(src, t.rank, 50 * number))


def in_flight_on_one_channel(t: Transport) -> None:
    dst, src = ring(t, 1)
    counts = [10, 5_000, 5_000, 1, 0, 9_000]
    handles = [
        t.exchange((content(t.rank, dst, count),), dst, src, channel="one") for count in counts
    ]
    for count, handle in reversed(list(zip(counts, handles, strict=True))):
        assert equal_bytes(handle.wait(), content(src, t.rank, count))


def sender_reuses_its_tensors(t: Transport) -> None:
    dst, src = ring(t, 1)
    tensor = torch.empty(1000, dtype=torch.float64)
    handles = []
    for number in range(4):
        tensor.copy_(content(t.rank + 100 * number, dst, 1000))
        handles.append(t.exchange((tensor,), dst, src, channel=f"reuse {number}"))
        tensor.fill_(math.nan)
    for number, handle in enumerate(handles):
        assert equal_bytes(handle.wait(), content(src + 100 * number, t.rank, 1000))


def receiver_keeps_what_came(t: Transport) -> None:
    dst, src = ring(t, 1)
    kept = []
    for number in range(20):
        payload = (content(t.rank + 100 * number, dst, 200),)
        kept.append(t.exchange(payload, dst, src, channel="kept").wait())
    for number, received in enumerate(kept):
        assert equal_bytes(received, content(src + 100 * number, t.rank, 200))
        assert received is not None
        received.zero_()  # the caller's own


def all_to_all_of_varying_sizes(t: Transport) -> None:
    P, r = t.world_size, t.rank
    for round_number in range(3):

        def count(src: int, dst: int, round_number: int = round_number) -> int:
            return (src * P + dst + round_number) % 4 * 300

        payloads = [(content(r, dst, count(r, dst)),) for dst in range(P)]
        received = t.all_to_all(payloads, channel="all to all")
        assert len(received) == P
        for src in range(P):
            assert equal_bytes(received[src], content(src, r, count(src, r)))


def all_to_all_of_odd_bytes(t: Transport) -> None:
    P, r = t.world_size, t.rank
    payloads = [(torch.full((3 * r + dst,), 16 * r + dst, dtype=torch.uint8),) for dst in range(P)]
    for src, received in enumerate(t.all_to_all(payloads, channel="odd")):
        assert equal_bytes(received, torch.full((3 * src + r,), 16 * src + r, dtype=torch.uint8))


def allgather_of_varying_sizes(t: Transport) -> None:
    for round_number in range(4):

        def block(rank: int, round_number: int = round_number) -> torch.Tensor:
            nbytes = (rank + round_number) % 3 * 5_001
            return (torch.arange(nbytes) * (rank + 1) + round_number).to(torch.uint8)

        received = t.allgather((block(t.rank),), channel="allgather")
        assert len(received) == t.world_size
        for rank, part in enumerate(received):
            assert equal_bytes(part, block(rank))


def allgather_of_large(t: Transport) -> None:
    received = t.allgather((content(t.rank, 0, 1 << 17),), channel="large allgather")
    for rank, part in enumerate(received):
        assert equal_bytes(part, content(rank, 0, 1 << 17))


def allreduce_is_exact(t: Transport) -> None:
    P, r = t.world_size, t.rank
    for dtype in (torch.int64, torch.float32, torch.float64):
        for shape in ((), (0,), (1,), (5,), (3, 7)):
            count = math.prod(shape)
            mine = (torch.arange(count) + 100 * r).to(dtype).view(shape)
            before = mine.clone()
            total = t.allreduce_sum(mine, channel="sum")
            expected = sum((torch.arange(count) + 100 * rank) for rank in range(P))
            assert isinstance(expected, torch.Tensor)
            assert total.shape == mine.shape
            assert total.dtype == dtype
            assert torch.equal(total, expected.to(dtype).view(shape))
            assert torch.equal(mine, before)


def allreduce_is_bit_identical(t: Transport) -> None:
    generator = torch.Generator().manual_seed(t.rank)
    for dtype in (torch.float32, torch.float64):
        mine = torch.randn(257, generator=generator, dtype=dtype)
        mine *= 10.0 ** torch.randint(-8, 8, (257,), generator=generator)
        mine[:4] = torch.tensor([math.nan, math.inf, -math.inf if t.rank else math.inf, -0.0])
        total = t.allreduce_sum(mine, channel="bits")
        everyone = t.allgather((total,), channel="bits gathered")
        assert all(torch.equal(other, everyone[0]) for other in everyone)
        inputs = [x.view(dtype) for x in t.allgather((mine,), channel="bits gathered")]
        exact = torch.stack([x.double() for x in inputs]).sum(0)
        size = torch.stack([x.double().abs() for x in inputs]).sum(0)
        close = (total.double() - exact).abs() <= 1e-6 * size
        assert close[4:].all()


def broadcast_to_every_rank(t: Transport) -> None:
    for count in (0, 3, 2_000):
        payload = (content(0, 0, count), torch.tensor([count]))
        received = t.broadcast(payload if t.rank == 0 else None, channel="broadcast")
        assert equal_bytes(received[: 8 * count], payload[0])
        assert received[8 * count :].view(torch.int64).item() == count


def collectives_in_turn(t: Transport) -> None:
    """A step as a collective would make it, several times, all on one channel."""
    for number in range(5):
        total = t.allreduce_sum(torch.tensor([t.rank + number]), channel="turn")
        expected = t.world_size * (t.world_size - 1) // 2 + t.world_size * number
        assert total.item() == expected
        allgather_of_varying_sizes(t)
        all_to_all_of_varying_sizes(t)
        for rank, part in enumerate(t.allgather((torch.tensor([t.rank]),), channel="turn")):
            assert part.view(torch.int64).item() == rank


def spent(t: Transport, action: Callable[[], object]) -> Traffic:
    before = t.traffic.snapshot()
    action()
    return t.traffic.since(before)


def traffic_is_exact(t: Transport) -> None:
    P = t.world_size
    dst, src = ring(t, 1)
    header = HEADER_BYTES
    alone = P == 1
    # (payload bytes, messages): the second message is for what outgrew the capacity.
    for nbytes, messages in ((10, 1), (10_000, 2), (10_000, 1), (12_000, 1), (16, 1), (5_000, 2)):
        payload = (torch.zeros(nbytes, dtype=torch.uint8),)
        counted = spent(t, lambda p=payload: t.exchange(p, dst, src, channel="counted").wait())
        count = 0 if alone else messages
        total = 0 if alone else nbytes + header
        assert counted == Traffic(count, total, count, total)
    payloads = [(torch.zeros(100, dtype=torch.uint8),)] * P
    counted = spent(t, lambda: t.all_to_all(payloads, channel="counted 2"))
    total = (P - 1) * (100 + header)
    assert counted == Traffic(P - 1, total, P - 1, total)

    counted = spent(t, lambda: t.allgather(payloads[0], channel="counted 3"))
    block = 8 + 104  # its place in the table of sizes, and 100 padded to a multiple of 8
    if P <= 4:
        block = 100  # sent directly
    rounds = math.ceil(math.log2(P)) if P > 4 else P - 1
    total = (P - 1) * block + rounds * header
    assert counted == Traffic(rounds, total, rounds, total)

    if P & (P - 1) == 0:
        counted = spent(t, lambda: t.allreduce_sum(torch.zeros(3), channel="counted 4"))
        rounds = P.bit_length() - 1
        nbytes = (12 + header) * rounds
        assert counted == Traffic(rounds, nbytes, rounds, nbytes)
    counted = spent(t, lambda: t.broadcast((torch.zeros(3),), channel="counted 5"))
    assert counted.messages_received == (0 if t.rank == 0 else 1)
    sent = t.allreduce_sum(torch.tensor([counted.messages_sent]), channel="counted 4")
    assert sent.item() == P - 1


def wrong_arguments_are_refused(t: Transport) -> None:
    P, r = t.world_size, t.rank
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="dst must be in"):
        t.exchange((x,), P, None, channel="wrong")
    with pytest.raises(ValueError, match="src must be in"):
        t.exchange((x,), r, -1, channel="wrong")
    with pytest.raises(ValueError, match="to itself"):
        t.exchange((x,), r, None, channel="wrong")
    with pytest.raises(TypeError, match="one tensor"):
        t.exchange(x, r, r, channel="wrong")
    with pytest.raises(TypeError, match="contiguous"):
        t.exchange((torch.zeros(4, 4).t(),), r, r, channel="wrong")
    with pytest.raises(TypeError, match="needs a payload"):
        t.exchange(None, r, r, channel="wrong")
    with pytest.raises(ValueError, match="a payload per rank"):
        t.all_to_all([(x,)] * (P + 1), channel="wrong")
    with pytest.raises(TypeError, match="allreduce_sum takes"):
        t.allreduce_sum(torch.zeros(1, dtype=torch.bfloat16), channel="wrong")
    assert t.allreduce_sum(torch.ones(1), channel="still fine").item() == P


SCENARIOS: list[Scenario] = [
    exchange_with_every_rank,
    exchange_of_nothing,
    exchange_one_way,
    exchange_of_several_tensors,
    exchange_of_growing_and_shrinking,
    exchange_of_sizes_by_rank,
    exchange_of_large,
    many_in_flight,
    in_flight_on_one_channel,
    sender_reuses_its_tensors,
    receiver_keeps_what_came,
    all_to_all_of_varying_sizes,
    all_to_all_of_odd_bytes,
    allgather_of_varying_sizes,
    allgather_of_large,
    allreduce_is_exact,
    allreduce_is_bit_identical,
    broadcast_to_every_rank,
    collectives_in_turn,
    traffic_is_exact,
    wrong_arguments_are_refused,
]

QUICK_SCENARIOS: list[Scenario] = [
    exchange_with_every_rank,
    exchange_of_growing_and_shrinking,
    all_to_all_of_varying_sizes,
    allgather_of_varying_sizes,
    allreduce_is_bit_identical,
    broadcast_to_every_rank,
]
