"""Train a small network on scikit-learn's handwritten digits, while workers join and leave.

    horovodrun -np 2 --min-np 1 \\
        --host-discovery-script examples/launch/discover_hosts.sh \\
        python examples/pytorch_elastic.py

Two arguments differ from a script for plain Horovod: `compression` of DistributedOptimizer, and
of TorchState. Without the second, a restore would bring back the weights without the residuals.
"""

from __future__ import annotations

import argparse
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_sparse


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PyTorch elastic example")
    parser.add_argument("--batch-size", type=int, default=32, help="per worker (default: 32)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01, help="per worker (default: 0.01)")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--batches-per-commit", type=int, default=10)
    return parser.parse_args()


def digits() -> tuple[Tensor, Tensor]:
    """Load the 1,797 digits, 8 x 8 pixels in [0, 1], and labels, in the same order everywhere."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(42)
    images, labels = digits()
    train_set = TensorDataset(images[:1437], labels[:1437])
    # Redistributes the rest of an epoch when the number of workers changes.
    sampler = hvd.elastic.ElasticSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 10))
    compression = hvd_sparse.Compression.topk(model.named_parameters(), density=args.density)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )

    def scale_learning_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while state.epoch < args.epochs:
            for batch, (data, target) in enumerate(loader, 1):
                optimizer.zero_grad()
                F.cross_entropy(model(data), target).backward()
                optimizer.step()
                sampler.record_batch(batch - 1, args.batch_size)
                if batch % args.batches_per_commit == 0:
                    state.commit()
            sampler.set_epoch(state.epoch + 1)
            state.epoch += 1
            state.commit()
            if hvd.rank() == 0:
                correct = accuracy(model, images[1437:], labels[1437:])
                print(f"epoch {state.epoch}, {hvd.size()} workers: accuracy {correct:.3f}")

    state = hvd.elastic.TorchState(
        model, optimizer, compression=compression, sampler=sampler, epoch=0
    )
    state.register_reset_callbacks([scale_learning_rate])
    train(state)
    if hvd.rank() == 0:
        stats = compression.stats()
        print(f"residuals lost with workers that are gone: L1 norm {stats.lost_l1:g}")


if __name__ == "__main__":
    main()
