"""`Compression`: named constructors beside Horovod's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module

from hvd_sparse import compressors
from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.compressors.shared import NamedParameters, Record, recorder_of
from hvd_sparse.errors import ConfigError

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

    Every constructor takes these arguments, and its own:
        named_parameters: What the optimizer gets too, as `model.named_parameters()`; None reads the
            names from the optimizer that the compression is given to.
        density: k/n, the share of a bucket's elements to exchange per step, in (0, 1].
        **shared: Memory, warm-up, wire, transport and more; the same for all, and told by each
            (`help(hvd_sparse.Compression.topk)`).

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

    topk = staticmethod(compressors.topk)
    oktopk = staticmethod(compressors.oktopk)
    dgc = staticmethod(compressors.dgc)
    dragonn = staticmethod(compressors.dragonn)
    exdyna = staticmethod(compressors.exdyna)
    clt_k = staticmethod(compressors.clt_k)
    gaussiank = staticmethod(compressors.gaussiank)
    sidco = staticmethod(compressors.sidco)
    mstopk = staticmethod(compressors.mstopk)
    hard_threshold = staticmethod(compressors.hard_threshold)
    randomk = staticmethod(compressors.randomk)

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
            record: See the class.

        Raises:
            ConfigError: The policy is wrong; the message says file, line, key, range and value.
            OSError: It cannot be read.
        """
        from hvd_sparse.planner import Planner
        from hvd_sparse.policy import assign, load_policy

        if policy is None:
            policy = os.environ.get(POLICY_VARIABLE) or None
        if policy is None:
            raise ConfigError(f"policy must be a path or a mapping, or {POLICY_VARIABLE} set")
        if named_parameters is None and model is not None:
            named_parameters = model.named_parameters()
        named = None if named_parameters is None else list(named_parameters)
        checked = load_policy(policy, constructors())
        rules = assign(checked, named, model)
        return SparseCompressor(
            named,
            Planner(rules, checked.profile) if rules.planned else rules,
            transport=checked.transport,
            timeout_s=checked.timeout_s,
            dense_below=0,
            observer=recorder_of(record),
        )


def constructors() -> dict[str, Callable[..., SparseCompressor]]:
    """The constructors of `Compression` that compress by one method, by their names."""
    return dict(compressors.COMPRESSORS)
