"""Train a byte-level LSTM on any text, with dense or sparse gradients.

    horovodrun -np 2 python examples/pytorch_language_model.py
    horovodrun -np 2 python examples/pytorch_language_model.py --compression "topk density=0.01"
    horovodrun -np 2 python examples/pytorch_language_model.py --optimizer adamw \\
        --compression "topk density=0.01 clip_norm=1.0"
    horovodrun -np 2 python examples/pytorch_language_model.py --data a.txt --checkpoint runs/a

With `--optimizer adamw` and a constructor it is `hvd_sparse.sparse_adamw`.

Without `--data` it reads the sources of Python's standard library. With `--checkpoint DIR` it saves
after every epoch, including residuals, and the same command continues from there.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import sysconfig
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

BYTES = 256
TEST_SHARE = 0.05


class Net(nn.Module):
    """An embedding, two LSTM layers and an output layer: 4.5 M parameters at width 512."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.out = nn.Linear(width, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.out(self.lstm(self.embedding(text))[0])
        return scores.transpose(1, 2)


def fail(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_arguments() -> argparse.Namespace:
    # Training settings
    parser = argparse.ArgumentParser(description="PyTorch language model example")
    parser.add_argument("--batch-size", type=int, default=16, help="per worker (default: 16)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    parser.add_argument("--optimizer", choices=("adam", "adamw"), default="adam")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=0, help="steps between loss lines")
    parser.add_argument("--data", type=Path, nargs="+", help="text files")
    parser.add_argument("--most-bytes", type=int, default=4_000_000, help="to read of them")
    parser.add_argument("--length", type=int, default=64, help="bytes of a sample (default: 64)")
    parser.add_argument("--width", type=int, default=512, help="of the LSTM (default: 512)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR")
    parser.add_argument("--record", help="write what happens to this file, for `hvd-sparse report`")
    parser.add_argument(
        "--compression",
        default="none",
        help='"none", "fp16", a policy file, or a constructor: "topk density=0.01 wire=float16"',
    )
    args = parser.parse_args()
    for name in ("batch_size", "epochs", "length", "width", "most_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def load_text(paths: list[Path] | None, most_bytes: int, length: int) -> list[TensorDataset]:
    """Load samples of length + 1 bytes for training and the test: the last 5 % of the text."""
    paths = paths or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray()
    for path in paths:
        try:
            text += path.read_bytes()[: most_bytes - len(text)]
        except OSError as error:
            fail(f"--data: {error}")
    samples = len(text) // (length + 1)
    if samples < 1 / TEST_SHARE:
        fail(f"--data: {len(text)} bytes are too few for samples of {length + 1}")
    rows = torch.frombuffer(text, dtype=torch.uint8)[: samples * (length + 1)].view(samples, -1)
    tests = math.ceil(TEST_SHARE * samples)
    return [TensorDataset(rows[:-tests]), TensorDataset(rows[-tests:])]


def make_compression(
    text: str, model: nn.Module, record: str | None, optimizer: str = "sgd"
) -> Any:
    """Make what `--compression` names: Horovod's own, a policy, or a constructor's result."""
    name, *words = text.split() or ["none"]
    if name in {"none", "fp16"}:
        return getattr(hvd.Compression, name)
    try:
        if name.endswith((".yaml", ".yml")):
            return hvd_sparse.Compression.from_policy(name, model=model, record=record)
        pairs = (word.partition("=") for word in words)
        arguments = {key: yaml.safe_load(value) for key, _, value in pairs}
        if optimizer == "adamw":  # the entries are selected by what AdamW does with them
            arguments = {"dense_steps": 20, "momentum": 0.0, "preconditioned": True, **arguments}
        constructor = getattr(hvd_sparse.Compression, name)
        return constructor(model.named_parameters(), record=record, **arguments)
    except (AttributeError, TypeError, OSError, hvd_sparse.errors.ConfigError) as error:
        fail(f"--compression {text!r}: {error}")


def loss_of(model: nn.Module, rows: Tensor, device: torch.device) -> Tensor:
    """The mean loss over all bytes except the first, in nats."""
    text = rows.to(device).long()
    return F.cross_entropy(model(text[:, :-1]), text[:, 1:])


def test(model: nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """The loss over all workers' shares of the test set."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for (rows,) in loader:
            sums += torch.tensor([len(rows) * loss_of(model, rows, device).item(), len(rows)])
    # Horovod: add up the sums of all workers.
    total, count = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
    return float(total / count)


class Checkpoint:
    """A folder with all that training needs to continue."""

    def __init__(
        self, folder: Path | None, model: nn.Module, optimizer: Any, compression: Any
    ) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.sparse = compression if hasattr(compression, "save_checkpoint") else None

    def save(self, epochs: int) -> None:
        """Save after this many epochs; the earlier checkpoint stands until then."""
        if self.folder is None:
            return
        # Every worker has its own residuals.
        if self.sparse is not None:
            self.sparse.save_checkpoint(self.folder / f"compression-{epochs}")
        if hvd.rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "epochs": epochs}, self.folder / "new.pt")
            (self.folder / "new.pt").replace(self.folder / "model.pt")
        hvd.barrier()
        if hvd.local_rank() == 0:
            shutil.rmtree(self.folder / f"compression-{epochs - 1}", ignore_errors=True)

    def load(self) -> int:
        """Load the last checkpoint; returns the number of finished epochs."""
        if self.folder is None:
            return 0
        epochs, was_sparse, model = 0, False, self.folder / "model.pt"
        if hvd.rank() == 0 and model.exists():
            state = torch.load(model, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            epochs = state["epochs"]
            was_sparse = (self.folder / f"compression-{epochs}").exists()
        # Horovod: the first worker reads the checkpoint and broadcasts it.
        found = hvd.broadcast(torch.tensor([epochs, was_sparse]), root_rank=0, name="found")
        epochs, was_sparse = found[0].item(), bool(found[1])
        if was_sparse and self.sparse is not None:
            self.sparse.load_checkpoint(self.folder / f"compression-{epochs}")
        return int(epochs)


def main() -> None:
    args = parse_arguments()
    train_dataset, test_dataset = load_text(args.data, args.most_bytes, args.length)

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
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed, drop_last=True
    )
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler: DistributedSampler[Any] = DistributedSampler(
        test_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    test_loader = DataLoader(test_dataset, batch_size=args.batch_size, sampler=test_sampler)

    model = Net(args.width).to(device)
    # Uncompressed, SparseAdamW is AdamW.
    optimizer_class = {"adam": torch.optim.Adam, "adamw": hvd_sparse.SparseAdamW}[args.optimizer]
    optimizer: Any = optimizer_class(model.parameters(), lr=args.lr)

    # Horovod: (optional) compression algorithm.
    compression = make_compression(args.compression, model, args.record, args.optimizer)

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    checkpoint = Checkpoint(args.checkpoint, model, optimizer, compression)
    done = checkpoint.load()

    # Horovod: broadcast optimizer state & parameters. The first may run a step to create state.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    started = time.perf_counter()
    bar = tqdm(
        total=(args.epochs - done) * len(train_loader),
        desc=f"{args.compression}, {hvd.size()} workers",
        unit="step",
        mininterval=0.5,
        ncols=90,
        disable=hvd.rank() != 0,
    )
    for epoch in range(done + 1, args.epochs + 1):
        model.train()
        # Horovod: set epoch to sampler for shuffling.
        train_sampler.set_epoch(epoch)
        for batch_index, (rows,) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = loss_of(model, rows, device)
            loss.backward()
            optimizer.step()
            bar.update()
            if args.log_interval and batch_index % args.log_interval == 0 and hvd.rank() == 0:
                where = f"[{batch_index}/{len(train_loader)}]"
                bar.write(f"Train Epoch: {epoch} {where}\tLoss: {loss.item():.6f}")
        checkpoint.save(epoch)
    bar.close()
    seconds = time.perf_counter() - started

    test_loss = test(model, test_loader, device)
    # Horovod: print on the first worker only.
    if hvd.rank() == 0:
        bits = test_loss / math.log(2)
        print(f"Test set: Average loss: {test_loss:.4f} ({bits:.3f} bits per byte)", flush=True)
        print(f"Trained {args.epochs - done} epochs in {seconds:.1f} s", flush=True)
    if hasattr(compression, "close"):
        compression.close()


if __name__ == "__main__":
    main()
