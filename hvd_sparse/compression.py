"""`Compression`: methods by name behind Horovod's `compression=`, beside Horovod's own."""

from __future__ import annotations

import difflib
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ParamSpec, TypeAlias, TypeVar, get_type_hints

from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import dataclass_transform

from hvd_sparse.adapter import SparseCompressor, caller_of, named_pairs
from hvd_sparse.adapter.session import RunOptions
from hvd_sparse.checks import choice, option
from hvd_sparse.engine import Assignment
from hvd_sparse.errors import ConfigError
from hvd_sparse.methods import METHODS, DgcOptions, catalogue
from hvd_sparse.optim import MomentumCorrectedSGD, SparseAdamW
from hvd_sparse.recording import Recorder

DOCUMENTED_WIDTH = 100
NO_CACHE = "none"
"""A policy's `plan_cache` for no file."""
POLICY_VARIABLE = "HVD_SPARSE_POLICY"

NamedParameters: TypeAlias = Iterable[tuple[str, Parameter]] | None
Record: TypeAlias = str | os.PathLike[str] | Recorder | None
P = ParamSpec("P")
R = TypeVar("R")


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    """A constructor's arguments beside its method's, for type checkers and editors: never made."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    record: Record = option(
        None,
        "Where to record what happens, for `hvd-sparse report`: a path, or a `Recorder`.",
        lambda name, value: value,
    )
    named_parameters: NamedParameters = field(default=None, kw_only=False)


def takes(arguments: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A decorator: type checkers and editors see the fields of a dataclass as the arguments."""
    return lambda function: function


def constructor(arguments: Callable[P, Arguments]) -> Callable[P, SparseCompressor]:
    """The function that makes a compression by one method.

    Its signature and docstring come from the fields: the density and the method's own ones, then
    those that all methods share, then `RunOptions` and `record`.

    Args:
        arguments: The class that has the method's options and `Arguments`.
    """
    options = METHODS[arguments.name]  # type: ignore[attr-defined]
    own = list(options.own_fields())
    density, *shared = (item for item in fields(options) if item not in own)
    of_method, of_run = [density, *own, *shared], fields(RunOptions)
    run_names = {item.name for item in of_run}

    def construct(named_parameters: NamedParameters = None, **given: Any) -> SparseCompressor:
        _check_names(construct.__qualname__, signature, named_parameters, given)
        observer = _recorder_of(given.pop("record", None))
        run = RunOptions(**{k: v for k, v in given.items() if k in run_names})
        method = options(**{k: v for k, v in given.items() if k not in run_names})
        return SparseCompressor(named_parameters, method.make(), run, observer)

    seen, hints = inspect.signature(arguments).parameters, get_type_hints(arguments)
    documented = [*of_method, *of_run, *(i for i in fields(Arguments) if i.name == "record")]
    names = ["named_parameters", *(item.name for item in documented)]
    signature = inspect.Signature(
        [seen[name].replace(annotation=hints[name]) for name in names],
        return_annotation=SparseCompressor,
    )
    construct.__name__ = options.name
    construct.__qualname__ = f"Compression.{options.name}"
    construct.__doc__ = _documented(inspect.getdoc(options) or "", documented)
    construct.__dict__["__signature__"] = signature
    _serve_uncalled(construct)
    return takes(arguments)(construct)


def _recorder_of(record: Record) -> Recorder | None:
    return record if isinstance(record, Recorder | None) else Recorder(record)


def _check_names(
    name: str, signature: inspect.Signature, named: NamedParameters, arguments: dict[str, Any]
) -> None:
    """Refuse arguments that a constructor does not have, and name the most similar one."""
    for argument in arguments:
        if argument not in signature.parameters:
            alike = difflib.get_close_matches(argument, signature.parameters, 1)
            hint = f": did you mean {alike[0]!r}?" if alike else f"; see help(hvd_sparse.{name})"
            raise TypeError(f"{name} has no argument {argument!r}{hint}")
    try:
        signature.bind(named, **arguments)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _serve_uncalled(construct: Callable[..., SparseCompressor]) -> None:
    """Let an uncalled constructor be an optimizer's compression, with its defaults.

    The first gradient replaces it by a compression; each optimizer gets one of its own.
    """

    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        optimizer = caller_of(construct).optimizer
        if optimizer is None:
            return tensor, None
        optimizer._compression = construct()
        made: tuple[Tensor, Any] = optimizer._compression.compress(tensor)
        return made

    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor

    construct.__dict__.update(compress=compress, decompress=decompress)


def _documented(text: str, items: Iterable[Field[Any]]) -> str:
    """A docstring with an `Args` section made of the fields' meanings."""
    entries = ["    named_parameters: See the class `Compression`."]
    for item in items:
        entries += textwrap.wrap(
            f"{item.name}: {item.metadata['meaning']}",
            DOCUMENTED_WIDTH,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
    return "\n".join([text, "", "Args:", *entries])


# fmt: off
class _Topk(catalogue.TopkOptions, Arguments): ...
class _Oktopk(catalogue.OktopkOptions, Arguments): ...
class _Dgc(catalogue.DgcOptions, Arguments): ...
class _Dragonn(catalogue.DragonnOptions, Arguments): ...
class _Exdyna(catalogue.ExdynaOptions, Arguments): ...
class _Cltk(catalogue.CltkOptions, Arguments): ...
class _Gaussiank(catalogue.GaussiankOptions, Arguments): ...
class _Sidco(catalogue.SidcoOptions, Arguments): ...
class _Mstopk(catalogue.MstopkOptions, Arguments): ...
class _HardThreshold(catalogue.HardThresholdOptions, Arguments): ...
class _Randomk(catalogue.RandomkOptions, Arguments): ...
# fmt: on


class _DgcSgd(_Dgc):
    lr: float
    weight_decay: float = 0.0


class _HorovodCompressor:
    """A compressor of Horovod's own, which is imported on first use."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        import horovod.torch as hvd

        return getattr(hvd.Compression, self._name)


class Compression:
    """Ways to compress gradients, for `hvd.DistributedOptimizer(compression=…)`.

    Every constructor takes `named_parameters`, as the optimizer does: `model.named_parameters()`.
    None reads the names from the optimizer that gets the compression. All other arguments are
    named; `help(hvd_sparse.Compression.topk)` lists them. An uncalled constructor has the defaults,
    as with Horovod's own: `compression=hvd_sparse.Compression.oktopk`.

    Constructors raise `ConfigError`, a `ValueError`, with the argument, its range and its value.

    Unsent entries stay in a residual and are sent later (error feedback), so no part of a gradient
    is lost. To change the method during training, call `reassign` on all ranks between the same two
    steps: `compression.reassign(Compression.dgc(density=0.001))`. Residuals are kept.

    `Compression.none` and `Compression.fp16` are Horovod's.
    """

    none = _HorovodCompressor()
    fp16 = _HorovodCompressor()

    topk = staticmethod(constructor(_Topk))
    oktopk = staticmethod(constructor(_Oktopk))
    dgc = staticmethod(constructor(_Dgc))
    dragonn = staticmethod(constructor(_Dragonn))
    exdyna = staticmethod(constructor(_Exdyna))
    clt_k = staticmethod(constructor(_Cltk))
    gaussiank = staticmethod(constructor(_Gaussiank))
    sidco = staticmethod(constructor(_Sidco))
    mstopk = staticmethod(constructor(_Mstopk))
    hard_threshold = staticmethod(constructor(_HardThreshold))
    randomk = staticmethod(constructor(_Randomk))

    @staticmethod
    def from_policy(
        policy: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        named_parameters: NamedParameters = None,
        *,
        model: Module | None = None,
        record: Record = None,
    ) -> SparseCompressor:
        """Compress by a policy file, whose rules give tensors their compressors.

        A rule that applies to no parameter is a warning.

        Args:
            policy: Path of a YAML file, or its content as a mapping; None takes the path from the
                environment variable HVD_SPARSE_POLICY. All ranks need the same rules.
            named_parameters: See the class; None takes those of `model`, if that is given.
            model: Needed where rules ask for the class of the module that owns a parameter.
            record: Where to record what happens: a path, or a `Recorder`.

        Raises:
            ConfigError: The policy is wrong, or cannot be read; the message says file, line, key,
                range and value.
        """
        from hvd_sparse.planner import PlanCache, Planner, default_path
        from hvd_sparse.policy import assign, load_policy

        if policy is None:
            policy = os.environ.get(POLICY_VARIABLE) or None
        if policy is None:
            raise ConfigError(f"policy must be a path or a mapping, or {POLICY_VARIABLE} set")
        if named_parameters is None and model is not None:
            named_parameters = model.named_parameters()
        named = None if named_parameters is None else named_pairs(named_parameters)
        checked = load_policy(policy)
        rules = assign(checked, named, model)
        method: Assignment = rules
        if any(rule.is_auto for rule in rules.rules):
            path = checked.plan_cache or default_path()
            cache = None if path in (NO_CACHE, None) else PlanCache(path)
            method = Planner(rules, checked.profile, cache)
        names = ("transport", "timeout_s", "busy_timeout_s", "hierarchical")
        run = RunOptions(dense_below=0, **{name: getattr(checked, name) for name in names})
        return SparseCompressor(named, method, run, _recorder_of(record))


@takes(_DgcSgd)
def dgc_sgd(
    named_parameters: Iterable[tuple[str, Parameter]],
    *,
    lr: float,
    weight_decay: float = 0.0,
    **options: Any,
) -> tuple[MomentumCorrectedSGD, SparseCompressor]:
    """The optimizer and the compression of Deep Gradient Compression.

        optimizer, compression = hvd_sparse.dgc_sgd(model.named_parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression)

    Args:
        named_parameters: As `model.named_parameters()`.
        lr: Learning rate.
        weight_decay: λ; it gets the same momentum.
        **options: See `Compression.dgc`; `momentum` and `nesterov` hold for both.
    """
    named = named_pairs(named_parameters)
    compression = Compression.dgc(named, **options)
    momentum = options.get("momentum", DgcOptions.momentum)
    nesterov = options.get("nesterov", DgcOptions.nesterov)
    parameters = dict.fromkeys(p for _, p in named)  # tied weights have several names
    return MomentumCorrectedSGD(parameters, lr, momentum, weight_decay, nesterov), compression


def sparse_adamw(
    named_parameters: Iterable[tuple[str, Parameter]],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    compressor: str = "topk",
    **options: Any,
) -> tuple[SparseAdamW, SparseCompressor]:
    """AdamW and a compression that sends what moves the weights furthest.

        optimizer, compression = hvd_sparse.sparse_adamw(
            model.named_parameters(), lr=1e-3, clip_norm=1.0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression)

    Args:
        named_parameters: As `model.named_parameters()`.
        lr: Learning rate.
        betas: β1, for tensors that stay dense (others get 0), and β2.
        eps: ε.
        weight_decay: λ.
        compressor: Name of a constructor of `Compression`.
        **options: See that constructor. `clip_norm` takes the place of `clip_grad_norm_`.
            `dense_steps` is 20 where it is not given: until then v is too young.
    """
    named = named_pairs(named_parameters)
    choice(METHODS)("compressor", compressor)
    arguments = {"dense_steps": 20, "momentum": 0.0, **options, "preconditioned": True}
    compression = getattr(Compression, compressor)(named, **arguments)
    parameters = dict.fromkeys(p for _, p in named)  # tied weights have several names
    return SparseAdamW(parameters, lr, betas, eps, weight_decay), compression
