"""Which transport a world uses.

All ranks first gather what each of them wants and can do, and then decide by a pure function of
that: no rank can come to another choice than its peers, or raise where they do not.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from hvd_sparse._version import __version__
from hvd_sparse.errors import (
    ConfigError,
    HvdSparseError,
    PlanError,
    TransportError,
    TransportTimeout,
)
from hvd_sparse.transports.horovod_handles import outcome_of, wait_for
from hvd_sparse.transports.meeting import Endpoint, HostReport, choose_endpoints, describe_host
from hvd_sparse.transports.supervised import SupervisedTransport
from hvd_sparse.transports.transport import Transport

# MERGED transports.horovod_bootstrap
# A world that is known through Horovod.


class HorovodBootstrap:
    """The ranks of one of Horovod's process sets; see `choose.Bootstrap`.

    Args:
        process_set: of Horovod's; all of its processes by default.

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
        self.global_rank: int = hvd.rank()
        if self.global_rank not in self.ranks:
            raise ConfigError(f"rank {self.global_rank} is not in the process set {self.ranks}")
        self.rank = self.ranks.index(self.global_rank)
        self.size = len(self.ranks)
        self.mpi_enabled = bool(hvd.mpi_enabled())

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        """Every rank's object, in the order of the ranks (Horovod's own takes no process set).

        Raises:
            TransportTimeout: Not all ranks took part within `timeout_s`. Horovod knows which, and
                says so in its own warning after HOROVOD_STALL_CHECK_TIME_SECONDS, 60 by default.
        """
        import horovod.torch as hvd

        # Never empty: Horovod treats tensors without elements differently on some backends.
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        size = torch.tensor([data.numel()], dtype=torch.int64)
        gathering = [
            hvd.allgather_async(part, name=f"{name}.{what}", process_set=self.process_set)
            for what, part in (("size", size), ("data", data))
        ]
        deadline = time.monotonic() + timeout_s
        if not wait_for(gathering, deadline):
            raise TransportTimeout(
                f"rank {self.rank} has waited {timeout_s:g} s for the other {self.size - 1} ranks "
                f"to connect ({name}), and not all have come: each rank must give its optimizer a "
                "compression of hvd_sparse, and reach its first step within timeout_s of the others"
            )
        sizes, joined = map(outcome_of, gathering)
        return [pickle.loads(part.numpy().tobytes()) for part in joined.split(sizes.tolist())]


# MERGED transports.handshake
# The first thing that ranks tell each other: which release of this package they run.
#
# It goes over Horovod, as a tuple of plain values in front of everything else, so that any two
# releases from this one on can read each other's. A rank that never sends it, as its optimizer was
# given no compression, ends the wait of the others by their `timeout_s`.

PROTOCOL = 1
"""Goes up with each change of what goes over the wire."""


class Gatherer(Protocol):
    """The part of `choose.Bootstrap` that a handshake needs."""

    rank: int
    size: int

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        """Every rank's object, in order; collective."""


def package_version() -> str:
    """The release of this package that this rank runs."""
    return __version__


def greet(world: Gatherer, obj: Any, timeout_s: float) -> list[Any]:
    """Every rank's object, once all are known to run the same release; collective.

    Args:
        world: The ranks.
        obj: What this rank has to say; unpickled only where the releases are the same.
        timeout_s: Seconds until the ranks that have not come are given up.

    Raises:
        PlanError: Ranks run different releases; on all of them.
        TransportTimeout: Not all ranks came.
    """
    hello = (PROTOCOL, package_version(), pickle.dumps(obj))
    every = (
        [hello] if world.size == 1 else world.allgather_object(hello, "hvd_sparse.hello", timeout_s)
    )
    check_releases([(protocol, version) for protocol, version, *_ in every])
    return [pickle.loads(said) for _, _, said in every]


def check_releases(releases: Sequence[tuple[int, str]]) -> None:
    """Compares what the ranks run, in their order.

    Raises:
        PlanError: They run different releases.
    """
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for rank, release in enumerate(releases):
        ranks_of.setdefault(release, []).append(rank)
    if len(ranks_of) > 1:
        told = "; ".join(
            f"{version} (protocol {protocol}) on ranks {_some(ranks)}"
            for (protocol, version), ranks in ranks_of.items()
        )
        raise PlanError(f"all ranks must run the same release of hvd_sparse, got {told}")


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


# MERGED transports.introduction
# What ranks tell each other before they connect: a token, and where their watches are asked.

logger = logging.getLogger("hvd_sparse")


@dataclass(frozen=True)
class Introduction:
    """What ranks must know of each other before they connect.

    Attributes:
        token: 16 random bytes in hexadecimal, another one for each transport. Not a counter: in an
            elastic job, the ranks have made different numbers of transports.
        listener: Where this rank's watch is asked, or None where there is none.
        addresses: Where the ranks' watches are asked, in order.
    """

    token: str
    listener: socket.socket | None
    addresses: list[tuple[str, int] | None]

    def close(self) -> None:
        """Stops to listen."""
        if self.listener is not None:
            self.listener.close()


def endpoints_of(chosen: str, hosts: Sequence[HostReport]) -> list[Endpoint] | None:
    """The ranks' addresses; None where they share no network, and the transport needs none."""
    try:
        return choose_endpoints(hosts)
    except TransportError as error:
        if chosen in ("gloo", "nccl"):
            raise
        logger.warning("peers that stop will end waits only by timeout_s: %s", error)
        return None


def introduce(world: Gatherer, endpoints: list[Endpoint] | None, timeout_s: float) -> Introduction:
    """Begins to listen, and gathers where the others do; collective.

    Args:
        world: The ranks.
        endpoints: Their addresses, or None where there will be no watch.
        timeout_s: Seconds until the ranks that have not come are given up.

    Raises:
        TransportError: A rank cannot listen; on all of them.
    """
    listener, port = None, None
    if endpoints is not None and world.size > 1:
        from hvd_sparse.transports.meeting import listen

        try:
            listener = listen(endpoints[world.rank].address)
            port = listener.getsockname()[1]
        except TransportError as error:  # the peers wait for word of it
            port = str(error)
    mine = (secrets.token_hex(16), port)
    try:
        every = gather(world, "hvd_sparse.introduction", timeout_s, mine)
        for rank, (_, theirs) in enumerate(every):
            if isinstance(theirs, str):
                raise TransportError(f"rank {rank} cannot show signs of life: {theirs}")
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    addresses = [
        None if endpoints is None or theirs is None else (endpoints[rank].address, theirs)
        for rank, (_, theirs) in enumerate(every)
    ]
    return Introduction(every[0][0], listener, addresses)


def gather(world: Gatherer, name: str, timeout_s: float, obj: Any) -> list[Any]:
    """Every rank's object; a world of one needs no word."""
    return [obj] if world.size == 1 else world.allgather_object(obj, name, timeout_s)


TRANSPORT_NAMES = ("auto", "gloo", "mpi", "nccl", "horovod")
VARIABLE = "HVD_SPARSE_TRANSPORT"


class Bootstrap(Protocol):
    """What is known of a world before it has a transport.

    Attributes:
        rank: this rank in the world.
        size: P.
        ranks: the launcher's global rank of each of the world's ranks.
        mpi_enabled: whether MPI started the processes.
        process_set: Horovod's name for the world, or None.
    """

    rank: int
    size: int
    ranks: list[int]
    mpi_enabled: bool
    process_set: Any

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        """Every rank's object, in order; collective.

        Raises:
            TransportTimeout: Not all ranks came within `timeout_s`.
        """


@dataclass(frozen=True)
class Capability:
    """What one rank wants and can do.

    Attributes:
        requested: name of a transport, as the argument or the variable says.
        source: where that name comes from.
        mpi_problem: why MPI cannot be used here, or None.
        host: its network.
        nccl_problem: why NCCL cannot be used here, or None.
        device: identity of the CUDA device that NCCL's messages would go through, unlike that of
            any other device on any host; None where NCCL cannot be used.
    """

    requested: str
    source: str
    mpi_problem: str | None
    host: HostReport
    nccl_problem: str | None
    device: str | None


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
        name: one of `TRANSPORT_NAMES`; `auto` may be overridden by HVD_SPARSE_TRANSPORT. `auto`
            takes MPI where it started the processes and mpi4py can be imported on all of them, else
            gloo; a world of one needs none. NCCL has to be asked for.
        world: the ranks.
        timeout_s: seconds after which connecting gives up, and after which a peer that shows no
            sign of life is given up. A peer that is alive is waited for, with a warning every
            `timeout_s`.
        device: where this rank has the tensors that it will exchange; for `nccl`, the current CUDA
            device otherwise.
        busy_timeout_s: seconds after which a wait for a peer that is alive gives up, too; None for
            as long as it takes.

    Raises:
        ConfigError: The choice is impossible here; the same on all ranks.
        PlanError: Ranks run different releases of this package; on all of them.
        TransportError: The ranks could not be connected, or not all of them came.
    """
    every = greet(world, describe_capability(name, world, device), timeout_s)
    chosen = decide(every)
    if chosen == "local":
        from hvd_sparse.transports.local import LocalWorld

        return LocalWorld(1, timeout_s).transport(0)
    endpoints = endpoints_of(chosen, [capability.host for capability in every])
    introduction = introduce(world, endpoints, timeout_s)
    try:
        transport = _connect(chosen, world, timeout_s, device, endpoints, introduction)
    except BaseException:
        introduction.close()
        raise
    if introduction.listener is None:
        return transport
    from hvd_sparse.transports.watch import Watch

    transport.supervise(
        Watch(
            transport,
            introduction.listener,
            introduction.addresses,
            bytes.fromhex(introduction.token),
            busy_timeout_s,
        )
    )
    return transport


def _connect(
    chosen: str,
    world: Bootstrap,
    timeout_s: float,
    device: torch.device | None,
    endpoints: list[Endpoint] | None,
    introduction: Introduction,
) -> SupervisedTransport:
    if chosen == "mpi":
        from hvd_sparse.transports.mpi import MpiTransport

        return MpiTransport(world.ranks, timeout_s=timeout_s)
    if chosen == "horovod":
        from hvd_sparse.transports.horovod import HorovodTransport

        return HorovodTransport(
            world.rank,
            world.size,
            process_set=world.process_set,
            timeout_s=timeout_s,
            label=introduction.token[:8],
        )
    assert endpoints is not None
    host = endpoints[world.rank].address
    if chosen == "nccl":
        from hvd_sparse.transports.nccl import NcclTransport

        store = _shared_store(world, endpoints[0].address, introduction.token, timeout_s)
        return NcclTransport(
            world.rank,
            world.size,
            store,
            host=host,
            timeout_s=timeout_s,
            device=_cuda_device(device),
        )
    from hvd_sparse.transports.gloo import GlooTransport
    from hvd_sparse.transports.meeting import MeetingStore

    meeting = MeetingStore(partial(gather, world, "hvd_sparse.addresses", timeout_s))
    return GlooTransport(world.rank, world.size, meeting, host=host, timeout_s=timeout_s)


def describe_capability(
    name: str, world: Bootstrap, device: torch.device | None = None
) -> Capability:
    """This rank's part in the decision."""
    requested, source = name, "transport"
    if name == "auto" and os.environ.get(VARIABLE):
        requested, source = os.environ[VARIABLE], VARIABLE
    if world.mpi_enabled:
        from hvd_sparse.transports.mpi import problem_with_mpi

        mpi_problem = problem_with_mpi(world.ranks[world.rank])
    else:
        # Not imported at all: without mpirun, mpi4py would quietly be a world of one.
        mpi_problem = "the processes were not started by MPI (horovodrun --mpi)"
    nccl_problem = _problem_with_nccl(requested)
    identity = None
    if nccl_problem is None:
        identity = str(torch.cuda.get_device_properties(_cuda_device(device)).uuid)
    return Capability(requested, source, mpi_problem, describe_host(), nccl_problem, identity)


def _problem_with_nccl(requested: str) -> str | None:
    if requested != "nccl":
        return "it was not asked for"
    from hvd_sparse.transports.nccl import problem_with_nccl

    return problem_with_nccl()


def _cuda_device(device: torch.device | None) -> torch.device:
    if device is None or device.type != "cuda" or device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


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
    if requested == "local":
        raise ConfigError(
            f"{source} 'local' connects threads of one process (hvd_sparse.transports.run_ranks), "
            f"not processes; valid are {', '.join(TRANSPORT_NAMES)}"
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


def _shared_store(world: Bootstrap, address: str, token: str, timeout_s: float) -> Any:
    """A store that rank 0 serves at its address; who does not know the token finds no key."""
    from hvd_sparse.transports.meeting import dist, join_store, serve_store

    store: Any = None
    meeting: int | str | None = None
    if world.rank == 0:
        try:
            store, meeting = serve_store(address, timeout_s)
        except (RuntimeError, HvdSparseError) as error:  # the peers wait for word of it
            meeting = str(error)
    meeting = gather(world, "hvd_sparse.store", timeout_s, meeting)[0]
    if not isinstance(meeting, int):
        raise TransportError(f"rank 0 cannot serve the store where the ranks meet: {meeting}")
    if store is None:
        store = join_store(address, meeting, timeout_s)
    return dist.PrefixStore(token, store)
