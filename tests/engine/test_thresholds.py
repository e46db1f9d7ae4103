"""What `stats()` says of thresholds and partitions."""

import pytest
import torch

from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.engine.stats import BucketStats
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks

NUMEL = 20_000
ARGUMENTS = {"hard_threshold": {"threshold": 2.5}}


def stats_of_rank_0(name: str, steps: int = 3) -> tuple[BucketStats, list[float]]:
    """After some steps of noise; and the smallest magnitude that was applied in the last one."""
    method = METHODS[name](density=0.01, **ARGUMENTS.get(name, {})).make()
    assert isinstance(method, Method)

    def worker(transport: Transport) -> tuple[BucketStats, list[float]]:
        engine = Engine(method)
        engine.connect(transport)
        engine.scale = 1.0
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(steps):
            gradient = torch.randn(NUMEL, generator=generator)
            engine.submit(TensorSpec("w", (NUMEL,), "torch.float32"), gradient)
            applied = engine.result("w").clone()
        stats = engine.stats().buckets[0]
        engine.disconnect()
        return stats, applied[applied != 0].abs().tolist()

    return run_ranks(3, worker, timeout_s=60.0)[0]


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"randomk"}))
def test_every_method_that_has_a_threshold_shows_it(name: str) -> None:
    stats, _ = stats_of_rank_0(name)
    assert 1.5 < stats.threshold < 10.0  # of 200 out of 20,000 normal deviates, or of their sums


def test_a_random_choice_has_no_threshold() -> None:
    assert stats_of_rank_0("randomk")[0].threshold == 0.0


def test_exdyna_shows_what_each_partition_selected() -> None:
    stats, applied = stats_of_rank_0("exdyna")
    assert len(stats.partition_nnz) == 3
    assert sum(stats.partition_nnz) == len(applied) == stats.history[-1].nnz_applied
    assert stats.imbalance == 3 * max(stats.partition_nnz) / len(applied)
    assert 1.0 <= stats.imbalance < 2.0


def test_without_partitions_there_is_no_balance() -> None:
    stats, _ = stats_of_rank_0("oktopk")
    assert (stats.partition_nnz, stats.imbalance) == ((), 0.0)
