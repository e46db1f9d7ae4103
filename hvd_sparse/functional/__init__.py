"""Sparse collectives among Horovod's ranks, for any sparse vectors, without a compressor.

Each Horovod world has its own connection for these calls, made at the first of them, besides
Horovod's and those of compressors. The second asynchronous call adds another connection, so that
calls overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from hvd_sparse.functional.communicator import Communicator, SparseHandle, SparseVector
from hvd_sparse.leaving import PROCESS_END
from hvd_sparse.streams import Operation
from hvd_sparse.transports import Transport
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport
from hvd_sparse.wire import Wire

Vector = TypeVar("Vector", bound=SparseVector)

TIMEOUT_S = 600.0


def sparse_allreduce(
    x: Vector,
    *,
    algorithm: str = "auto",
    op: str | Operation = "sum",
    wire: str | Wire = "float32",
    process_set: Any = None,
) -> Vector:
    """Combine the ranks' sparse vectors, element by element; all ranks get the same bits.

    Source: Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning"
    (SC '19), section 5.

    All ranks make the same calls in the same order. A small message first checks that they do.

    Args:
        x: A `SparseStream`, or a torch sparse COO tensor (with dense dimensions too, as embedding
            gradients have), of the same shape on all ranks; float32, float64, int32 or int64.
        algorithm: "ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather", or
            "auto", the cheapest one for the size, the density and the world.
        op: "sum", "max", "min", or an `Operation`. Absent entries stand for its neutral element: a
            maximum is one over the ranks that have the entry.
        wire: Form of the messages, see `Compression`; other ones than "float32" carry sums of
            float32 vectors only, and their rounding is what `SparseHandle.lost` returns.
        process_set: One of Horovod's; None for all ranks.

    Returns:
        The result, in the form of `x`; tensors are coalesced. Entries that equal the neutral
        element may be there or not.

    Raises:
        TypeError: `x` is neither.
        ConfigError: An argument is out of its range.
        UnsupportedError: The values' type, or the wire for it, is not supported.
        PlanError: Ranks made different calls.
        TransportError: A peer is gone or did not answer.
    """
    handle = communicator_of(process_set).allreduce_async(
        x, algorithm=algorithm, op=op, wire=wire, overlaps=False
    )
    return handle.wait()


def sparse_allreduce_async(
    x: Vector,
    *,
    algorithm: str = "auto",
    op: str | Operation = "sum",
    wire: str | Wire = "float32",
    process_set: Any = None,
) -> SparseHandle[Vector]:
    """Start `sparse_allreduce`; `x` must not change until the handle is waited for.

    Two such calls may be under way at a time; others wait for them.
    """
    return communicator_of(process_set).allreduce_async(x, algorithm=algorithm, op=op, wire=wire)


def sparse_allgather(x: Vector, *, process_set: Any = None) -> list[Vector]:
    """Give every rank's sparse vector to every rank.

    Args:
        x: As in `sparse_allreduce`.
        process_set: As in `sparse_allreduce`.

    Returns:
        The vectors, in the order of the ranks.

    Raises:
        TypeError: `x` is neither. The other errors are those of `sparse_allreduce`.
    """
    return communicator_of(process_set).allgather_async(x, overlaps=False).wait()


def sparse_allgather_async(x: Vector, *, process_set: Any = None) -> SparseHandle[list[Vector]]:
    """Start `sparse_allgather`; `x` must not change until the handle is waited for."""
    return communicator_of(process_set).allgather_async(x)


@dataclass
class _Life:
    """One life of Horovod: what ends with `hvd.shutdown()`.

    Its communicators, by process set, are not dropped before Horovod's end: a rank that reconnected
    alone would wait for its peers in vain.
    """

    mark: object = None
    communicators: dict[Any, Communicator] = field(default_factory=dict)


_life = _Life()


def communicator_of(process_set: Any = None) -> Communicator:
    """The communicator of a process set, connected at the first call, which is collective."""
    from horovod.torch import global_process_set

    process_set = global_process_set if process_set is None else process_set
    if _life.mark is not PROCESS_END.life:
        _life.mark, _life.communicators = PROCESS_END.life, {}
    if process_set not in _life.communicators:
        _life.communicators[process_set] = _connected(process_set)
    return _life.communicators[process_set]


def _connected(process_set: Any) -> Communicator:
    def connect() -> Transport:
        return create_transport("auto", HorovodBootstrap(process_set), TIMEOUT_S)

    return Communicator(connect(), connect)
