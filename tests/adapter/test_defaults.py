"""Torch's defaults are the script's: no tensor of this package's depends on them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

import hvd_sparse
from hvd_sparse import Compression
from hvd_sparse.methods import METHODS
from tests.ranks import Ranks, World, with_ranks

PACKAGE = Path(hvd_sparse.__file__).parent
CREATORS = {
    *("tensor", "zeros", "empty", "ones", "full", "arange", "linspace"),
    *("rand", "randn", "randint", "randperm"),
}


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(PACKAGE.rglob("*.py")) if "lab" not in p.relative_to(PACKAGE).parts],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_a_tensor_is_made_with_a_type_and_a_device(path: Path) -> None:
    missing = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr) in {("torch", name) for name in CREATORS}
        and not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
    ]
    assert not missing, "\n".join(missing)


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def train(method: str, label: str) -> Tensor:
    """The weights after some steps, dense and sparse tensors together."""
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    generator = torch.Generator(device="cpu").manual_seed(5)
    parameters = [
        nn.Parameter(torch.randn(n, generator=generator, **like)) for n in (3000, 5000, 20)
    ]
    named = [(f"defaults.{label}.{method}.{i}", p) for i, p in enumerate(parameters)]
    options: dict[str, Any] = {"dense_below": 100}
    options |= {"threshold": 1.0} if method == "hard_threshold" else {"density": 0.02}
    if method == "dgc":
        inner, compression = hvd_sparse.dgc_sgd(named, lr=0.1, **options)
    else:
        inner = torch.optim.SGD(parameters, lr=0.1)
        compression = getattr(Compression, method)(named, **options)
    optimizer: Any = hvd.DistributedOptimizer(
        inner, named_parameters=named, compression=compression
    )
    for step in range(4):
        for p in parameters:
            p.grad = None
        shares = torch.Generator(device="cpu").manual_seed(10 * step + hvd.rank())
        for p in parameters:
            (p * torch.randn(p.shape, generator=shares, **like)).sum().backward()
        optimizer.step()
    compression.state_dict()
    compression.close()
    return torch.cat([p.detach() for p in parameters])


def train_under_defaults(method: str) -> None:
    expected = train(method, "before")
    for dtype, device in ((torch.float64, "meta"), (torch.bfloat16, "cpu")):
        with defaults(dtype, device):
            found = train(method, device)
        assert torch.equal(found, expected), (dtype, device)


@with_ranks(World(2))
@pytest.mark.parametrize("method", METHODS)
def test_training_under_another_default(ranks: Ranks, method: str) -> None:
    ranks.run(train_under_defaults, method)
