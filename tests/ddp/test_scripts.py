"""Scripts mean the same under DDP as under Horovod's optimizer: what plain DDP makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

import hvd_sparse
from tests import scripts
from tests.ranks import Ranks, World, with_ranks
from tests.scripts import SCRIPTS


class Loss(nn.Module):
    """Of which it is told the gradients."""

    def __init__(self, training: scripts.Training) -> None:
        super().__init__()
        self.values = nn.ParameterList(training.parameters)
        self._loss = training.loss

    def forward(self, gradients: dict[int, Tensor]) -> Tensor:
        return self._loss(gradients)


class Training(scripts.Training):
    """By DDP, which has reduced all gradients at the end of a pass."""

    def __init__(self, density: float | None) -> None:
        super().__init__(density)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        loss = Loss(self)
        self.inner = self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        self.loss = DistributedDataParallel(loss, find_unused_parameters=True)
        if self.compression is not None:
            hvd_sparse.ddp.register(self.loss, self.compression)

    @override
    def reduce(self) -> None:
        pass

    @override
    def apply(self, closure: Callable[[], float] | None = None) -> None:
        self.optimizer.step(closure)

    @override
    def mean(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor / self.size


def balance(name: str) -> None:
    scripts.balance(SCRIPTS[name], Training)


@with_ranks(World(2, "torchrun"))
@pytest.mark.parametrize("name", SCRIPTS)
def test_books_balance(ranks: Ranks, name: str) -> None:
    ranks.run(balance, name)
