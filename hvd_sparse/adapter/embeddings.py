"""Gradients of embeddings (`sparse=True`) by sparse allreduce, instead of Horovod's allgather."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_sparse.functional.communicator import DTYPES, Communicator, SparseHandle
from hvd_sparse.transports import Traffic, Transport


class EmbeddingExchange:
    """The sparse gradients among some parameters'; when it goes, its transport is closed.

    Args:
        named_parameters: Any of the optimizer's; those whose gradients are not sparse are left
            alone.
        algorithm: See `sparse_allreduce`.

    Attributes:
        traffic: What was sent and received since it connected.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]], algorithm: str) -> None:
        named = sorted(named_parameters, key=lambda pair: pair[0])  # alike on all ranks
        self._parameters = [p for _, p in named if p.requires_grad]
        self._members = set(self._parameters)
        self._algorithm = algorithm
        self._waiting: dict[Parameter, Tensor] = {}
        self._handles: dict[Parameter, SparseHandle[Tensor]] = {}
        self._communicator: Communicator | None = None
        self.traffic = Traffic()
        self._end: Callable[[], object] = lambda: None

    def connect(self, transport: Transport) -> None:
        """Use a transport, which is this object's alone, from the next step on."""
        self.disconnect()
        self._communicator, self.traffic = Communicator(transport), transport.traffic
        self._end = weakref.finalize(self, self._communicator.abandon)

    def disconnect(self) -> None:
        """Close the transport, if there is one, and drop an exchange that is under way."""
        self._handles = {}
        self._end()
        self._communicator = None

    def takes(self, parameter: Parameter) -> bool:
        """Whether a parameter is one of those that were given."""
        return parameter in self._members

    def hand_in(self, parameter: Parameter, gradient: Tensor) -> None:
        """Keep a sparse gradient until `launch`."""
        self._waiting[parameter] = gradient

    def launch(self) -> None:
        """Start to exchange what was handed in, in the order that all ranks share."""
        waiting, self._waiting = self._waiting, {}
        for parameter in self._parameters:
            gradient = waiting.get(parameter)
            if gradient is not None:
                assert self._communicator is not None
                wide = gradient if gradient.dtype in DTYPES else gradient.to(torch.float32)
                self._handles[parameter] = self._communicator.allreduce_async(
                    wide, algorithm=self._algorithm
                )

    def give_up(self) -> None:
        """Let go of gradients that were handed in for a step which failed."""
        self._waiting = {}

    def result(self, parameter: Parameter, scale: float) -> Tensor:
        """The sum of a parameter's gradients times `scale`.

        Raises:
            TransportError: A peer is gone or did not answer.
            PlanError: Ranks have different gradients.
        """
        return (self._handles.pop(parameter).wait() * scale).to(parameter.dtype)
