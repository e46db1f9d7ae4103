"""Horovod's `Compressor` interface in front of an engine."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_sparse.adapter.binding import ParameterLookup, calling_optimizer, calling_parameter
from hvd_sparse.adapter.double_momentum import refuse_double_momentum
from hvd_sparse.adapter.embeddings import EmbeddingExchange
from hvd_sparse.adapter.planning import Planning, refuse_devices
from hvd_sparse.adapter.standin import TOLERANCE, make_standin, scale_of
from hvd_sparse.adapter.waiting import synchronize_asleep
from hvd_sparse.checks import check_choice
from hvd_sparse.engine import Assignment, Engine, Observer, Stats, TensorSpec
from hvd_sparse.errors import ConfigError, HvdSparseError, TransportError, UnsupportedError
from hvd_sparse.functional.communicator import ALGORITHMS
from hvd_sparse.planner import Planner
from hvd_sparse.transports import Transport
from hvd_sparse.transports.choose import create_transport

logger = logging.getLogger("hvd_sparse")

SPARSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types that are exchanged sparsely; the residual is float32, so float64 would lose precision."""
SPARSE_DTYPE_NAMES = tuple(map(str, SPARSE_DTYPES))


@dataclass(frozen=True)
class Dense:
    """Context of a gradient that Horovod reduces itself.

    Attributes:
        dtype: Type in which it is to be given back.
        flushed: The parameter's name, where its residual was added to the gradient.
    """

    dtype: torch.dtype
    flushed: str | None = None


@dataclass(frozen=True)
class Sparse:
    """Context of a gradient that the engine reduces while Horovod reduces its stand-in."""

    name: str
    shape: torch.Size


class SparseCompressor:
    """What `hvd.DistributedOptimizer(compression=…)` is given; made by `hvd_sparse.Compression`.

    It serves one optimizer. The gradients that it hands back are views of buffers that it writes
    again in the next step, once the next gradients have come.

    Args:
        named_parameters: The optimizer's parameters by name, or None to read them from it.
        method: How to compress and exchange: a `Method` for all tensors, or an `Assignment`.
        transport: Name of a transport, or "auto".
        timeout_s: Seconds after which a peer that does not answer is given up.
        dense_below: Tensors of fewer elements go through Horovod's own allreduce.
        observer: Is told of plans and steps, or None.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]] | None,
        method: Assignment,
        *,
        transport: str,
        timeout_s: float,
        dense_below: int,
        observer: Observer | None = None,
    ) -> None:
        self.method = method
        self.observer = observer
        self._transport_name = transport
        self._timeout_s = timeout_s
        self._dense_below = dense_below
        self._lookup = None if named_parameters is None else ParameterLookup(named_parameters)
        self._embeddings: EmbeddingExchange | None = None
        self._start()

    def _start(self) -> None:
        self._engine = Engine(self.method, self.observer)
        self._optimizer: weakref.ref[Any] | None = None
        self._world: object | None = None
        self._transport: Transport
        self._process_set: Any = None
        self._world_size = 1
        self._standin = make_standin(0)
        self._stepping = False
        self._planning: Planning | None = None
        self._warned: set[str] = set()
        try:
            from hvd_sparse.adapter.elastic import register
        except ImportError:
            return  # without Horovod there is no elastic state to serve
        register()

    # -- Horovod's interface -----------------------------------------------------------------------

    def compress(self, tensor: Tensor) -> tuple[Tensor, Dense | Sparse]:
        """Take a gradient over, or leave it to Horovod.

        Args:
            tensor: A gradient of any shape, or any other tensor, which is left to Horovod.

        Returns:
            What Horovod is to reduce, and what `decompress` needs to know.
        """
        if not (self._stepping and self._world_is_current()) and not self._begin_step():
            return tensor, Dense(tensor.dtype)
        assert self._lookup is not None
        name = self._lookup.name_of(tensor)
        if name is None:
            self._warn_once(
                f"a gradient of shape {tuple(tensor.shape)} belongs to none of the "
                f"{len(self._lookup)} named_parameters: it is reduced densely"
            )
            return tensor, Dense(tensor.dtype)
        if self._planning is not None:
            self._planning.arrived(name)
        spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype))
        if not self._is_sparse(spec, tensor):
            return self._hand_to_horovod(name, tensor)
        self._engine.submit(spec, tensor.detach())
        return self._standin.clone(), Sparse(name, tensor.shape)

    def decompress(self, tensor: Tensor, ctx: Dense | Sparse | None) -> Tensor:
        """Give the reduced gradient back.

        Args:
            tensor: What Horovod made of the tensor that `compress` returned.
            ctx: The context that `compress` returned; None for Horovod's own sparse gradients.

        Raises:
            UnsupportedError: The optimizer's reduction is no sum or average over all ranks.
            HorovodInternalError: A peer is gone; `hvd.elastic` recovers from it.
            PlanError: Ranks have different gradients.
        """
        if self._embeddings is not None and (self._world_is_current() or self._begin_step()):
            self._embeddings.launch()  # before this rank waits for anything
        self._stepping = False
        if ctx is None:
            return self._embedding_gradient(tensor)
        result = self._reduced(tensor, ctx)
        if self._planning is not None:
            self._planning.returned()
        return result

    def _reduced(self, tensor: Tensor, ctx: Dense | Sparse) -> Tensor:
        if isinstance(ctx, Dense):
            if ctx.flushed is not None and tensor.isfinite().all():
                self._engine.forget_leftover(ctx.flushed)  # otherwise the step will be skipped
            return tensor.to(ctx.dtype)
        self._learn_scale(tensor)
        with as_horovod_error():
            result = self._engine.result(ctx.name)
        if result.shape != ctx.shape:
            raise RuntimeError(f"{ctx.name}: shape {tuple(result.shape)} is not {tuple(ctx.shape)}")
        return result

    def _embedding_gradient(self, tensor: Tensor) -> Tensor:
        """What becomes of a sparse gradient that Horovod has gathered, or of its stand-in."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        if self._embeddings is None or optimizer is None:
            return tensor
        import horovod.torch as hvd

        scale = 1.0 / self._world_size if optimizer.op == hvd.Average else 1.0
        with as_horovod_error():
            result = self._embeddings.result(calling_parameter(), scale)
        return tensor if result is None else result

    # -- for the user ------------------------------------------------------------------------------

    def exchange_embeddings(
        self, named_parameters: Iterable[tuple[str, Parameter]], *, algorithm: str = "auto"
    ) -> None:
        """Reduce the gradients of embeddings with `sparse=True` too, by `sparse_allreduce`.

        Otherwise Horovod gathers them, which grows with the number of ranks. Nothing is selected
        or rounded. To be called before the first backward pass.

        Args:
            named_parameters: As `model.named_parameters()`, the same on all ranks; those whose
                gradients are not sparse are left alone.
            algorithm: See `hvd_sparse.sparse_allreduce`.

        Raises:
            ConfigError: `algorithm` is unknown, or this was called before.
        """
        check_choice("algorithm", algorithm, ["auto", *ALGORITHMS])
        if self._embeddings is not None:
            raise ConfigError("exchange_embeddings must be called once, got a second call")
        self._embeddings = EmbeddingExchange((p for _, p in named_parameters), algorithm)

    def stats(self) -> Stats:
        """What was selected, sent and waited for, per bucket and step."""
        return self._engine.stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and thresholds; every rank saves its own. Call between steps."""
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict()` of the same rank returned.

        All ranks load between the same two steps. After a change of the world size residuals are
        kept by parameter, and thresholds and regions are drawn anew.

        Raises:
            ConfigError: The state is not one that `state_dict()` makes.
        """
        self._engine.load_state_dict(state)

    def reassign(self, method: Assignment) -> None:
        """Compress otherwise from the next step on, without losing a residual.

        All ranks call this between the same two steps. A tensor that was sparse and now is dense
        has its residual added to its next gradient.

        Args:
            method: A `Method` for all tensors, or an `Assignment`: the `method` of another
                compression, made by any constructor.

        Raises:
            PlanError: On every rank, where they want different ones.
        """
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None:
            self._refuse_double_momentum(optimizer, method)
        self.method = method
        self._engine.reassign(method)
        if self._world is not None:
            self._start_planning()
            self._engine.agree()

    def corrects_momentum(self, parameter: Parameter) -> bool:
        """Whether the last gradient of a parameter came out of momentum correction."""
        name = None if self._lookup is None else self._lookup.name_of_parameter(parameter)
        method = None if name is None else self._engine.method_of(name)
        return method is not None and method.memory.momentum > 0

    def close(self) -> None:
        """Stop the background thread and close the connections; a later step opens them again."""
        self._engine.disconnect()
        if self._embeddings is not None:
            self._embeddings.disconnect()
        self._world = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without its engine: a copy reads its parameters from the optimizer it serves."""
        return {
            "method": self.method,
            "observer": self.observer,
            "_transport_name": self._transport_name,
            "_timeout_s": self._timeout_s,
            "_dense_below": self._dense_below,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lookup = None
        self._embeddings = None
        self._start()

    # -- the start of a step -----------------------------------------------------------------------

    def _begin_step(self) -> bool:
        """See who calls, and connect where Horovod was started anew; false for a stranger."""
        optimizer = calling_optimizer(self)
        if optimizer is None:
            return False
        if self._optimizer is None or self._optimizer() is not optimizer:
            self._bind(optimizer)
        if not self._world_is_current():
            self._connect(optimizer.process_set)
        elif self._planning is not None:
            self._review()
        self._stepping = True
        return True

    def _world_is_current(self) -> bool:
        """Whether Horovod is still the one that the transport was built beside."""
        from horovod.torch import mpi_ops

        return self._world is mpi_ops._handle_map  # a new hvd.init() makes a new map

    def _bind(self, optimizer: Any) -> None:
        bound = self._optimizer() if self._optimizer is not None else None
        if bound is not None and self._engine.planned:
            raise ConfigError(
                "a compression serves one optimizer, but a second hvd.DistributedOptimizer uses "
                "this one: make one compression for each"
            )
        refuse_unsupported(optimizer)
        warn_of_slow_settings()
        if self._lookup is None:
            self._lookup = ParameterLookup((n, p) for p, n in optimizer._parameter_names.items())
        self._refuse_double_momentum(optimizer, self.method)
        self._optimizer = weakref.ref(optimizer)
        synchronize_asleep(optimizer)

    def _refuse_double_momentum(self, optimizer: Any, assignment: Assignment) -> None:
        assert self._lookup is not None
        corrected = {}
        for name, parameter in self._lookup:
            spec = TensorSpec(name, tuple(parameter.shape), str(parameter.dtype))
            method = assignment.choice_of(spec).method
            if method is not None and method.memory.momentum > 0 and self._is_large(parameter):
                corrected[parameter] = method.memory
        refuse_double_momentum(optimizer, corrected)

    def _is_large(self, tensor: Tensor) -> bool:
        """Whether a tensor's type and size allow for a sparse exchange."""
        return tensor.dtype in SPARSE_DTYPES and tensor.numel() >= max(1, self._dense_below)

    def _device(self) -> torch.device | None:
        """Where the gradients are that the engine exchanges; None where there are none."""
        assert self._lookup is not None
        return next((p.device for _, p in self._lookup if self._is_large(p)), None)

    def _connect(self, process_set: Any) -> None:
        from horovod.torch import mpi_ops

        from hvd_sparse.transports.horovod_bootstrap import HorovodBootstrap

        world = HorovodBootstrap(process_set)
        transport = create_transport(self._transport_name, world, self._timeout_s, self._device())
        self._engine.connect(transport)
        if self._embeddings is not None:
            self._embeddings.connect(create_transport(self._transport_name, world, self._timeout_s))
        self._process_set, self._transport = process_set, transport
        self._start_planning()
        self._engine.agree()
        self._world, self._world_size = mpi_ops._handle_map, world.size
        self._standin = make_standin(world.rank)
        logger.info("rank %d of %d uses transport %s", world.rank, world.size, transport.name)

    def _start_planning(self) -> None:
        self._planning = None
        if isinstance(self.method, Planner):
            assert self._lookup is not None
            refuse_devices(self._lookup.named())
            specs = [spec for spec in self._lookup.specs() if spec.dtype in SPARSE_DTYPE_NAMES]
            self._planning = Planning(
                self.method, self._engine, specs, self._transport, self._process_set
            )

    def _review(self) -> None:
        assert self._planning is not None
        try:
            self._planning.begin_step()
        except TransportError as error:
            from horovod.common.exceptions import HorovodInternalError

            raise HorovodInternalError(f"hvd_sparse: {error}") from error

    def _is_sparse(self, spec: TensorSpec, tensor: Tensor) -> bool:
        if not self._is_large(tensor):
            return False
        if not self._engine.takes(spec):
            return False
        if not self._engine.expects(spec.name):
            self._warn_once(
                f"{spec.name!r} had no gradient in the first step: it is reduced densely"
            )
            return False
        return True

    def _hand_to_horovod(self, name: str, tensor: Tensor) -> tuple[Tensor, Dense]:
        """A dense gradient, and with it what was not sent while it was exchanged sparsely."""
        leftover = self._engine.leftover(name)
        if leftover is None:
            return as_horovod_takes_it(tensor), Dense(tensor.dtype)
        if leftover.shape != tensor.shape:
            raise ConfigError(
                f"residual of {name!r}: shape must be {tuple(tensor.shape)}, "
                f"got {tuple(leftover.shape)}"
            )
        return leftover.to(tensor.device) + tensor, Dense(tensor.dtype, name)  # float32, or 64

    def _learn_scale(self, standin: Tensor) -> None:
        """Check what Horovod made of a stand-in; the first one tells the scale."""
        try:
            if self._engine.scale is None:
                self._engine.scale = scale_of(standin, self._world_size)
            elif standin.device.type == "cpu":  # elsewhere, reading it would wait for the device
                scale = scale_of(standin, self._world_size)
                if abs(scale - self._engine.scale) > TOLERANCE * self._engine.scale:
                    raise UnsupportedError(
                        f"the optimizer's scale changed from {self._engine.scale:g} to {scale:g}: "
                        "op and process set must stay as they are, and hvd.join() cannot be used"
                    )
        except HvdSparseError as error:
            self._engine.fail(error)
            raise

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"hvd_sparse: {message}", stacklevel=3)


@contextmanager
def as_horovod_error() -> Iterator[None]:
    """A lost peer is an error that `hvd.elastic` recovers from."""
    try:
        yield
    except TransportError as error:
        from horovod.common.exceptions import HorovodInternalError

        raise HorovodInternalError(f"hvd_sparse: {error}") from error


def as_horovod_takes_it(tensor: Tensor) -> Tensor:
    """A dense gradient in a form that Horovod's allreduce accepts: contiguous, and not bfloat16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.contiguous()


def refuse_unsupported(optimizer: Any) -> None:
    """Name what cannot give right gradients before anything is sent.

    Raises:
        UnsupportedError: The optimizer reduces by Min, Max, Product or Adasum.
    """
    import horovod.torch as hvd

    refused = {getattr(hvd, name): name for name in ("Min", "Max", "Product", "Adasum")}
    # Horovod has another optimizer class for Adasum, without an `op`.
    name = "Adasum" if hasattr(optimizer, "_starting_models") else refused.get(optimizer.op)
    if name is not None:
        raise UnsupportedError(
            f"op=hvd.{name} cannot be applied to sparse gradients: use hvd.Average or hvd.Sum"
        )


def warn_of_slow_settings() -> None:
    """Warn of Horovod settings under which one small tensor per gradient is expensive."""
    for variable in ("HOROVOD_CACHE_CAPACITY", "HOROVOD_FUSION_THRESHOLD"):
        if os.environ.get(variable) == "0":
            warnings.warn(f"hvd_sparse: {variable}=0 makes every step slow: unset it", stacklevel=2)
    if os.environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
        warnings.warn(
            "hvd_sparse: HOROVOD_AUTOTUNE tunes Horovod on tensors of two elements here: unset it",
            stacklevel=2,
        )
