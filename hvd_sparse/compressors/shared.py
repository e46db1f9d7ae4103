"""What all constructors have in common: their shared arguments, and how a compression is built."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypedDict, TypeVar, get_type_hints

from torch.nn import Parameter

from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.checks import (
    check_above,
    check_at_least,
    check_choice,
    check_count,
    check_density,
    check_flag,
    check_share,
)
from hvd_sparse.collectives import (
    Collective,
    DsarSplitAllgather,
    GTopk,
    IndexUnion,
    OkTopk,
    SsarRecursiveDouble,
    SsarSplitAllgather,
    TopkAllgather,
    TopkDsa,
    automatic_collective,
)
from hvd_sparse.engine import Method
from hvd_sparse.engine.warmup import WARMUP_KINDS, Warmup
from hvd_sparse.errors import ConfigError
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.recording import Recorder
from hvd_sparse.selectors import Selector
from hvd_sparse.transports.choose import TRANSPORT_NAMES
from hvd_sparse.wire import WIRES

COLLECTIVES: dict[str, Callable[..., Collective]] = {
    "auto": automatic_collective,
    "oktopk": OkTopk,
    "topk_allgather": TopkAllgather,
    "topk_dsa": TopkDsa,
    "gtopk": GTopk,
    "ssar_recursive_double": SsarRecursiveDouble,
    "ssar_split_allgather": SsarSplitAllgather,
    "dsar_split_allgather": DsarSplitAllgather,
    "index_union": IndexUnion,
}
"""Collectives by the names under which a user asks for them."""

NamedParameters = Iterable[tuple[str, Parameter]] | None
Record = str | os.PathLike[str] | Recorder | None
SelectorFactory = Callable[[], Selector]
CollectiveFactory = Callable[..., Collective]
Function = TypeVar("Function", bound=Callable[..., SparseCompressor])

SHARED_LINE = "    **shared: See the class `Compression`."
BUCKET_NUMEL = 1 << 23
DENSE_BELOW = 1024
TIMEOUT_S = 600.0


class Shared(TypedDict, total=False):
    """Arguments of every constructor; `Compression` says what they mean."""

    transport: str
    bucket_numel: int
    dense_below: int
    timeout_s: float
    wire: str
    record: Record
    clip_norm: float | None
    warmup: str
    warmup_density: float
    warmup_steps: int
    warmup_epochs: float
    dense_steps: int
    dense_epochs: float
    steps_per_epoch: int | None


class SharedWithMomentum(Shared, total=False):
    """Arguments of every constructor but DGC's, which has its own default of the momentum."""

    momentum: float
    nesterov: bool


@dataclass(frozen=True)
class Options:
    """The shared arguments with their defaults, checked.

    Args:
        momentum: m of DGC's momentum correction, in [0, 1); 0, the default of all but `dgc`, is
            plain error feedback. The optimizer must have none then: see `MomentumCorrectedSGD`.
        nesterov: Whether that momentum is Nesterov's.
        clip_norm: Limit on the L2 norm of a bucket's summed gradient, above 0: each of P ranks
            clips its own to P^(-1/2) times it before it is accumulated. None: no limit.
        warmup: "exponential" (four densities from `warmup_density` down, each the same share of the
            one before, as in DGC), "linear" or "constant".
        warmup_density: Where the warm-up begins, in (0, 1].
        warmup_steps: Steps that it takes, at least 0.
        warmup_epochs: The same in epochs; they add up.
        dense_steps: Steps before it in which everything is exchanged, at least 0.
        dense_epochs: The same in epochs.
        steps_per_epoch: What an epoch is, where one of the two is given.
        transport: "auto", "gloo", "mpi", "nccl" or "horovod"; the environment variable
            HVD_SPARSE_TRANSPORT takes the place of "auto".
        bucket_numel: Elements at which a bucket of tensors is closed; a larger one has its own.
        dense_below: Tensors of fewer elements go through Horovod's own allreduce. So does float64.
        timeout_s: Seconds after which a peer that does not answer is given up.
        wire: Form of the values on the wire, "float32", "float16", "bfloat16", "qsgd8", "qsgd4" or
            "qsgd2", and "+gap" for bit-packed indices, as in "float16+gap". What rounding loses
            stays in the residual.
        record: Where to record what happens, for `hvd-sparse report`: a path, or a `Recorder`.
    """

    transport: str = "auto"
    bucket_numel: int = BUCKET_NUMEL
    dense_below: int = DENSE_BELOW
    timeout_s: float = TIMEOUT_S
    wire: str = "float32"
    record: Record = None
    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float | None = None
    warmup: str = "exponential"
    warmup_density: float = 0.25
    warmup_steps: int = 0
    warmup_epochs: float = 0.0
    dense_steps: int = 0
    dense_epochs: float = 0.0
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        check_choice("transport", self.transport, TRANSPORT_NAMES)
        check_count("bucket_numel", self.bucket_numel, 1)
        check_count("dense_below", self.dense_below, 0)
        check_at_least("timeout_s", self.timeout_s, 0.001)
        check_choice("wire", self.wire, WIRES)
        if not 0 <= check_at_least("momentum", self.momentum, 0) < 1:
            raise ConfigError(f"momentum must be in [0, 1), got {self.momentum!r}")
        check_flag("nesterov", self.nesterov)
        if self.clip_norm is not None:
            check_above("clip_norm", self.clip_norm, 0)
        check_choice("warmup", self.warmup, WARMUP_KINDS)
        check_share("warmup_density", self.warmup_density)
        check_count("warmup_steps", self.warmup_steps, 0)
        check_at_least("warmup_epochs", self.warmup_epochs, 0)
        check_count("dense_steps", self.dense_steps, 0)
        check_at_least("dense_epochs", self.dense_epochs, 0)
        if self.steps_per_epoch is not None:
            check_count("steps_per_epoch", self.steps_per_epoch, 1)
        elif self.warmup_epochs or self.dense_epochs:
            raise ConfigError(
                "steps_per_epoch must be given with warmup_epochs and dense_epochs, got None"
            )

    def schedule(self) -> Warmup:
        """The warm-up, in steps."""
        per_epoch = self.steps_per_epoch or 0
        return Warmup(
            self.warmup,
            self.warmup_steps + round(self.warmup_epochs * per_epoch),
            self.warmup_density,
            self.dense_steps + round(self.dense_epochs * per_epoch),
        )


def build(
    name: str,
    named_parameters: NamedParameters,
    density: float,
    selector: SelectorFactory,
    collective: CollectiveFactory,
    own: Mapping[str, object],
    shared: Mapping[str, Any],
) -> SparseCompressor:
    """Make a compression.

    Args:
        name: The constructor's.
        named_parameters: The optimizer's, or None.
        density: k/n, in (0, 1].
        selector: Makes one bucket's selector.
        collective: Makes one bucket's collective.
        own: The constructor's own arguments, for the description.
        shared: The shared arguments that were given.
    """
    check_density(density)
    options = Options(**shared)
    memory = MemoryOptions(options.momentum, options.nesterov, options.clip_norm)
    warmup = options.schedule()
    told = {**own, "density": density, "bucket_numel": options.bucket_numel, "wire": options.wire}
    told |= asdict(memory) | {f"warmup_{key}": value for key, value in asdict(warmup).items()}
    description = " ".join([name, *(f"{key}={value}" for key, value in told.items())])
    return SparseCompressor(
        named_parameters,
        Method(
            density,
            options.bucket_numel,
            selector,
            partial(collective, wire=WIRES[options.wire]),
            description,
            memory,
            warmup,
        ),
        transport=options.transport,
        timeout_s=options.timeout_s,
        dense_below=options.dense_below,
        observer=recorder_of(options.record),
    )


def recorder_of(record: Record) -> Recorder | None:
    """The recorder that a user asks for."""
    return record if isinstance(record, Recorder | None) else Recorder(record)


def collective_named(name: str) -> CollectiveFactory:
    """The collective that a user asks for.

    Raises:
        ConfigError: There is none of that name.
    """
    return COLLECTIVES[check_choice("collective", name, COLLECTIVES)]


def constructor(function: Function) -> Function:
    """Show the shared arguments, with their types and defaults, in a constructor's signature."""
    signature = inspect.signature(function)
    del function.__annotations__["shared"]
    hints = {**get_type_hints(Options), **get_type_hints(function)}
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
        for f in fields(Options)
        if f.name not in signature.parameters
    ]
    parameters = [p.replace(annotation=hints[p.name]) for p in (*own, *shared)]
    entries = re.split(r"^(?=    \w)", inspect.getdoc(Options) or "", flags=re.MULTILINE)[1:]
    told = [e.rstrip() for e in entries if e.partition(":")[0].strip() not in signature.parameters]
    function.__doc__ = (inspect.getdoc(function) or "").replace(SHARED_LINE, "\n".join(told))
    function.__annotations__ = hints
    function.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return function
