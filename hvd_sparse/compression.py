"""`Compression`: methods by name behind Horovod's `compression=`, beside Horovod's own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module, Parameter

from hvd_sparse.adapter import SparseCompressor, named_pairs
from hvd_sparse.constructors import NamedParameters, Record, constructor, recorder_of
from hvd_sparse.engine import Assignment
from hvd_sparse.errors import ConfigError
from hvd_sparse.methods import METHODS, DgcOptions
from hvd_sparse.optim import MomentumCorrectedSGD

NO_CACHE = "none"
"""In the place of a policy's `plan_cache`: no file."""
POLICY_VARIABLE = "HVD_SPARSE_POLICY"


class _HorovodCompressor:
    """A compressor of Horovod's own, looked up when it is asked for."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        import horovod.torch as hvd

        return getattr(hvd.Compression, self._name)


class Compression:
    """Ways to compress gradients, for `hvd.DistributedOptimizer(compression=…)`.

    Every constructor takes `named_parameters`, what the optimizer gets too, as
    `model.named_parameters()`; None reads the names from the optimizer that the compression is
    given to. All other arguments are named, and told by each constructor
    (`help(hvd_sparse.Compression.topk)`). As Horovod's own, a constructor can be given without
    being called: `compression=hvd_sparse.Compression.oktopk` has the defaults.

    They raise `ConfigError`, a `ValueError`, that names an argument, its range and its value.

    What is not sent stays in a residual and is sent later (error feedback), so no part of a
    gradient is lost. To change density, compressor or other arguments in mid-training, give
    another compression's method to `reassign`, on all ranks between the same two steps:
    `compression.reassign(Compression.dgc(density=0.001).method)`. Residuals are kept; the warm-up
    goes on from where it was.

    `Compression.none` and `Compression.fp16` are Horovod's.
    """

    none = _HorovodCompressor()
    fp16 = _HorovodCompressor()

    topk = staticmethod(constructor(METHODS["topk"]))
    oktopk = staticmethod(constructor(METHODS["oktopk"]))
    dgc = staticmethod(constructor(METHODS["dgc"]))
    dragonn = staticmethod(constructor(METHODS["dragonn"]))
    exdyna = staticmethod(constructor(METHODS["exdyna"]))
    clt_k = staticmethod(constructor(METHODS["clt_k"]))
    gaussiank = staticmethod(constructor(METHODS["gaussiank"]))
    sidco = staticmethod(constructor(METHODS["sidco"]))
    mstopk = staticmethod(constructor(METHODS["mstopk"]))
    hard_threshold = staticmethod(constructor(METHODS["hard_threshold"]))
    randomk = staticmethod(constructor(METHODS["randomk"]))

    @staticmethod
    def from_policy(
        policy: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        named_parameters: NamedParameters = None,
        *,
        model: Module | None = None,
        record: Record = None,
    ) -> SparseCompressor:
        """What a policy file says: tensors by rules, each with its own compressor.

        A rule that decides on no parameter is warned of.

        Args:
            policy: Path of a YAML file, or what it would hold; None takes the path from the
                environment variable HVD_SPARSE_POLICY. All ranks need the same rules.
            named_parameters: See the class; None takes those of `model`, if that is given.
            model: Where rules ask for the class of the module that owns a parameter.
            record: Where to record what happens: a path, or a `Recorder`.

        Raises:
            ConfigError: The policy is wrong; the message says file, line, key, range and value.
            OSError: It cannot be read.
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
        if rules.planned:
            path = checked.plan_cache or default_path()
            cache = None if path == NO_CACHE else PlanCache(path)
            method = Planner(rules, checked.profile, cache)
        return SparseCompressor(
            named,
            method,
            transport=checked.transport,
            timeout_s=checked.timeout_s,
            busy_timeout_s=checked.busy_timeout_s,
            hierarchical=checked.hierarchical,
            dense_below=0,
            observer=recorder_of(record),
        )


def dgc_sgd(
    named_parameters: Iterable[tuple[str, Parameter]],
    *,
    lr: float,
    weight_decay: float = 0.0,
    **options: Any,
) -> tuple[MomentumCorrectedSGD, SparseCompressor]:
    """The optimizer and the compression of Deep Gradient Compression, which belong together.

        optimizer, compression = hvd_sparse.dgc_sgd(model.named_parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression)

    Args:
        named_parameters: As `model.named_parameters()`.
        lr: Learning rate.
        weight_decay: λ; it gets the same momentum.
        **options: See `Compression.dgc`; `momentum` and `nesterov` are those of both.
    """
    named = named_pairs(named_parameters)
    compression = Compression.dgc(named, **options)
    momentum = options.get("momentum", DgcOptions.momentum)
    nesterov = options.get("nesterov", DgcOptions.nesterov)
    parameters = (p for _, p in named)
    return MomentumCorrectedSGD(parameters, lr, momentum, weight_decay, nesterov), compression
