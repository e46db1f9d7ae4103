"""DGC and DRAGONN: sampled thresholds, with momentum correction or without."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from hvd_sparse.checks import at_most, check_below_one, check_count, check_share, choice, option
from hvd_sparse.errors import ConfigError
from hvd_sparse.memories import MOMENTUM_KINDS
from hvd_sparse.methods.method_options import AnyCollectiveOptions
from hvd_sparse.selectors import HashedExtraction, SampledThreshold, Selector, ThresholdSelector
from hvd_sparse.selectors.hashed import SLOTS_PER_BUCKET

MOST_SLOTS_PER_ENTRY = 100


def _check_slots_per_bucket(name: str, value: int) -> int:
    if check_count(name, value, 1) not in SLOTS_PER_BUCKET:
        raise ConfigError(f"{name} must be 1 or 8, got {value!r}")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class DgcOptions(AnyCollectiveOptions):
    """Deep Gradient Compression: momentum correction and factor masking, sampled thresholds.

    Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887):
    u = m u + g; v = v + u; sent: about the k largest |v|; there v = 0 and u = 0.

    The optimizer must not apply momentum to these gradients a second time: use
    `hvd_sparse.MomentumCorrectedSGD`, or `hvd_sparse.dgc_sgd`, which makes both. The authors warm
    up over the first four epochs (`warmup_epochs=4, steps_per_epoch=…`), down to density 0.001.
    """

    name = "dgc"

    momentum: float = option(
        0.9, "m of the momentum correction, in [0, 1); 0 is plain error feedback.", check_below_one
    )
    momentum_kind: str = option(
        "local",
        '"local": each worker\'s own, as in the paper; "global": that of the applied gradients of '
        "all workers (GMC).",
        choice(MOMENTUM_KINDS),
    )
    sample_share: float = option(
        0.01, "Part of the elements from which the threshold is estimated, in (0, 1].", check_share
    )

    @override
    def selector(self) -> Selector:
        return ThresholdSelector(SampledThreshold(self.sample_share))


@dataclass(frozen=True, kw_only=True)
class DragonnOptions(AnyCollectiveOptions):
    """DRAGONN: entries that pass a sampled threshold are extracted by hashing their indices.

    Source: Wang et al., "DRAGONN" (ICML 2022), algorithm 1. Where |acc_i| ≥ t, I[h(i)] = i; the
    largest magnitudes win the slots, and the others stay in the residual. The authors use it with
    DGC's memory: `momentum=0.9, momentum_kind="local"`.
    """

    name = "dragonn"

    slots_per_entry: float = option(
        3.0,
        "m/l, slots per entry expected to reach the threshold, above 0 and at most "
        f"{MOST_SLOTS_PER_ENTRY}.",
        at_most(MOST_SLOTS_PER_ENTRY),
    )
    slots_per_bucket: int = option(
        8,
        "8, which loses under 0.1 % of the entries at 3 slots per entry; or 1, as in the paper, "
        "whose release has 4 slots per entry and loses 11.5 %.",
        _check_slots_per_bucket,
    )
    sample_share: float = option(
        0.01, "Part of the elements from which the threshold is estimated, in (0, 1].", check_share
    )

    @override
    def selector(self) -> Selector:
        extraction = HashedExtraction(self.slots_per_entry, self.slots_per_bucket)
        return ThresholdSelector(SampledThreshold(self.sample_share), extraction)
