"""Train a small network on scikit-learn's handwritten digits, with dense or sparse gradients.

    horovodrun -np 2 python examples/pytorch_digits.py
    horovodrun -np 2 python examples/pytorch_digits.py --compression "topk density=0.01"
    horovodrun -np 2 python examples/pytorch_digits.py --compression "oktopk density=0.01"

Only DistributedOptimizer's argument `compression` differs from a script for plain Horovod.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvd_sparse

SAMPLES, TRAIN_SAMPLES, PIXELS = 1797, 1437, 64


class Net(nn.Module):
    """Two convolutions and two dense layers with 1,053,826 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(64 * 4 * 4, 1000)
        self.fc2 = nn.Linear(1000, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def fail(message: object, *, on_every_worker: bool = False) -> NoReturn:
    """Exit with one line, printed by the first worker if all fail alike."""
    rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    if on_every_worker or rank == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    # Training settings
    parser = Parser(description="PyTorch digits example")
    parser.add_argument("--batch-size", type=int, default=32, help="per worker (default: 32)")
    parser.add_argument("--test-batch-size", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01, help="per worker (default: 0.01)")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=0, help="steps between loss lines")
    parser.add_argument("--data-dir", type=Path, help="folder with digits.csv.gz")
    parser.add_argument(
        "--compression",
        default="none",
        help='"none", or "topk" or "oktopk" with arguments: "topk density=0.01 collective=oktopk"',
    )
    parser.add_argument("--metrics", type=Path, help="write every step's figures to this file")
    args = parser.parse_args(arguments)
    for name in ("batch_size", "test_batch_size", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.lr <= 0 or not 0 <= args.momentum < 1:
        parser.error("--lr must be above 0, and --momentum in [0, 1)")
    if args.metrics is not None and not args.metrics.parent.is_dir():
        parser.error(f"--metrics: no such directory: {args.metrics.parent}")
    return args


def parse_compression(policy: str) -> tuple[str, dict[str, Any]]:
    """Split "topk density=0.01" into a constructor's name and its arguments."""
    name, *words = policy.split() or [""]
    if name not in {"none", "topk", "oktopk"}:
        fail(f"--compression must begin with none, topk or oktopk, got {policy!r}")
    constructor = getattr(hvd_sparse.Compression, name) if name != "none" else None
    parameters = inspect.signature(constructor).parameters if constructor else {}
    known = [key for key in parameters if key != "named_parameters"]
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            expected = ", ".join(known) or "none"
            fail(f"--compression {name}: unknown argument {word!r}; arguments are: {expected}")
        arguments[key] = number_or_text(value)
    return name, arguments


def number_or_text(value: str) -> int | float | str:
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            pass
    return value


def make_compression(name: str, arguments: dict[str, Any], model: nn.Module) -> Any:
    if name == "none":
        return hvd.Compression.none
    try:
        constructor = getattr(hvd_sparse.Compression, name)
        return constructor(model.named_parameters(), **arguments)
    except hvd_sparse.errors.ConfigError as error:
        fail(f"--compression {name}: {error}")


def load_digits(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Load scikit-learn's 1,797 digits: 8 x 8 pixels from 0 to 16, and labels."""
    if data_dir is None:
        found = importlib.util.find_spec("sklearn")
        if found is None or found.origin is None:
            fail("the digits come with scikit-learn: pip install scikit-learn, or give --data-dir")
        data_dir = Path(found.origin).parent / "datasets" / "data"
    if not data_dir.is_dir():
        fail(f"--data-dir: no such directory: {data_dir}")
    path = data_dir / "digits.csv.gz"
    if not path.is_file():
        fail(f"--data-dir: no digits.csv.gz in {data_dir}")
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    except (OSError, ValueError) as error:
        fail(f"cannot read {path}: {error}")
    if table.shape != (SAMPLES, PIXELS + 1):
        fail(f"{path} must hold {SAMPLES} lines of {PIXELS + 1} numbers, got {table.shape}")
    # The file is ordered by writer: shuffle before splitting, equally on every worker.
    rows = torch.from_numpy(table)[
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))
    ]
    images, labels = rows[:, :PIXELS].reshape(-1, 1, 8, 8) / 16, rows[:, PIXELS].long()
    return (
        TensorDataset(images[:TRAIN_SAMPLES], labels[:TRAIN_SAMPLES]),
        TensorDataset(images[TRAIN_SAMPLES:], labels[TRAIN_SAMPLES:]),
    )


class Traffic:
    """Bytes that this worker sends for gradients.

    hvd_sparse counts its own bytes. Horovod does not tell its own, so they are computed as those
    of a ring allreduce: 2 (P - 1) / P times the gradients' bytes.
    """

    def __init__(self, model: nn.Module, compression: Any) -> None:
        self.numel = sum(p.numel() for p in model.parameters())
        self.stats = getattr(compression, "stats", None)
        self.steps, self.sparse_bytes = 0, 0

    def step(self) -> float:
        """Bytes of the last step."""
        self.steps += 1
        dense_numel, sent_bytes = self.numel, 0
        if self.stats is not None:
            stats = self.stats()
            # Horovod still reduces small tensors, and two numbers for each of the others.
            dense_numel += sum(2 * len(b.names) - b.numel for b in stats.buckets)
            total = stats.totals.bytes_sent
            sent_bytes, self.sparse_bytes = total - self.sparse_bytes, total
        return float(sent_bytes + 2 * (hvd.size() - 1) / hvd.size() * 4 * dense_numel)


def mean_over_workers(values: list[float], name: str) -> list[float]:
    averaged: list[float] = hvd.allreduce(
        torch.tensor(values, dtype=torch.float64), name=name
    ).tolist()
    return averaged


def test(model: nn.Module, loader: DataLoader[Any], device: torch.device) -> tuple[float, float]:
    """Loss and accuracy over all workers' shares of the test set."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            sums[0] += F.nll_loss(output, target, reduction="sum").item()
            sums[1] += (output.argmax(1) == target).sum().item()
            sums[2] += len(target)
    # Horovod: add up the sums of all workers.
    loss, correct, count = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
    return loss / count, correct / count


def main() -> None:
    args = parse_arguments()
    name, arguments = parse_compression(args.compression)
    train_dataset, test_dataset = load_digits(args.data_dir)

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

    # Horovod: use DistributedSampler to partition the training data.
    train_sampler: DistributedSampler[Any] = DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
    )
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    # Horovod: use DistributedSampler to partition the test data.
    test_sampler: DistributedSampler[Any] = DistributedSampler(
        test_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    test_loader = DataLoader(test_dataset, batch_size=args.test_batch_size, sampler=test_sampler)

    model = Net().to(device)

    # Horovod: scale learning rate by the number of workers.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)

    # Horovod: broadcast optimizer state & parameters. The first may run a step to create state.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    # Horovod: (optional) compression algorithm.
    compression = make_compression(name, arguments, model)

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    traffic = Traffic(model, compression)
    losses: list[float] = []
    step_s: list[float] = []
    step_bytes: list[float] = []
    bar = tqdm(
        total=args.epochs * len(train_loader),
        desc=f"{name}, {hvd.size()} workers",
        unit="step",
        mininterval=0.5,
        ncols=90,
        disable=hvd.rank() != 0,
    )
    for epoch in range(1, args.epochs + 1):
        model.train()
        # Horovod: set epoch to sampler for shuffling.
        train_sampler.set_epoch(epoch)
        for batch_index, (data, target) in enumerate(train_loader):
            started = time.perf_counter()
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step_s.append(time.perf_counter() - started)
            step_bytes.append(traffic.step())
            bar.update()
            if args.log_interval and batch_index % args.log_interval == 0 and hvd.rank() == 0:
                where = f"[{batch_index}/{len(train_loader)}]"
                bar.write(f"Train Epoch: {epoch} {where}\tLoss: {losses[-1]:.6f}")
    bar.close()

    test_loss, accuracy = test(model, test_loader, device)
    figures = {
        "loss": mean_over_workers(losses, "losses"),
        "step_s": mean_over_workers(step_s, "step_s"),
        "step_bytes": mean_over_workers(step_bytes, "step_bytes"),
    }
    if name != "none":
        compression.close()
    # Horovod: print and write on the first worker only.
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {test_loss:.4f}, Accuracy: {accuracy:.2%}", flush=True)
        if args.metrics is not None:
            summary = {
                "compression": args.compression,
                "world_size": hvd.size(),
                "numel": traffic.numel,
                "test_loss": test_loss,
                "test_accuracy": accuracy,
                **figures,
            }
            args.metrics.write_text(json.dumps(summary))
    hvd.shutdown()


if __name__ == "__main__":
    try:
        main()
    except (OSError, HorovodInternalError, hvd_sparse.errors.HvdSparseError) as error:
        fail(error, on_every_worker=True)
