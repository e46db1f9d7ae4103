"""Train a recommendation model, whose tables get sparse gradients, on any ratings.

    horovodrun -np 2 python examples/pytorch_recommendation.py --compression topk
    horovodrun -np 2 python examples/pytorch_recommendation.py --data ml-latest/ratings.csv \\
        --compression topk --record run.jsonl
    horovodrun -np 2 python examples/pytorch_recommendation.py --tables dense \\
        --compression examples/policies/recommendation.yaml

A batch touches few rows of the tables. With `--tables sparse` their gradients have only those rows,
and `exchange_embeddings` sums them without loss. Under `--compression none` Horovod gathers them,
which costs more with every worker. With `--tables dense` a gradient is as large as its table, and
the compression selects from it.

`--data` has one line `user, item, rating` per rating, separated by commas, tabs or `::`, as in the
files of MovieLens. Without it, users and items are drawn by Zipf's law, and hidden properties of
both decide about a click.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvd_sparse

SEPARATOR = re.compile(r"::|[,\t]")
HIDDEN = 4
EVERY_TESTED = 10  # one of this many ratings is for the test


class Net(nn.Module):
    """A table of users, a table of items, and two layers: 16.1 M parameters by default."""

    def __init__(self, users: int, items: int, width: int, is_sparse: bool) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=is_sparse)
        self.item = nn.Embedding(items, width, sparse=is_sparse)
        self.layers = nn.Sequential(nn.Linear(3 * width, 128), nn.ReLU(), nn.Linear(128, 1))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user, item = self.user(users), self.item(items)
        scores: Tensor = self.layers(torch.cat([user, item, user * item], 1)).squeeze(1)
        return scores


def fail(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_arguments() -> argparse.Namespace:
    # Training settings
    parser = argparse.ArgumentParser(description="PyTorch recommendation example")
    parser.add_argument("--batch-size", type=int, default=512, help="per worker (default: 512)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02, help="of Adagrad (default: 0.02)")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=0, help="steps between loss lines")
    parser.add_argument("--data", type=Path, help="a file of ratings")
    parser.add_argument("--liked", type=float, default=4.0, help="least rating that is a click")
    parser.add_argument("--users", type=int, default=200_000, help="without --data")
    parser.add_argument("--items", type=int, default=50_000, help="without --data")
    parser.add_argument("--ratings", type=int, default=400_000, help="without --data")
    parser.add_argument("--width", type=int, default=64, help="of the tables (default: 64)")
    parser.add_argument("--tables", choices=["sparse", "dense"], default="sparse")
    parser.add_argument("--record", help="write what happens to this file, for `hvd-sparse report`")
    parser.add_argument(
        "--compression",
        default="none",
        help='"none", "fp16", a policy file, or a constructor: "topk density=0.01 wire=float16"',
    )
    args = parser.parse_args()
    for name in ("batch_size", "epochs", "users", "items", "ratings", "width"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.tables == "sparse" and args.compression == "fp16":
        parser.error(
            "--compression fp16 is not for sparse tables: Horovod gathers them as they are"
        )
    return args


Ratings = tuple[Tensor, Tensor, Tensor]
"""Users and items, numbered from 0, and 1.0 for a click; all `(ratings,)`."""


def read_ratings(path: Path, liked: float) -> Ratings:
    """Read a file of ratings; users and items are renumbered in their own order."""
    rows: list[tuple[int, int, float]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                fields = SEPARATOR.split(line.strip())
                if number == 1 and not fields[0].isdigit():
                    continue  # names of the columns
                try:
                    rows.append((int(fields[0]), int(fields[1]), float(fields[2])))
                except (ValueError, IndexError):
                    fail(f"{path}, line {number}: must be user, item and rating, got {line!r}")
    except OSError as error:
        fail(f"--data: {error}")
    if not rows:
        fail(f"--data: {path} has no ratings")
    users, items = (
        torch.unique(torch.tensor([row[column] for row in rows]), return_inverse=True)[1]
        for column in (0, 1)
    )
    return users, items, (torch.tensor([row[2] for row in rows]) >= liked).float()


def zipf(count: int, numel: int, generator: torch.Generator) -> Tensor:
    """Draw numbers below `numel`; the i-th is about 1/i as frequent as the first."""
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    return (numel**draws).long().clamp(1, numel) - 1


def draw_ratings(args: argparse.Namespace) -> Ratings:
    """Draw clicks where hidden properties of user and item agree, the same on all workers."""
    generator = torch.Generator().manual_seed(0)
    users = zipf(args.ratings, args.users, generator)
    items = zipf(args.ratings, args.items, generator)
    of_user = torch.randn(args.users, HIDDEN, generator=generator)
    of_item = torch.randn(args.items, HIDDEN, generator=generator)
    agreement = (of_user[users] * of_item[items]).sum(1)
    noise = 0.5 * torch.randn(args.ratings, generator=generator)
    return users, items, (agreement + noise > 0).float()


def load_ratings(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset, int, int]:
    """Load ratings for training and for the test, and the numbers of users and items."""
    users, items, clicked = (
        read_ratings(args.data, args.liked) if args.data is not None else draw_ratings(args)
    )
    count = len(users)
    if count < 2 * EVERY_TESTED:
        fail(f"{count} ratings are too few to train and test")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    parts = [
        TensorDataset(users[rows], items[rows], clicked[rows])
        for rows in (order[count // EVERY_TESTED :], order[: count // EVERY_TESTED])
    ]
    return parts[0], parts[1], int(users.max()) + 1, int(items.max()) + 1


def make_compression(text: str, model: nn.Module, record: str | None) -> Any:
    """Make what `--compression` names: Horovod's own, a policy, or a constructor's result."""
    name, *words = text.split() or ["none"]
    if name in {"none", "fp16"}:
        return getattr(hvd.Compression, name)
    try:
        if name.endswith((".yaml", ".yml")):
            return hvd_sparse.Compression.from_policy(name, model=model, record=record)
        pairs = (word.partition("=") for word in words)
        arguments = {key: yaml.safe_load(value) for key, _, value in pairs}
        constructor = getattr(hvd_sparse.Compression, name)
        return constructor(model.named_parameters(), record=record, **arguments)
    except (AttributeError, TypeError, OSError, hvd_sparse.errors.ConfigError) as error:
        fail(f"--compression {text!r}: {error}")


def test(model: nn.Module, loader: DataLoader[Any], device: torch.device) -> tuple[float, float]:
    """Loss and accuracy over all workers' shares of the test set."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for users, items, clicked in loader:
            scores = model(users.to(device), items.to(device)).cpu()
            loss = F.binary_cross_entropy_with_logits(scores, clicked, reduction="sum")
            sums += torch.tensor([loss, ((scores > 0) == clicked.bool()).sum(), len(clicked)])
    # Horovod: add up the sums of all workers.
    total, correct, count = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
    return total / count, correct / count


def main() -> None:
    args = parse_arguments()
    train_dataset, test_dataset, users_count, items_count = load_ratings(args)

    # Horovod: initialize library.
    hvd.init()
    torch.manual_seed(args.seed)
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    if use_cuda:
        # Horovod: pin GPU to local rank.
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if use_cuda else "cpu")

    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(1)

    # Horovod: use DistributedSampler to partition the data.
    train_sampler: DistributedSampler[Any] = DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
    )
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler: DistributedSampler[Any] = DistributedSampler(
        test_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    test_loader = DataLoader(test_dataset, batch_size=args.batch_size, sampler=test_sampler)

    model = Net(users_count, items_count, args.width, args.tables == "sparse").to(device)

    # Horovod: scale learning rate by the number of workers, for Adagrad by its root.
    lr = args.lr * math.sqrt(hvd.size())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=lr)

    # Horovod: (optional) compression algorithm.
    compression = make_compression(args.compression, model, args.record)
    if hasattr(compression, "exchange_embeddings"):
        # hvd_sparse: sum the gradients' rows of sparse tables.
        compression.exchange_embeddings(model.named_parameters())

    # Horovod: broadcast optimizer state & parameters. The first may run a step to create state.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    started = time.perf_counter()
    bar = tqdm(
        total=args.epochs * len(train_loader),
        desc=f"{args.compression}, {hvd.size()} workers",
        unit="step",
        mininterval=0.5,
        ncols=90,
        disable=hvd.rank() != 0,
    )
    for epoch in range(1, args.epochs + 1):
        model.train()
        # Horovod: set epoch to sampler for shuffling.
        train_sampler.set_epoch(epoch)
        for batch_index, (users, items, clicked) in enumerate(train_loader):
            optimizer.zero_grad()
            scores = model(users.to(device), items.to(device))
            loss = F.binary_cross_entropy_with_logits(scores, clicked.to(device))
            loss.backward()
            optimizer.step()
            bar.update()
            if args.log_interval and batch_index % args.log_interval == 0 and hvd.rank() == 0:
                where = f"[{batch_index}/{len(train_loader)}]"
                bar.write(f"Train Epoch: {epoch} {where}\tLoss: {loss.item():.6f}")
    bar.close()
    seconds = time.perf_counter() - started

    loss_of_test, accuracy = test(model, test_loader, device)
    # Horovod: print on the first worker only.
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss_of_test:.4f}, Accuracy: {accuracy:.2%}", flush=True)
        print(f"Trained {args.epochs} epochs in {seconds:.1f} s", flush=True)
    if hasattr(compression, "close"):
        compression.close()


if __name__ == "__main__":
    main()
