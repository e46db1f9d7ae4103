"""A model whose gradients a test gives it as whole numbers, under DDP, and its books."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_sparse
from hvd_sparse.adapter import SparseCompressor

SHAPES = {"a": (64, 40), "b": (64, 64), "c": (5, 64), "bias": (64,), "sometimes": (64, 64)}
NEVER = {"never": (40, 50)}


class Given(nn.Module):
    """Its loss is the sum of parameters times gradients."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, transposed: bool) -> None:
        super().__init__()
        zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
        if transposed:
            zeros = {
                name: torch.zeros(z.shape[::-1]).permute(*reversed(range(z.dim())))
                for name, z in zeros.items()
            }
        self.values = nn.ParameterDict({name: nn.Parameter(z) for name, z in zeros.items()})

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        terms = [(self.values[name] * gradient).sum() for name, gradient in gradients.items()]
        return torch.stack(terms).sum()


class Books:
    """What plain DDP would have delivered, beside what has been delivered and what waits.

    Args:
        density: Of the compression.
        compressor: Its constructor.
        arguments: More of the constructor's.
        unit: What gradients are multiples of; of a large one, float16 cannot hold all sums.
        shapes: Of the parameters, by name.
        transposed: Whether their last dimension is the outermost in memory.
        options: Of DDP.
    """

    def __init__(
        self,
        density: float,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        *,
        transposed: bool = False,
        compressor: str = "topk",
        arguments: Mapping[str, Any] = MappingProxyType({}),
        unit: int = 1,
        **options: Any,
    ) -> None:
        self.unit = unit * dist.get_world_size()  # a mean over the ranks then is whole
        self.module = Given(shapes, transposed=transposed)
        self.model = DistributedDataParallel(self.module, **options)
        make = getattr(hvd_sparse.Compression, compressor)
        made = make(density=density, dense_below=100, timeout_s=30.0, **arguments)
        self.compression = hvd_sparse.ddp.register(self.model, made)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.expected = {
            name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()
        }
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def draw(self, *without: str) -> dict[str, Tensor]:
        """Whole numbers that their mean over the ranks leaves whole."""
        return {
            name: torch.randint(-8, 9, p.shape, generator=self._generator).to(p) * self.unit
            for name, p in self.module.values.items()
            if name not in without and p.requires_grad
        }

    def backward(self, *without: str, counts: bool = True) -> None:
        """One pass; its gradients are to be delivered, or not."""
        gradients = self.draw(*without)
        self.model(gradients).backward()
        for name, gradient in gradients.items() if counts else ():
            self.expected[name] += gradient

    def step(self, *, set_to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def check(self) -> None:
        """What was delivered and what waits is what plain DDP would have delivered."""
        state = self.compression.state_dict()
        held, unit = state["residual"], state.get("unit") or 1.0
        assert self.compression.stats().totals.nnz_selected
        for name, expected in self.expected.items():
            waits = held.get(f"values.{name}", torch.zeros(1)).double() / unit
            waits = waits.expand(expected.shape) if waits.numel() == 1 else waits.view_as(expected)
            sums = torch.stack([expected, waits])
            dist.all_reduce(sums)
            due, waiting = sums / dist.get_world_size()
            delivered = -self.module.values[name].detach().double()
            assert torch.equal(due, delivered + waiting), name
        self.compression.close()


@contextmanager
def trained(
    compression: SparseCompressor | None, **options: Any
) -> Iterator[tuple[DistributedDataParallel, nn.Module]]:
    """A small net under DDP, and its module; None: plain DDP."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    model = DistributedDataParallel(module, **options)
    if compression is not None:
        hvd_sparse.ddp.register(model, compression)
    yield model, module
    if compression is not None:
        compression.close()


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(16, 32, generator=generator).to(dtype)
