"""The NCCL transport: with a stand-in for NCCL everywhere, with NCCL where there are devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hvd_sparse.errors import ConfigError, PeerLostError, TransportError, TransportTimeout
from hvd_sparse.transports import LocalTransport, Transport, nccl, run_ranks
from hvd_sparse.transports.connect import create_transport
from hvd_sparse.transports.framing import next_capacity
from hvd_sparse.transports.meeting import MeetingStore, dist, join_store, serve_store
from hvd_sparse.transports.nccl import (
    DIRECT_BYTES,
    DeviceGroup,
    NcclTransport,
    Transfer,
    connect_nccl,
)
from tests.transports.failures import (
    aborts_from_another_thread,
    times_out_and_tells_the_others,
)
from tests.transports.rendezvous import RendezvousGroup, RendezvousWorld
from tests.transports.scenarios import SCENARIOS, ring
from tests.transports.test_connect import ThreadBootstrap

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


def store_of(local: LocalTransport) -> Any:
    """The store at which the threads of a run meet."""
    store, port = serve_store("127.0.0.1", 20.0) if local.rank == 0 else (None, 0)
    port = int(local.broadcast((torch.tensor([port]),), channel="port").view(torch.int64))
    return store if store is not None else join_store("127.0.0.1", port, 20.0)


def meeting_of(local: LocalTransport) -> MeetingStore:
    """Where they meet for gloo."""
    world = ThreadBootstrap(local)
    return MeetingStore(lambda entries: world.allgather_object(entries, "addresses", 20.0))


def over_nccl(
    world_size: int,
    fn: Callable[[NcclTransport], Any],
    *,
    timeout_s: float | list[float] = 20.0,
    connect: Callable[..., Any] | None = None,
    direct_bytes: int = 0,
) -> list[Any]:
    """Runs `fn` on ranks that are threads; by default, nothing but second messages is direct."""
    timeouts = [timeout_s] * world_size if isinstance(timeout_s, float) else timeout_s
    connect = connect or RendezvousWorld(world_size).connect

    def rank(local: LocalTransport) -> Any:
        transport = NcclTransport(
            local.rank,
            world_size,
            meeting_of(local),
            store_of(local),
            host="127.0.0.1",
            timeout_s=timeouts[local.rank],
            device=CPU,
            connect=connect,
            direct_bytes=direct_bytes,
        )
        try:
            result = fn(transport)
            local.allreduce_sum(torch.zeros(1), channel="end")  # rank 0's store goes last
            return result
        finally:
            transport.close()

    return run_ranks(world_size, rank, timeout_s=30.0, limit_s=50.0)


@pytest.mark.parametrize("direct_bytes", [0, DIRECT_BYTES])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_conformance(world_size: int, direct_bytes: int) -> None:
    def rank(t: NcclTransport) -> None:
        for scenario in SCENARIOS:
            try:
                scenario(t)
            except Exception as error:
                raise AssertionError(f"{scenario.__name__} on rank {t.rank}") from error

    over_nccl(world_size, rank, direct_bytes=direct_bytes)


def test_what_goes_over_nccl() -> None:
    def rank(t: NcclTransport) -> list[int]:
        group: RendezvousGroup = t._devices.group
        dst, src = ring(t, 1)
        sent = []
        for nbytes in (DIRECT_BYTES, DIRECT_BYTES, 10, 10, 10 * DIRECT_BYTES, 10 * DIRECT_BYTES):
            before = group.bytes_sent
            payload = (torch.zeros(nbytes, dtype=torch.uint8),)
            t.exchange(payload, dst, src, channel="c").wait()
            sent.append(group.bytes_sent - before)
        t.exchange(payload, t.rank, t.rank, channel="own").wait()
        assert group.bytes_sent == sum(sent)
        return sent

    first, padded = 0, 80896  # 16 + 65536 and 22 % more, in units of 1024
    assert padded == next_capacity(DIRECT_BYTES)
    assert padded - DIRECT_BYTES <= DIRECT_BYTES // 4
    expected = [first, padded, padded, 0, 0, next_capacity(10 * DIRECT_BYTES)]
    assert over_nccl(2, rank, direct_bytes=DIRECT_BYTES) == [expected] * 2


def test_a_silent_rank_times_out_and_tells_the_others() -> None:
    world = RendezvousWorld(3)
    groups: list[RendezvousGroup] = []

    def connect(*arguments: Any) -> RendezvousGroup:
        groups.append(world.connect(*arguments))
        return groups[-1]

    says = times_out_and_tells_the_others(partial(over_nccl, connect=connect))
    assert "rank 0 gave the transport up" in says
    assert all(group.aborted.is_set() for group in groups if group.rank < 2)


def test_a_send_that_nobody_takes_times_out() -> None:
    def rank(t: NcclTransport) -> None:
        if t.rank == 0:
            handle = t.exchange((torch.zeros(8),), 1, None, channel="c")
            with pytest.raises(TransportTimeout, match="rank 1 did not answer"):
                handle.wait()

    over_nccl(2, rank, timeout_s=0.4)


def test_an_abort_from_another_thread_ends_all_waits() -> None:
    assert all("rank 0 aborted" in says for says in aborts_from_another_thread(over_nccl))


def test_a_store_that_is_gone_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "GRACE_S", 0.3)  # rank 0 is not told

    def rank(t: NcclTransport) -> None:
        if t.rank == 1:
            t._notes = dist.PrefixStore("x", GoneStore())
            with pytest.raises(PeerLostError, match="lost rank 0's store"):
                t.exchange(None, None, 0, channel="c").wait()

    over_nccl(2, rank, timeout_s=30.0)


class GoneStore(dist.Store):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


def test_a_failure_of_the_group_is_told() -> None:
    """Sizes that differ, as where ranks make different calls."""

    def rank(t: NcclTransport) -> None:
        capacity = t._receive_capacity
        if t.rank == 1:
            capacity["c", "", 0] = 8192
            with pytest.raises(PeerLostError, match="4096 bytes came for 8192"):
                t.exchange(None, None, 0, channel="c").wait()
        else:
            with pytest.raises(PeerLostError):
                t.exchange((torch.zeros(1),), 1, None, channel="c").wait()

    over_nccl(2, rank, timeout_s=30.0)


@pytest.mark.parametrize("fault", ["raises", "blocks"])
def test_a_rank_that_cannot_connect_fails_all(fault: str) -> None:
    release = threading.Event()

    def connect(store: Any, rank: int, *arguments: Any) -> Any:
        if fault == "raises" and rank == 1:
            raise RuntimeError("no such device")
        release.wait(20.0)

    def rank(local: LocalTransport) -> str:
        start = time.monotonic()
        with pytest.raises(TransportError, match="HVD_SPARSE_TRANSPORT=gloo") as caught:
            NcclTransport(
                local.rank,
                2,
                meeting_of(local),
                store_of(local),
                host="127.0.0.1",
                timeout_s=20.0 if fault == "raises" else 0.5,
                device=CPU,
                connect=connect,
            )
        assert time.monotonic() - start < 8.0
        local.allreduce_sum(torch.zeros(1), channel="end")
        return str(caught.value)

    messages = run_ranks(2, rank, timeout_s=30.0, limit_s=50.0)
    release.set()
    if fault == "raises":
        assert "no such device" in messages[1]
        assert "rank 1 gave the transport up" in messages[0]
    else:
        assert all("within 0.5 s" in message or "gave" in message for message in messages)


def test_the_end_waits_for_the_peers_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "GRACE_S", 0.3)
    world = RendezvousWorld(2)
    groups: dict[int, RendezvousGroup] = {}

    def orderly(t: NcclTransport) -> None:
        groups[t.rank] = t._devices.group

    over_nccl(2, orderly, connect=world.connect)
    assert all(group.shut_down and not group.aborted.is_set() for group in groups.values())

    def alone(t: NcclTransport) -> None:
        groups[t.rank] = t._devices.group
        if t.rank == 0:
            t.close()
            assert groups[0].aborted.is_set()
            groups[0].world.end.reset()

    over_nccl(2, alone)


def test_pending_exchanges_are_aborted_by_the_end() -> None:
    def rank(t: NcclTransport) -> None:
        t.exchange(None, None, 1 - t.rank, channel="c")
        group = t._devices.group
        t.close()
        t.close()
        assert group.aborted.is_set()
        assert not group.shut_down

    over_nccl(2, rank)


def let_through(transfer: Transfer) -> None:
    deadline = time.monotonic() + 20.0
    while not transfer.is_through():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_device_group_over_a_backend_of_torch() -> None:
    def rank(local: LocalTransport) -> None:
        backend = dist.ProcessGroupGloo(store_of(local), local.rank, 3)
        group = DeviceGroup(backend, 3, CPU)
        for step in (1, 2, 1):
            dst, src = ring(local, step)
            message = torch.full((100,), local.rank, dtype=torch.uint8)
            buffer = group.host_buffer(150)
            let_through(group.start((dst, message, 150), (src, buffer)))
            assert torch.equal(buffer[:100], torch.full((100,), src, dtype=torch.uint8))
        for header_bytes in (0, 8, 100):
            (arrived, headers), transfer = group.allgather(message, header_bytes)
            let_through(transfer)
            assert arrived.tolist() == [[rank] * 100 for rank in range(3)]
            assert headers.tolist() == [[rank] * header_bytes for rank in range(3)]
        local.allreduce_sum(torch.zeros(1), channel="end")

    run_ranks(3, rank, timeout_s=20.0)


def test_on_a_stream_headers_follow_the_message_and_the_end_follows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in for a stream: what is queued is done at once."""
    backend, stream = Mock(), Mock()

    def allgather(output: torch.Tensor, sent: torch.Tensor) -> Mock:
        output.fill_(99)  # what stands there before the message has come
        return Mock(wait=lambda: output.copy_(sent.repeat(2)))

    def record_event() -> Mock:
        at_the_end.append(buffers[0].tolist())
        return Mock(query=lambda: True)

    at_the_end: list[list[int]] = []
    buffers: list[torch.Tensor] = []
    backend._allgather_base, stream.record_event = allgather, record_event
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    group = DeviceGroup(backend, 2, CPU)
    monkeypatch.setattr(group, "_up", stream)

    def host_buffer(nbytes: int) -> torch.Tensor:
        buffers.append(torch.zeros(nbytes, dtype=torch.uint8))
        return buffers[-1]

    monkeypatch.setattr(group, "host_buffer", host_buffer)
    sent = torch.arange(10, dtype=torch.uint8)
    (arrived, headers), transfer = group.allgather(sent, 3)
    assert transfer.is_through()
    assert arrived.tolist() == [list(range(10))] * 2
    assert headers.tolist() == [[0, 1, 2]] * 2
    assert at_the_end == [[0, 1, 2] * 2]


def test_without_a_device_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def rank(local: LocalTransport) -> None:
        with pytest.raises(ConfigError, match=r"'nccl' is impossible: on rank 0, torch sees no"):
            create_transport("nccl", ThreadBootstrap(local), 5.0)

    run_ranks(2, rank)


@pytest.mark.gpu
def test_conformance_of_one_device() -> None:
    def rank(local: LocalTransport) -> None:
        t: Transport = create_transport("nccl", ThreadBootstrap(local), 50.0)
        assert t.name == "nccl"
        for scenario in SCENARIOS:
            scenario(t)
        t.close()

    run_ranks(1, rank, limit_s=55.0)


@pytest.mark.gpu
def test_messages_through_one_device() -> None:
    """To oneself over NCCL itself, which a transport never does, with many on their way."""
    store, _ = serve_store("127.0.0.1", 20.0)
    device = torch.device("cuda", torch.cuda.current_device())
    backend = connect_nccl(store, 0, 1, device)
    group = DeviceGroup(backend, 1, device)
    transfers = []
    for number in range(8):
        message = torch.arange(1 << 20).add(number).to(torch.uint8).pin_memory()
        buffer = group.host_buffer((1 << 20) + 512)
        assert buffer.is_pinned()
        transfer = group.start((0, message, buffer.numel()), (0, buffer))
        transfers.append((message.clone(), buffer, transfer))
    for message, buffer, transfer in reversed(transfers):
        let_through(transfer)
        assert torch.equal(buffer[: message.numel()], message)
    backend.shutdown()


@pytest.mark.gpu
def test_headers_of_what_stays_on_one_device_are_on_the_host() -> None:
    """They follow the message on its stream: one wait is for both."""
    store, _ = serve_store("127.0.0.1", 20.0)
    device = torch.device("cuda", torch.cuda.current_device())
    backend = connect_nccl(store, 0, 1, device)
    group = DeviceGroup(backend, 1, device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        message = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        for number in range(8):
            message.fill_(number)
            (arrived, headers), transfer = group.allgather(message, 8)
            let_through(transfer)
            assert headers.is_pinned()
            assert headers.tolist() == [[number] * 8]
            assert torch.equal(arrived[0], message)
    backend.shutdown()
