"""Makes the constructors of `Compression` from the fields of options."""

from __future__ import annotations

import difflib
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, TypeAlias, get_type_hints

from torch import Tensor
from torch.nn import Parameter

from hvd_sparse.adapter import SparseCompressor, calling_optimizer
from hvd_sparse.adapter.levels import Hierarchical, check_hierarchical
from hvd_sparse.checks import check_timeout, choice, count, optional
from hvd_sparse.methods import MethodOptions
from hvd_sparse.options import check_options, option
from hvd_sparse.recording import Recorder
from hvd_sparse.transports.choose import TRANSPORT_NAMES

DOCUMENTED_WIDTH = 100

NamedParameters: TypeAlias = Iterable[tuple[str, Parameter]] | None
Record: TypeAlias = str | os.PathLike[str] | Recorder | None


def recorder_of(record: Record) -> Recorder | None:
    """The recorder that a user asks for."""
    return record if isinstance(record, Recorder | None) else Recorder(record)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a constructor takes beside its method's options: how the job runs."""

    transport: str = option(
        "auto",
        '"auto", "gloo", "mpi", "nccl" or "horovod"; the environment variable HVD_SPARSE_TRANSPORT '
        'takes the place of "auto".',
        choice(TRANSPORT_NAMES),
    )
    hierarchical: Hierarchical = option(
        False,
        "True: workers of a host sum their gradients densely in shared memory, and each exchanges "
        'one shard of them, sparsely, with its like on other hosts. "auto": so where all hosts '
        "have the same number of workers, and more than one.",
        check_hierarchical,
    )
    dense_below: int = option(
        1024,
        "Tensors of fewer elements go through Horovod's own allreduce. So does float64.",
        count(0),
    )
    timeout_s: float = option(
        600.0,
        "Seconds without a sign of life after which a peer is given up, and after which connecting "
        "is. One that is alive is waited for, with a warning every `timeout_s`.",
        check_timeout,
    )
    busy_timeout_s: float | None = option(
        None,
        "Seconds after which a wait for a peer that is alive is given up, too; None: never.",
        optional(check_timeout),
    )
    record: Record = option(
        None,
        "Where to record what happens, for `hvd-sparse report`: a path, or a `Recorder`.",
        lambda name, value: value,
    )

    def __post_init__(self) -> None:
        check_options(self)


def constructor(options: type[MethodOptions]) -> Callable[..., SparseCompressor]:
    """The function that makes a compression by one method.

    Its signature and docstring are those of the options' fields: the method's own first, then what
    all methods share, then `RunOptions`.
    """
    run_names = {item.name for item in fields(RunOptions)}

    def construct(named_parameters: NamedParameters = None, **arguments: Any) -> SparseCompressor:
        bound = _bound(construct.__qualname__, signature, named_parameters, arguments)
        run = RunOptions(**{key: value for key, value in bound.items() if key in run_names})
        method = options(**{key: arguments[key] for key in arguments if key not in run_names})
        return SparseCompressor(
            named_parameters,
            method.make(),
            transport=run.transport,
            timeout_s=run.timeout_s,
            busy_timeout_s=run.busy_timeout_s,
            hierarchical=run.hierarchical,
            dense_below=run.dense_below,
            observer=recorder_of(run.record),
        )

    every = [*_in_order(options), *fields(RunOptions)]
    signature = inspect.Signature(
        [
            inspect.Parameter(
                "named_parameters",
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None,
                annotation=NamedParameters,
            ),
            *_parameters(options, _in_order(options)),
            *_parameters(RunOptions, fields(RunOptions)),
        ],
        return_annotation=SparseCompressor,
    )
    construct.__name__ = options.name
    construct.__qualname__ = f"Compression.{options.name}"
    construct.__doc__ = _documented(inspect.getdoc(options) or "", every)
    construct.__dict__["__signature__"] = signature
    _serve_uncalled(construct)
    return construct


def _bound(
    name: str,
    signature: inspect.Signature,
    named_parameters: NamedParameters,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Arguments by name; one that is not known is told with the name that is most like it."""
    for argument in arguments:
        if argument not in signature.parameters:
            alike = difflib.get_close_matches(argument, signature.parameters, 1)
            hint = f": did you mean {alike[0]!r}?" if alike else f"; see help(hvd_sparse.{name})"
            raise TypeError(f"{name} has no argument {argument!r}{hint}")
    try:
        return signature.bind(named_parameters, **arguments).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _serve_uncalled(construct: Callable[..., SparseCompressor]) -> None:
    """Let a constructor that was not called be an optimizer's compression, with its defaults.

    The first gradient puts a compression into its place; each optimizer gets one of its own.
    """

    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        optimizer = calling_optimizer(construct)
        if optimizer is None:
            return tensor, None
        optimizer._compression = construct()
        made: tuple[Tensor, Any] = optimizer._compression.compress(tensor)
        return made

    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor

    construct.__dict__.update(compress=compress, decompress=decompress)


def _in_order(options: type[MethodOptions]) -> list[Field[Any]]:
    """A method's fields as they are shown: density, its own ones, the others."""
    own = list(options.own_fields())
    density, *shared = (item for item in fields(options) if item not in own)
    return [density, *own, *shared]


def _parameters(options: type, items: Iterable[Field[Any]]) -> list[inspect.Parameter]:
    hints = get_type_hints(options)
    return [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if item.default is MISSING else item.default,
            annotation=hints[item.name],
        )
        for item in items
    ]


def _documented(text: str, items: Iterable[Field[Any]]) -> str:
    """A docstring with an `Args` section of what the fields mean."""
    entries = ["    named_parameters: See the class `Compression`."]
    for item in items:
        entries += textwrap.wrap(
            f"{item.name}: {item.metadata['meaning']}",
            DOCUMENTED_WIDTH,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
    return "\n".join([text, "", "Args:", *entries])
