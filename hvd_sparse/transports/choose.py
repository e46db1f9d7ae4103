"""Which transport a world uses.

All ranks first gather what each of them wants and can do, and then decide by a pure function of
that: no rank can come to another choice than its peers, or raise where they do not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from hvd_sparse.errors import ConfigError, HvdSparseError, TransportError
from hvd_sparse.transports.base import Transport
from hvd_sparse.transports.handshake import greet
from hvd_sparse.transports.introduction import Introduction, endpoints_of, gather, introduce
from hvd_sparse.transports.network import Endpoint, HostReport, describe_host
from hvd_sparse.transports.supervised import SupervisedTransport

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
