"""The options that all methods share, and how they make a `Method`.

`Compression`'s constructors (signatures and docstrings), the keys of policies and their schema are
made from the fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import Field, asdict, dataclass, fields
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from hvd_sparse.checks import (
    at_least,
    check_above_zero,
    check_below_one,
    check_choice,
    check_flag,
    check_options,
    check_share,
    choice,
    count,
    option,
    optional,
)
from hvd_sparse.collectives import AutomaticCollective, Collective, lossless_wire
from hvd_sparse.collectives.registry import BY_NAME, CHOOSABLE, SELECTABLE
from hvd_sparse.engine import Method
from hvd_sparse.engine.bucketing import (
    CPU_BUCKET_NUMEL,
    CUDA_BUCKET_NUMEL,
    LEAST_CUT_NUMEL,
    WARMUP_KINDS,
    Warmup,
)
from hvd_sparse.errors import ConfigError
from hvd_sparse.memories import MOMENTUM_KINDS, MemoryOptions
from hvd_sparse.selectors import Selector
from hvd_sparse.transports import Transport
from hvd_sparse.wire import WIRES

CollectiveFactory = Callable[..., Collective]
"""Makes one bucket's collective, from the transport, numel, k and `wire`."""

AUTOMATIC = "auto"
COLLECTIVES = (AUTOMATIC, *SELECTABLE)
"""Names of collectives in arguments."""
MOST_STEPS = 1 << 53
"""Limit on the steps of a warm-up: floats count no further."""
SEPARATOR = ","
"""Separates the names of several collectives to choose from."""


def check_collective(name: str, value: Any) -> str:
    """The name of a collective, or several to choose from, without synonyms of one algorithm."""
    names = value.split(SEPARATOR) if isinstance(value, str) else [value]
    if len(names) == 1:
        return check_choice(name, value, COLLECTIVES)
    algorithms = [BY_NAME[check_choice(name, each, CHOOSABLE)].name for each in names]
    return SEPARATOR.join(dict.fromkeys(algorithms))


@dataclass(frozen=True, kw_only=True)
class MethodOptions(ABC):
    """The options that all methods share. A subclass adds its own, and cites its paper.

    Attributes:
        name: The method's name in `Compression` and in policies.
    """

    name: ClassVar[str]

    density: float = option(
        0.01, "k/n, the share of a bucket's elements to exchange per step, in (0, 1].", check_share
    )
    momentum: float = option(
        0.0,
        "m of the momentum that the compression applies, in [0, 1); 0 is plain error feedback. "
        "Where it is not 0, the optimizer must have no momentum: see `MomentumCorrectedSGD`.",
        check_below_one,
    )
    momentum_kind: str = option(
        "global",
        '"local": each worker\'s own, by DGC\'s momentum correction; "global": that of what all '
        "workers applied (GMC), which needs no buffer and stays small at low densities.",
        choice(MOMENTUM_KINDS),
    )
    nesterov: bool = option(False, "Whether that momentum is Nesterov's.", check_flag)
    low_pass: float = option(
        1.0,
        "β of ScaleCom's low-pass filter, in (0, 1]: new residual = (1-β)·old + β·unsent. 1 is no "
        "filter.",
        check_share,
    )
    residual_decay: float = option(
        1.0,
        "Factor on the residual after each step, in (0, 1]. Below 1 a part of the gradient is "
        "lost, and counted in `stats().let_go_l1`.",
        check_share,
    )
    preconditioned: bool = option(
        False,
        "Whether the entries that would move the weights furthest are sent, by |residual| / √v of "
        "`SparseAdamW`, which must be the optimizer: see `sparse_adamw`.",
        check_flag,
    )
    clip_norm: float | None = option(
        None,
        "Limit on the L2 norm of the whole gradient that the optimizer sees, above 0: each of P "
        "ranks clips its own to P^(-1/2) times the limit before accumulating it. No exchange "
        "begins before the last gradient is ready. None: no limit.",
        optional(check_above_zero),
    )
    warmup: str = option(
        "exponential",
        '"exponential" (four densities from `warmup_density` down, each the same share of the one '
        'before, as in DGC), "linear" or "constant".',
        choice(WARMUP_KINDS),
    )
    warmup_density: float = option(0.25, "First density of the warm-up, in (0, 1].", check_share)
    warmup_steps: int = option(0, "Steps of the warm-up, at least 0.", count(0))
    warmup_epochs: float = option(0.0, "Epochs of the warm-up, beside `warmup_steps`.", at_least(0))
    dense_steps: int = option(
        0, "Steps before the warm-up in which all entries are exchanged, at least 0.", count(0)
    )
    dense_epochs: float = option(0.0, "The same in epochs, beside `dense_steps`.", at_least(0))
    steps_per_epoch: int | None = option(
        None, "Steps of an epoch; needed where epochs are given.", optional(count(1))
    )
    bucket_numel: int | None = option(
        None,
        "Elements at which a bucket of tensors is closed; a tensor above that, and above "
        f"{LEAST_CUT_NUMEL}, is cut by rows over buckets of its own. None: {CPU_BUCKET_NUMEL}, and "
        f"{CUDA_BUCKET_NUMEL} on CUDA devices.",
        optional(count(1)),
    )
    wire: str = option(
        AUTOMATIC,
        'Form of the values on the wire: "float32", "float16", "bfloat16", "qsgd8", "qsgd4" or '
        '"qsgd2", and "+gap" for bit-packed indices, as in "float16+gap". "float32, dense qsgd4" '
        "rounds only sums that have become dense. What rounding loses stays in the residual. "
        '"auto": "float32+gap" where the link is so slow that it saves time, otherwise "float32".',
        choice((AUTOMATIC, *WIRES)),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov must be False where momentum is 0, got True")
        if self.preconditioned and self.momentum:
            raise ConfigError(
                f"momentum must be 0 where preconditioned is True, got {self.momentum:g}"
            )
        if self.steps_per_epoch is None and (self.warmup_epochs or self.dense_epochs):
            raise ConfigError(
                "steps_per_epoch must be given with warmup_epochs and dense_epochs, got None"
            )
        self._warmup()  # refuses one that is too long, by name

    @abstractmethod
    def selector(self) -> Selector:
        """Make one bucket's selector."""

    @abstractmethod
    def collective_factory(self) -> CollectiveFactory:
        """The function that makes one bucket's collective."""

    @classmethod
    def own_fields(cls) -> Iterator[Field[Any]]:
        """The fields that other methods do not have, in order."""
        shared = {item.name for item in fields(MethodOptions)}
        return (item for item in fields(cls) if item.name not in shared)

    def make(self) -> Method:
        """The method, as engines, plans and policies use it."""
        memory = MemoryOptions(**{f.name: getattr(self, f.name) for f in fields(MemoryOptions)})
        warmup = self._warmup()
        options = {item.name: getattr(self, item.name) for item in self.own_fields()}
        options |= {"density": self.density, "bucket_numel": self.bucket_numel, "wire": self.wire}
        options |= asdict(memory) | {f"warmup_{key}": v for key, v in asdict(warmup).items()}
        return Method(
            self.density,
            self.bucket_numel,
            self.selector,
            self._on_its_wire,
            self.name,
            memory,
            warmup,
            self.summary(),
            tuple(options.items()),
        )

    def _on_its_wire(self, transport: Transport, numel: int, k: int) -> Collective:
        wire = WIRES.get(self.wire) or lossless_wire(transport, numel, k)
        return self.collective_factory()(transport, numel, k, wire=wire)

    def summary(self) -> str:
        """The name, the density, and every other option that is not at its default."""
        options = (item for item in fields(self) if item.name != "density")
        values = ((item, getattr(self, item.name)) for item in options)
        told = [f"{item.name}={value}" for item, value in values if value != item.default]
        return " ".join([self.name, f"density={self.density:g}", *told])

    def _warmup(self) -> Warmup:
        return Warmup(self.warmup, self._steps("warmup"), self.warmup_density, self._steps("dense"))

    def _steps(self, phase: str) -> int:
        """The steps of a phase, including those of its epochs."""
        steps: int = getattr(self, f"{phase}_steps")
        epochs: float = getattr(self, f"{phase}_epochs")
        try:
            steps += round(epochs * (self.steps_per_epoch or 0))
        except OverflowError:
            steps = MOST_STEPS + 1
        if steps > MOST_STEPS:
            raise ConfigError(
                f"{phase}_steps and {phase}_epochs must be at most {MOST_STEPS} steps, got more"
            )
        return steps


@dataclass(frozen=True, kw_only=True)
class AnyCollectiveOptions(MethodOptions):
    """Options of a method that goes with any collective."""

    collective: str = option(
        "topk_allgather", "What exchanges the entries; see `Compression.topk`.", check_collective
    )

    @override
    def collective_factory(self) -> CollectiveFactory:
        if self.collective == AUTOMATIC:
            return AutomaticCollective
        if SEPARATOR in self.collective:
            return partial(AutomaticCollective, algorithms=self.collective.split(SEPARATOR))
        return BY_NAME[self.collective].collective
