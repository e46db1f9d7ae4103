"""How the ranks of a world connect: `create_transport` tells the story, from the top.

What the ranks decide is a pure function of what all of them told, so all choose alike, or all
raise. Where one rank cannot do its part, all are told why (`together`).
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvd_sparse._version import __version__
from hvd_sparse.errors import (
    ConfigError,
    HvdSparseError,
    PlanError,
    TransportError,
    TransportTimeout,
    logger,
)
from hvd_sparse.transports.gloo import CONNECTING_S, GlooTransport
from hvd_sparse.transports.lines import Address, Line, connect_lines
from hvd_sparse.transports.local import LocalWorld
from hvd_sparse.transports.meeting import (
    HostReport,
    MeetingStore,
    choose_addresses,
    describe_host,
    dist,
    join_store,
    listen,
    serve_store,
)
from hvd_sparse.transports.mpi import MpiTransport, problem_with_mpi
from hvd_sparse.transports.nccl import NcclTransport, problem_with_nccl
from hvd_sparse.transports.supervised import SupervisedTransport
from hvd_sparse.transports.transport import Transport
from hvd_sparse.transports.waiting import outcome_of, wait_for
from hvd_sparse.transports.watch import Watch

TRANSPORT_NAMES = ("auto", "gloo", "mpi", "nccl")
VARIABLE = "HVD_SPARSE_TRANSPORT"

PROTOCOL = 2
"""The version of the wire format; raised with each change to it."""

BUSY_TIMEOUTS = 10
"""So many times `timeout_s`, a peer that is alive is waited for by default."""


def create_transport(
    name: str,
    world: Bootstrap,
    timeout_s: float,
    device: torch.device | None = None,
    *,
    busy_timeout_s: float | None = None,
) -> Transport:
    """Makes the transport of this rank; collective over the world.

    Args:
        name: One of `TRANSPORT_NAMES`; HVD_SPARSE_TRANSPORT may override `auto`. `auto` takes MPI
            where MPI started the processes and all of them can import mpi4py, else gloo.
        world: The ranks; one alone needs no medium.
        timeout_s: Seconds of silence after which a peer counts as dead, and for each part of
            connecting.
        device: Where this rank has its tensors; for `nccl`, the current CUDA device otherwise.
        busy_timeout_s: Seconds after which even a peer that is alive is given up; None: ten times
            `timeout_s`.

    Raises:
        ConfigError: The choice is impossible here; the same on all ranks.
        PlanError: Ranks run different releases of this package; on all of them.
        TransportError: The ranks could not be connected, or not all of them came.
    """
    every = together(
        world,
        "hello",
        timeout_s,
        lambda: describe_capability(name, world, device),
        lambda said, _, limit_s: greet(world, said, limit_s),
    )
    chosen = decide(every)
    if chosen == "local":
        return LocalWorld(1, timeout_s).transport(0)
    hosts = _addresses_for(chosen, [capability.host for capability in every])
    busy_s = BUSY_TIMEOUTS * timeout_s if busy_timeout_s is None else busy_timeout_s
    made: list[SupervisedTransport] = []
    with ExitStack() as undo:
        token, lines = _share(world, hosts, timeout_s, undo)

        def connect() -> None:
            made.append(_connect(chosen, world, timeout_s, device, hosts, token))
            undo.callback(made[0].close)
            if lines:
                made[0].watch = Watch(made[0], lines, busy_s)

        together(world, "connection", max(timeout_s, CONNECTING_S) + CONNECTING_S, connect)
        undo.pop_all()
    return made[0]


class Bootstrap(Protocol):
    """The ranks of a world before they have a transport: `size` of them, of which this is `rank`.

    `ranks` has MPI's rank of each. `mpi_enabled`: MPI started the processes.
    """

    rank: int
    size: int
    ranks: list[int]
    mpi_enabled: bool

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        """Every rank's object, by rank; collective.

        Raises:
            TransportTimeout: Not all ranks came in time.
        """
        ...


def not_all_came(
    world: Bootstrap, name: str, timeout_s: float, missing: Sequence[int] = ()
) -> TransportTimeout:
    """The error where ranks did not come to connect: some, or those that are `missing`."""
    told = _some([f"rank {rank}" for rank in missing]) or "at least one of them"
    return TransportTimeout(
        f"rank {world.rank} has waited {timeout_s:g} s for the other {world.size - 1} ranks "
        f"to connect ({name}), and {told} did not come: each rank needs a compression of "
        "hvd_sparse, and must reach its first step within timeout_s of the others"
    )


class HorovodBootstrap:
    """The ranks of one of Horovod's process sets (by default all), before they have a transport.

    `ranks` has Horovod's global rank of each. `mpi_enabled`: MPI started the processes.

    Raises:
        ConfigError: Horovod is not initialised, or this process is not in the process set.
    """

    def __init__(self, process_set: Any = None) -> None:
        import horovod.torch as hvd

        if not hvd.is_initialized():
            raise ConfigError("hvd.init() must come before the first gradient is compressed")
        self.process_set: Any = hvd.global_process_set if process_set is None else process_set
        if self.process_set.process_set_id is None:
            raise ConfigError(f"Horovod does not know the process set {self.process_set}")
        if self.process_set.process_set_id == 0:
            self.ranks = list(range(hvd.size()))
        else:
            self.ranks = list(self.process_set.ranks)
        global_rank: int = hvd.rank()
        if global_rank not in self.ranks:
            raise ConfigError(f"rank {global_rank} is not in the process set {self.ranks}")
        self.rank = self.ranks.index(global_rank)
        self.size = len(self.ranks)
        self.mpi_enabled = bool(hvd.mpi_enabled())

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        """Every rank's object, by rank; collective (Horovod's own function takes no process set).

        Raises:
            TransportTimeout: Not all ranks came in time; Horovod warns of who is missing.
        """
        if self.size == 1:
            return [obj]
        import horovod.torch as hvd

        # Never empty: Horovod treats tensors without elements differently on some backends.
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
        gathering = [
            hvd.allgather_async(part, name=f"{name}.{what}", process_set=self.process_set)
            for what, part in (("size", size), ("data", data))
        ]
        deadline = time.monotonic() + timeout_s
        if not wait_for(gathering, lambda: time.monotonic() >= deadline):
            raise not_all_came(self, name, timeout_s)
        sizes, joined = map(outcome_of, gathering)
        return [pickle.loads(part.numpy().tobytes()) for part in joined.split(sizes.tolist())]


# -- what the ranks agree on -----------------------------------------------------------------------


def greet(world: Bootstrap, obj: Any, timeout_s: float) -> list[Any]:
    """Every rank's object, once all ranks are known to run the same release; collective.

    The greeting is a tuple of plain values, sent before anything else, so that any two releases
    can read each other's. `obj` is unpickled only where the releases are the same.
    """
    hello = (PROTOCOL, __version__, pickle.dumps(obj))
    every = world.allgather_object(hello, "hvd_sparse.hello", timeout_s)
    check_releases([(protocol, version) for protocol, version, *_ in every])
    return [pickle.loads(said) for _, _, said in every]


def check_releases(releases: Sequence[tuple[int, str]]) -> None:
    """Raises `PlanError` where the ranks' releases differ."""
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for rank, release in enumerate(releases):
        ranks_of.setdefault(release, []).append(rank)
    if len(ranks_of) > 1:
        told = "; ".join(
            f"{version} (protocol {protocol}) on ranks {_some(ranks)}"
            for (protocol, version), ranks in ranks_of.items()
        )
        raise PlanError(f"all ranks must run the same release of hvd_sparse, got {told}")


def _some(ranks: Sequence[object]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


@dataclass(frozen=True)
class Capability:
    """What one rank wants and can do.

    `source` says where the name of the requested transport comes from. `device` is the UUID of this
    rank's CUDA device, which is unique among all hosts; None without NCCL.
    """

    requested: str
    source: str
    mpi_problem: str | None
    host: HostReport
    nccl_problem: str | None
    device: str | None


def describe_capability(
    name: str, world: Bootstrap, device: torch.device | None = None
) -> Capability:
    requested, source = name, "transport"
    if name == "auto" and os.environ.get(VARIABLE):
        requested, source = os.environ[VARIABLE], VARIABLE
    # mpi4py is not even imported without mpirun: it would quietly be a world of one.
    mpi_problem: str | None = "the processes were not started by MPI (horovodrun --mpi)"
    if world.mpi_enabled:
        mpi_problem = problem_with_mpi(world.ranks[world.rank])
    nccl_problem: str | None = "it was not asked for"
    if requested == "nccl":
        nccl_problem = problem_with_nccl()
    uuid = None
    if nccl_problem is None:
        uuid = str(torch.cuda.get_device_properties(_cuda_device(device)).uuid)
    return Capability(requested, source, mpi_problem, describe_host(), nccl_problem, uuid)


def _cuda_device(device: torch.device | None) -> torch.device:
    if device is None or device.type != "cuda" or device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def decide(every: Sequence[Capability]) -> str:
    """The transport of a world: one of `TRANSPORT_NAMES`, or `local` for a world of one.

    Raises:
        ConfigError: The ranks want different ones, or the wanted one is unknown or impossible.
    """
    requested, source = every[0].requested, every[0].source
    for rank, capability in enumerate(every):
        if capability.requested != requested:
            raise ConfigError(
                f"{capability.source} is {capability.requested!r} on rank {rank}, but {source} is "
                f"{requested!r} on rank 0: all ranks must use one transport"
            )
    if requested not in TRANSPORT_NAMES:
        raise ConfigError(f"{source} must be one of {', '.join(TRANSPORT_NAMES)}: {requested!r}")
    problems = [(rank, c.mpi_problem) for rank, c in enumerate(every) if c.mpi_problem is not None]
    if requested == "mpi" and problems:
        rank, problem = problems[0]
        raise ConfigError(f"{source} 'mpi' is impossible: on rank {rank}, {problem}")
    nccl_problem = _problem_with_devices(every)
    if requested == "nccl" and nccl_problem is not None:
        raise ConfigError(f"{source} 'nccl' is impossible: {nccl_problem}")
    if requested != "auto":
        return requested
    if len(every) == 1:
        return "local"
    return "gloo" if problems else "mpi"


def _problem_with_devices(every: Sequence[Capability]) -> str | None:
    """Why NCCL cannot connect these ranks, or None."""
    owners: dict[str | None, int] = {}
    for rank, capability in enumerate(every):
        if capability.nccl_problem is not None:
            return f"on rank {rank}, {capability.nccl_problem}"
        owner = owners.setdefault(capability.device, rank)
        if owner != rank:
            return (
                f"ranks {owner} and {rank} share the CUDA device {capability.device}: each needs "
                "its own (torch.cuda.set_device(hvd.local_rank()))"
            )
    return None


# -- addresses, and what the ranks share -----------------------------------------------------------


def _addresses_for(chosen: str, reports: Sequence[HostReport]) -> Sequence[str | None]:
    """The ranks' addresses; None where they share no network, and the transport needs none."""
    try:
        return choose_addresses(reports)
    except TransportError as error:
        if chosen in ("gloo", "nccl"):
            raise
        logger.warning("peers that stop will end waits only by timeout_s: %s", error)
        return [None] * len(reports)


def _share(
    world: Bootstrap, hosts: Sequence[str | None], timeout_s: float, undo: ExitStack
) -> tuple[str, dict[int, Line]]:
    """A common token, and lines to the other ranks; none in a world of one or without addresses.

    The token is 16 random bytes of rank 0's in hexadecimal, new for each transport: in an elastic
    job, a counter would differ between ranks.
    """
    listeners: list[socket.socket] = []

    def introduce() -> tuple[str, int | None]:
        host = hosts[world.rank]
        if host is not None and world.size > 1:
            listeners.append(undo.enter_context(listen(host)))
        return secrets.token_hex(16), listeners[0].getsockname()[1] if listeners else None

    lines: dict[int, Line] = {}

    def call() -> None:
        limit_s = max(timeout_s, CONNECTING_S)
        key = bytes.fromhex(token)
        lines.update(connect_lines(world.rank, listeners[0], addresses, key, limit_s))
        for line in lines.values():
            undo.callback(line.close)

    every = together(world, "introduction", timeout_s, introduce)
    token = every[0][0]
    addresses: dict[int, Address] = {
        rank: (host, port)
        for rank, (host, (_, port)) in enumerate(zip(hosts, every, strict=True))
        if host is not None and port is not None and rank != world.rank
    }
    if listeners:
        together(world, "lines", max(timeout_s, CONNECTING_S) + CONNECTING_S, call)
    return token, lines


def together(
    world: Bootstrap,
    name: str,
    timeout_s: float,
    part: Callable[[], Any],
    gather: Callable[[Any, str, float], list[Any]] | None = None,
) -> list[Any]:
    """Does this rank's part of connecting; returns what came of every rank's part. Collective.

    Raises:
        TransportError: A rank could not do its part; on all of them.
    """
    done, problem, kind = None, "", TransportError
    try:
        done = part()
    except (OSError, RuntimeError, HvdSparseError) as error:  # the peers wait for word of it
        problem = str(error)
        kind = type(error) if isinstance(error, TransportError) else TransportError
    try:
        limit_s = CONNECTING_S if problem else timeout_s
        gather = gather or world.allgather_object
        every = gather((done, problem), f"hvd_sparse.{name}", limit_s)
    except TransportTimeout:
        if not problem:
            raise
        every = [(None, "")] * world.rank + [(None, problem)]  # nobody is there to hear of it
    problems: dict[str, list[str]] = {}
    for rank, (_, problem) in enumerate(every):
        if problem:
            problems.setdefault(problem, []).append(str(rank))
    if problems:
        (what, who), *more = problems.items()
        also = "".join(f"; rank {', '.join(others)}: {why}" for why, others in more)
        raise kind(f"rank {', '.join(who)} could not connect: {what}{also}")
    return [done for done, _ in every]


# -- the connection itself -------------------------------------------------------------------------


def _connect(
    chosen: str,
    world: Bootstrap,
    timeout_s: float,
    device: torch.device | None,
    hosts: Sequence[str | None],
    token: str,
) -> SupervisedTransport:
    if chosen == "mpi":
        return MpiTransport(world.ranks, timeout_s=timeout_s)
    place = world.rank, world.size
    first, host = hosts[0], hosts[world.rank]
    assert first is not None
    assert host is not None
    meeting = MeetingStore(
        lambda entries: world.allgather_object(entries, "hvd_sparse.addresses", timeout_s)
    )
    if chosen == "nccl":
        store, own = _shared_store(world, first, token, timeout_s), _cuda_device(device)
        return NcclTransport(*place, meeting, store, host=host, timeout_s=timeout_s, device=own)
    return GlooTransport(*place, meeting, host=host, timeout_s=timeout_s)


def _shared_store(world: Bootstrap, address: str, token: str, timeout_s: float) -> Any:
    """A store that rank 0 serves at its address; without the token, no key is found in it."""
    stores: list[Any] = []

    def serve() -> int | None:
        if world.rank != 0:
            return None
        store, port = serve_store(address, timeout_s)
        stores.append(store)
        return port

    port = together(world, "store", timeout_s, serve)[0]
    if not stores:
        stores.append(join_store(address, port, timeout_s))
    return dist.PrefixStore(token, stores[0])
