"""Gradients of embeddings (`sparse=True`) by sparse allreduce, instead of Horovod's allgather.

Horovod never calls `compress` for a sparse gradient. A hook that runs before Horovod's therefore
takes the gradient over, and leaves a stand-in of one row of zeros, which costs next to nothing to
gather; where Horovod hands that back, the sum takes its place. A gradient that Horovod is not to
reduce, as in a process of its own, is put back before it is applied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_sparse.errors import ConfigError
from hvd_sparse.functional.communicator import DTYPES, Communicator, SparseHandle
from hvd_sparse.transports import Transport

EXCHANGES: weakref.WeakSet[EmbeddingExchange] = weakref.WeakSet()
"""All that there are: each is asked before any optimizer steps."""


class EmbeddingExchange:
    """The sparse gradients among some parameters'.

    The parameters do not keep it alive; when it goes, its transport is closed.

    Args:
        parameters: Any of the optimizer's, in the same order on all ranks; those whose gradients
            are not sparse are left alone.
        algorithm: See `sparse_allreduce`.
    """

    def __init__(self, parameters: Iterable[Parameter], algorithm: str) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._algorithm = algorithm
        self._taken: dict[Parameter, Tensor] = {}
        self._standins: dict[Parameter, Tensor] = {}
        self._handles: dict[Parameter, SparseHandle[Tensor]] = {}
        self._communicator: Communicator | None = None
        self._end: Callable[[], object] = lambda: None
        take = _weakly(weakref.WeakMethod(self._take))
        for p in self._parameters:
            hook = p.register_post_accumulate_grad_hook(take)
            weakref.finalize(self, hook.remove).atexit = False
        listen_to_steps()
        EXCHANGES.add(self)

    def connect(self, transport: Transport) -> None:
        """Use a transport, which is this object's alone, from the next step on."""
        self.disconnect()
        self._communicator = Communicator(transport)
        self._end = weakref.finalize(self, self._communicator.abandon)

    def disconnect(self) -> None:
        """Close the transport, if there is one, and drop an exchange that is under way."""
        self._handles = {}
        self._end()
        self._communicator = None

    def give_up(self) -> None:
        """Let go of gradients that were taken for a step which failed."""
        self._taken = {}

    def _take(self, parameter: Tensor) -> None:
        """Take a sparse gradient over, as soon as a backward pass has made or added to it."""
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            return
        assert isinstance(parameter, Parameter)
        taken = self._taken.get(parameter)
        if taken is not None and gradient is self._standins[parameter]:
            gradient = taken + gradient  # another pass before the same step has added to it
        self._taken[parameter] = gradient
        parameter.grad = self._standins[parameter] = _standin(gradient)

    def _put_back(self, optimizer: Any) -> None:
        """Any optimizer is about to step: give it what nobody has begun to reduce.

        Raises:
            ConfigError: It is another one of Horovod's, which has reduced the stand-in.
        """
        if not self._taken or getattr(optimizer, "_handles", None):
            return  # Horovod's own step, which synchronizes first
        reduced = getattr(optimizer, "_requires_update", ())
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            gradient = self._taken.get(parameter)
            if gradient is None:
                continue
            if parameter in reduced:
                refuse_another_optimizers(parameter)
            del self._taken[parameter]
            parameter.grad = gradient

    def launch(self, reduced: Container[Parameter]) -> None:
        """Start to exchange what was taken, in the order that all ranks share.

        Args:
            reduced: The parameters whose gradients the compression's optimizer reduces.

        Raises:
            ConfigError: What was taken is another optimizer's.
        """
        if not self._taken:
            return
        assert self._communicator is not None
        for parameter in self._taken:
            if parameter not in reduced:
                refuse_another_optimizers(parameter)
        for parameter in self._parameters:
            gradient = self._taken.pop(parameter, None)
            if gradient is not None:
                wide = gradient if gradient.dtype in DTYPES else gradient.float()
                self._handles[parameter] = self._communicator.allreduce_async(
                    wide, algorithm=self._algorithm
                )

    def result(self, parameter: Parameter | None, scale: float) -> Tensor | None:
        """The sum of a parameter's gradients times `scale`; None if none was taken.

        Raises:
            TransportError: A peer is gone or did not answer.
            PlanError: Ranks have different gradients.
        """
        handle = None if parameter is None else self._handles.pop(parameter, None)
        if handle is None:
            return None
        assert parameter is not None
        return (handle.wait() * scale).to(parameter.dtype)


@cache
def listen_to_steps() -> None:
    """Put back what any exchange has taken, before any optimizer steps.

    The hook stays: if one were removed as an exchange is collected, in the middle of a step, torch
    would find its hooks changed while it calls them.
    """

    def before_step(optimizer: Any, arguments: Any, keywords: Any) -> None:
        for exchange in EXCHANGES:
            exchange._put_back(optimizer)

    register_optimizer_step_pre_hook(before_step)


def refuse_another_optimizers(parameter: Parameter) -> NoReturn:
    """Say that an embedding is not the compression's.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"exchange_embeddings must be given parameters of the compression's optimizer, got one of "
        f"shape {tuple(parameter.shape)} of another optimizer"
    )


def _weakly(method: weakref.WeakMethod[Callable[[Tensor], None]]) -> Callable[[Tensor], None]:
    """A hook that does not keep the method's object alive."""

    def hook(parameter: Tensor) -> None:
        alive = method()
        if alive is not None:
            alive(parameter)

    return hook


def _standin(gradient: Tensor) -> Tensor:
    """A sparse tensor of the same shape that stands for nothing: zeros, in one row."""
    sparse_dim = gradient.sparse_dim()
    places = torch.zeros((sparse_dim, 1), dtype=torch.int64, device=gradient.device)
    values = gradient.new_zeros((1, *gradient.shape[sparse_dim:]), layout=torch.strided)
    return torch.sparse_coo_tensor(places, values, gradient.shape, check_invariants=False)
