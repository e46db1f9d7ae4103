"""`Compression`: named constructors beside Horovod's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch.nn import Module, Parameter

from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.checks import check_at_least, check_choice, check_count, check_density
from hvd_sparse.collectives import (
    Collective,
    DsarSplitAllgather,
    GTopk,
    OkTopk,
    SsarRecursiveDouble,
    SsarSplitAllgather,
    TopkAllgather,
    TopkDsa,
    automatic_collective,
)
from hvd_sparse.engine import Method
from hvd_sparse.errors import ConfigError
from hvd_sparse.recording import Recorder
from hvd_sparse.selectors import ExactTopK, ReusedThreshold, Selector
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
}
"""Collectives by the names under which a user asks for them."""

NamedParameters = Iterable[tuple[str, Parameter]] | None
Record = str | os.PathLike[str] | Recorder | None

BUCKET_NUMEL = 1 << 23
DENSE_BELOW = 1024
TIMEOUT_S = 600.0
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

    Every constructor takes these arguments:
        named_parameters: What the optimizer gets too, as `model.named_parameters()`; None reads the
            names from the optimizer that the compression is given to.
        density: k/n, the share of a bucket's elements to exchange per step, in (0, 1].
        transport: "auto", "gloo", "mpi" or "horovod"; the environment variable
            HVD_SPARSE_TRANSPORT takes the place of "auto".
        bucket_numel: Elements at which a bucket of tensors is closed; a larger one has its own.
        dense_below: Tensors of fewer elements go through Horovod's own allreduce. So does float64.
        timeout_s: Seconds after which a peer that does not answer is given up.
        wire: Form of the values on the wire, "float32", "float16", "bfloat16", "qsgd8", "qsgd4" or
            "qsgd2", and "+gap" for bit-packed indices, as in "float16+gap". What rounding loses
            stays in the residual.
        record: Where to record what happens, for `hvd-sparse report`: a path, or a `Recorder`.

    They raise `ConfigError`, a `ValueError`, that names an argument, its range and its value.

    What is not sent stays in a residual and is sent later (error feedback), so no part of a
    gradient is lost. `Compression.none` and `Compression.fp16` are Horovod's.
    """

    none = _HorovodCompressor()
    fp16 = _HorovodCompressor()

    @staticmethod
    def topk(
        named_parameters: NamedParameters = None,
        *,
        density: float = 0.01,
        collective: str = "auto",
        transport: str = "auto",
        bucket_numel: int = BUCKET_NUMEL,
        dense_below: int = DENSE_BELOW,
        timeout_s: float = TIMEOUT_S,
        wire: str = "float32",
        record: Record = None,
    ) -> SparseCompressor:
        """Exact top-k: each rank sends its k largest accumulated magnitudes in every step.

        Args:
            named_parameters: See the class.
            density: See the class.
            collective: "auto" (the cheaper one for the world size and k); "oktopk" or "gtopk" (the
                k largest of the sum are applied); "topk_allgather", "topk_dsa",
                "ssar_recursive_double", "ssar_split_allgather" or "dsar_split_allgather" (all that
                was sent is).
            transport: See the class.
            bucket_numel: See the class.
            dense_below: See the class.
            timeout_s: See the class.
            wire: See the class.
            record: See the class.
        """
        check_choice("collective", collective, COLLECTIVES)
        return _compressor(
            named_parameters,
            density,
            ExactTopK,
            COLLECTIVES[collective],
            f"topk collective={collective}",
            transport=transport,
            bucket_numel=bucket_numel,
            dense_below=dense_below,
            timeout_s=timeout_s,
            wire=wire,
            record=record,
        )

    @staticmethod
    def oktopk(
        named_parameters: NamedParameters = None,
        *,
        density: float = 0.01,
        repartition_interval: int = 64,
        threshold_interval: int = 32,
        balance_factor: float = 4.0,
        tolerance: float = 0.1,
        transport: str = "auto",
        bucket_numel: int = BUCKET_NUMEL,
        dense_below: int = DENSE_BELOW,
        timeout_s: float = TIMEOUT_S,
        wire: str = "float32",
        record: Record = None,
    ) -> SparseCompressor:
        """Ok-Topk: thresholds reused between exact evaluations, and an allreduce of O(k) volume.

        Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning"
        (PPoPP '22), Algorithms 1 and 2.

        Args:
            named_parameters: See the class.
            density: See the class.
            repartition_interval: τ, steps between repartitions of the index space, at least 1.
            threshold_interval: τ′, steps between exact thresholds, local and global, at least 1.
            balance_factor: Results are levelled between ranks before they are gathered where one
                rank has more than this many times the average, at least 1.
            tolerance: Share of k by which the number of entries may be off before a threshold is
                evaluated early, at least 0.
            transport: See the class.
            bucket_numel: See the class.
            dense_below: See the class.
            timeout_s: See the class.
            wire: See the class.
            record: See the class.
        """
        check_count("repartition_interval", repartition_interval, 1)
        check_count("threshold_interval", threshold_interval, 1)
        check_at_least("balance_factor", balance_factor, 1)
        check_at_least("tolerance", tolerance, 0)
        return _compressor(
            named_parameters,
            density,
            partial(ReusedThreshold, threshold_interval, tolerance),
            partial(
                OkTopk,
                repartition_interval=repartition_interval,
                threshold_interval=threshold_interval,
                balance_factor=balance_factor,
                tolerance=tolerance,
            ),
            f"oktopk repartition_interval={repartition_interval} "
            f"threshold_interval={threshold_interval} balance_factor={balance_factor:g} "
            f"tolerance={tolerance:g}",
            transport=transport,
            bucket_numel=bucket_numel,
            dense_below=dense_below,
            timeout_s=timeout_s,
            wire=wire,
            record=record,
        )

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
            observer=_observer(record),
        )


def constructors() -> dict[str, Callable[..., SparseCompressor]]:
    """The constructors of `Compression` that compress by one method, by their names."""
    return {
        name: getattr(Compression, name)
        for name, member in vars(Compression).items()
        if isinstance(member, staticmethod) and name != "from_policy"
    }


def _observer(record: Record) -> Recorder | None:
    return record if isinstance(record, Recorder | None) else Recorder(record)


def _compressor(
    named_parameters: NamedParameters,
    density: float,
    selector: Callable[[], Selector],
    collective: Callable[..., Collective],
    description: str,
    *,
    transport: str,
    bucket_numel: int,
    dense_below: int,
    timeout_s: float,
    wire: str,
    record: Record,
) -> SparseCompressor:
    check_density(density)
    check_choice("transport", transport, TRANSPORT_NAMES)
    check_count("bucket_numel", bucket_numel, 1)
    check_count("dense_below", dense_below, 0)
    check_at_least("timeout_s", timeout_s, 0.001)
    check_choice("wire", wire, WIRES)
    method = Method(
        density,
        bucket_numel,
        selector,
        partial(collective, wire=WIRES[wire]),
        f"{description} density={density:g} bucket_numel={bucket_numel} wire={wire}",
    )
    return SparseCompressor(
        named_parameters,
        method,
        transport=transport,
        timeout_s=timeout_s,
        dense_below=dense_below,
        observer=_observer(record),
    )
