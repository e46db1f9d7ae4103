"""A full disk ends the recording, but no training: the weights are the same, bit for bit."""

from __future__ import annotations

import warnings

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import hvd_sparse
from tests.ranks import Ranks, World, with_ranks


def trained(record: str | None) -> Tensor:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    compression = hvd_sparse.Compression.topk(
        model.named_parameters(), density=0.1, dense_below=16, record=record
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(70):  # past the first comparison of the ranks
        optimizer.zero_grad()
        model(torch.randn(8, 32, generator=generator)).square().mean().backward()
        optimizer.step()
    compression.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same_weights_on_a_full_disk() -> None:
    plain = trained(None)
    for record, failing_ranks in (("/dev/full", {0}), ("/dev/full/{rank}/run.jsonl", {0, 1})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(trained(record), plain)
        off = [str(w.message) for w in caught if "is off from step 1 on" in str(w.message)]
        assert len(off) == (hvd.rank() in failing_ranks), off


@with_ranks(World(2))
def test_a_full_disk_under_horovodrun(ranks: Ranks) -> None:
    ranks.run(same_weights_on_a_full_disk)
