"""DGC and DRAGONN: sampled thresholds, with momentum correction or without."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch.nn import Parameter

from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.checks import check_above, check_share
from hvd_sparse.compressors.shared import (
    NamedParameters,
    Shared,
    SharedWithMomentum,
    build,
    collective_named,
    constructor,
)
from hvd_sparse.errors import ConfigError
from hvd_sparse.optim import MomentumCorrectedSGD
from hvd_sparse.selectors import HashedExtraction, SampledThreshold, Selector, ThresholdSelector
from hvd_sparse.selectors.hashed import SLOTS_PER_BUCKET

if TYPE_CHECKING:
    from typing_extensions import Unpack


@constructor
def dgc(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    momentum: float = 0.9,
    nesterov: bool = False,
    sample_share: float = 0.01,
    collective: str = "topk_allgather",
    **shared: Unpack[Shared],
) -> SparseCompressor:
    """Deep Gradient Compression: momentum correction and factor masking, sampled thresholds.

    Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887):
    u = m u + g; v = v + u; sent: about the k largest |v|; there v = 0 and u = 0.

    The optimizer must not apply momentum to these gradients a second time: use
    `hvd_sparse.MomentumCorrectedSGD`, or `hvd_sparse.dgc_sgd`, which makes both. The authors warm
    up over the first four epochs (`warmup_epochs=4, steps_per_epoch=…`) and go to density 0.001.

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`.
        momentum: m, in [0, 1); 0 is plain error feedback.
        nesterov: Whether it is Nesterov's: u = m (u + g); v = v + u + g.
        sample_share: Part of the elements from which the threshold is estimated, in (0, 1].
        collective: See `Compression.topk`.
        **shared: See the class `Compression`.
    """
    selector = partial(_sampled, check_share("sample_share", sample_share))
    own = {"collective": collective, "sample_share": sample_share}
    return build(
        "dgc",
        named_parameters,
        density,
        selector,
        collective_named(collective),
        own,
        {"momentum": momentum, "nesterov": nesterov, **shared},
    )


@constructor
def dragonn(
    named_parameters: NamedParameters = None,
    *,
    density: float = 0.01,
    slots_per_entry: float = 2.0,
    slots_per_bucket: int = 8,
    sample_share: float = 0.01,
    collective: str = "topk_allgather",
    **shared: Unpack[SharedWithMomentum],
) -> SparseCompressor:
    """DRAGONN: entries that pass a sampled threshold are extracted by hashing their indices.

    Source: Wang et al., "DRAGONN" (ICML 2022), algorithm 1. Where |acc_i| ≥ t, I[h(i)] = i; what
    lost its slot stays in the residual. The authors use DGC's memory with it: `momentum=0.9`.

    Args:
        named_parameters: See the class `Compression`.
        density: See the class `Compression`.
        slots_per_entry: m/k, slots per entry wanted, above 0.
        slots_per_bucket: 8, of which under 1 % lose at 2 slots per entry; or 1, as in the paper,
            whose release has 4 slots per entry and loses 11.5 %.
        sample_share: Part of the elements from which the threshold is estimated, in (0, 1].
        collective: See `Compression.topk`.
        **shared: See the class `Compression`.
    """
    check_above("slots_per_entry", slots_per_entry, 0)
    check_share("sample_share", sample_share)
    if slots_per_bucket not in SLOTS_PER_BUCKET:
        raise ConfigError(f"slots_per_bucket must be 1 or 8, got {slots_per_bucket!r}")
    selector = partial(_hashed, sample_share, slots_per_entry, slots_per_bucket)
    own = {
        "collective": collective,
        "slots_per_entry": slots_per_entry,
        "slots_per_bucket": slots_per_bucket,
        "sample_share": sample_share,
    }
    return build(
        "dragonn", named_parameters, density, selector, collective_named(collective), own, shared
    )


def dgc_sgd(
    named_parameters: Iterable[tuple[str, Parameter]],
    *,
    lr: float,
    density: float = 0.01,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    sample_share: float = 0.01,
    collective: str = "topk_allgather",
    **shared: Unpack[Shared],
) -> tuple[MomentumCorrectedSGD, SparseCompressor]:
    """The optimizer and the compression of Deep Gradient Compression, which belong together.

        optimizer, compression = hvd_sparse.dgc_sgd(model.named_parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression)

    Args:
        named_parameters: As `model.named_parameters()`.
        lr: Learning rate.
        density: See `Compression.dgc`.
        momentum: m of both.
        nesterov: Whether it is Nesterov's.
        weight_decay: λ; it gets the same momentum.
        sample_share: See `Compression.dgc`.
        collective: See `Compression.dgc`.
        **shared: See the class `Compression`.
    """
    named = list(named_parameters)
    optimizer = MomentumCorrectedSGD((p for _, p in named), lr, momentum, weight_decay, nesterov)
    compression = dgc(
        named,
        density=density,
        momentum=momentum,
        nesterov=nesterov,
        sample_share=sample_share,
        collective=collective,
        **shared,
    )
    return optimizer, compression


def _sampled(sample_share: float) -> Selector:
    return ThresholdSelector(SampledThreshold(sample_share))


def _hashed(sample_share: float, slots_per_entry: float, slots_per_bucket: int) -> Selector:
    extraction = HashedExtraction(slots_per_entry, slots_per_bucket)
    return ThresholdSelector(SampledThreshold(sample_share), extraction)
