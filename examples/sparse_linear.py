"""Logistic regression and a linear SVM by SGD on naturally sparse data, with sparse gradients.

    horovodrun -np 2 python examples/sparse_linear.py
    horovodrun -np 4 python examples/sparse_linear.py --loss hinge --exchange both
    horovodrun -np 4 python examples/sparse_linear.py --data url_combined.svm

A sample has few features, so a batch's gradient is sparse by itself. Nothing is selected or lost:
`hvd_sparse.sparse_allreduce` sums the entries. `--exchange dense` sums the same gradients with
`hvd.allreduce`. `--exchange both` runs one after the other and compares.

Without `--data`, the samples are pieces of Python's standard library, documentation (+1) and code
(-1), as trigrams of characters and of words.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor

import hvd_sparse

DIMENSION = 3_231_961  # of the URL data set in SparCML's measurements
PIECE_CHARACTERS = 400
EVERY_TESTED = 5  # one of this many samples is for the test


Row = tuple[np.ndarray, np.ndarray]  # columns and values


@dataclass(frozen=True)
class Samples:
    """The rows of a sparse matrix and their labels, +1 or -1."""

    starts: Tensor  # int64 (rows + 1,): where each row begins in the next two
    columns: Tensor  # int64 (nnz,)
    values: Tensor  # float32 (nnz,)
    labels: Tensor  # float32 (rows,)
    dimension: int

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entries of some rows: position in `rows`, column and value."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        place = torch.repeat_interleave(torch.arange(len(rows)), lengths)
        shift = self.starts[rows] - lengths.cumsum(0) + lengths
        entries = torch.arange(len(place)) + shift[place]
        return place, self.columns[entries], self.values[entries]


def samples_of(rows: list[Row], labels: list[float], dimension: int) -> Samples:
    """Make samples of rows of columns and values, each scaled to length 1."""
    scaled = [values / max(1e-12, float(np.linalg.norm(values))) for _, values in rows]
    starts = np.cumsum([0, *(len(values) for values in scaled)])
    columns = np.concatenate([c for c, _ in rows]) if rows else np.zeros(0)
    values = np.concatenate(scaled) if rows else np.zeros(0)
    return Samples(
        torch.from_numpy(starts),
        torch.from_numpy(columns.astype(np.int64)),
        torch.from_numpy(values.astype(np.float32)),
        torch.tensor(labels, dtype=torch.float32),
        dimension,
    )


def fail(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


# -- data ------------------------------------------------------------------------------------------


def read_libsvm(path: Path, rank: int, size: int) -> tuple[list[Row], list[float]]:
    """Read this worker's rows of a file with lines `label index:value …`, indices from 1."""
    rows: list[Row] = []
    labels: list[float] = []
    seen: set[float] = set()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            words = line.split("#")[0].split()
            if not words:
                continue
            try:
                label = float(words[0])
                seen.add(label)
                labels.append(label)
                if (len(labels) - 1) % size == rank:
                    pairs = [word.split(":") for word in words[1:]]
                    columns = np.array([int(index) - 1 for index, _ in pairs], dtype=np.int64)
                    values = np.array([float(value) for _, value in pairs], dtype=np.float32)
                    if len(columns) and columns.min() < 0:
                        raise ValueError("indices begin at 1")
                    rows.append((columns, values))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if len(seen) != 2:
        raise ValueError(f"{path} must have two labels, got {sorted(seen)}")
    return rows, [1.0 if label == max(seen) else -1.0 for label in labels[rank::size]]


def python_texts() -> Iterator[tuple[float, str]]:
    """Pieces of the standard library: documentation is +1, code is -1."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        lines, documentation = source.splitlines(), []
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                ast.get_docstring(node) is not None
            ):
                first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
                documentation += lines[first - 1 : last]
                lines[first - 1 : last] = [""] * (last - first + 1)
        for label, text in ((1.0, documentation), (-1.0, lines)):
            # Layout and quotes would give the answer away.
            words = " ".join(text).replace('"', " ").replace("'", " ").split()
            joined = " ".join(words).lower()
            for start in range(0, len(joined) - PIECE_CHARACTERS, PIECE_CHARACTERS):
                yield label, joined[start : start + PIECE_CHARACTERS]


def trigrams(text: str, dimension: int) -> Row:
    """Columns and counts of a text's hashed trigrams of characters and of words."""
    characters = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint64)
    words = np.array([zlib.crc32(word.encode()) for word in text.split()], dtype=np.uint64)
    mixed = [
        (kind + a[:-2] + (a[1:-1] << np.uint64(8)) + (a[2:] << np.uint64(16)))
        * np.uint64(0x9E3779B97F4A7C15)
        for kind, a in ((np.uint64(1 << 40), characters), (np.uint64(1 << 41), words))
    ]
    hashed = (np.concatenate(mixed) >> np.uint64(32)) * np.uint64(dimension) >> np.uint64(32)
    columns, counts = np.unique(hashed, return_counts=True)
    return columns, np.sqrt(counts)


def load(args: argparse.Namespace, rank: int, size: int) -> tuple[Samples, Samples]:
    """Load one of `size` shares of the samples, for training and for the test."""
    if args.data is not None:
        rows, labels = read_libsvm(args.data, rank, size)
        largest = max((int(columns.max()) + 1 for columns, _ in rows if len(columns)), default=1)
        # Horovod: the largest index of all workers' samples.
        largest = int(hvd.allreduce(torch.tensor(largest), op=hvd.Max, name="dimension"))
        dimension = args.dimension or largest
        if dimension < largest:
            raise ValueError(f"--dimension must be at least {largest}, got {dimension}")
    else:
        dimension = args.dimension or DIMENSION
        texts = list(python_texts())
        order = np.random.default_rng(0).permutation(len(texts))  # the same on all workers
        mine = [texts[i] for i in order[rank::size]]
        rows = [trigrams(text, dimension) for _, text in mine]
        labels = [label for label, _ in mine]
    if len(rows) < 2 * EVERY_TESTED:
        raise ValueError(f"worker {rank} has {len(rows)} samples, too few to train and test")
    split: list[Samples] = []
    for tested in (False, True):
        chosen = [i for i in range(len(rows)) if (i % EVERY_TESTED == 0) == tested]
        split.append(samples_of([rows[i] for i in chosen], [labels[i] for i in chosen], dimension))
    return split[0], split[1]


# -- training --------------------------------------------------------------------------------------


def logistic(margins: Tensor) -> tuple[Tensor, Tensor]:
    """Loss log(1 + exp(-m)) of every margin, and its derivative."""
    return torch.nn.functional.softplus(-margins), -torch.sigmoid(-margins)


def hinge(margins: Tensor) -> tuple[Tensor, Tensor]:
    """Loss max(0, 1 - m) of every margin, and its derivative."""
    return (1 - margins).clamp(min=0), -(margins < 1).float()


LOSSES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "logistic": logistic,
    "hinge": hinge,
}


class LinearModel:
    """Weights `scale * v`, so that weight decay is free and keeps the gradient sparse."""

    def __init__(self, dimension: int) -> None:
        self.v = torch.zeros(dimension)
        self.scale = 1.0

    def margins(self, samples: Samples, rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Label times prediction of every row, and the rows' entries."""
        place, columns, values = entries = samples.take(rows)
        products = self.v[columns] * values * self.scale
        predictions = torch.zeros(len(rows)).index_add_(0, place, products)
        return predictions * samples.labels[rows], entries

    def step(self, columns: Tensor | slice, gradient: Tensor, lr: float, decay: float) -> None:
        self.scale *= 1 - lr * decay
        self.v[columns] -= (lr / self.scale) * gradient


class SparseExchange:
    """Sums only the columns with entries."""

    def __init__(self) -> None:
        self.entries = 0

    def sum(self, columns: Tensor, values: Tensor, dimension: int) -> tuple[Tensor | slice, Tensor]:
        unique, place = torch.unique(columns, return_inverse=True)
        own = torch.zeros(len(unique)).index_add_(0, place, values)
        self.entries += len(unique)
        gradient = torch.sparse_coo_tensor(
            unique.view(1, -1), own, (dimension,), is_coalesced=True, check_invariants=False
        )
        # hvd_sparse: sum the workers' sparse gradients.
        total = hvd_sparse.sparse_allreduce(gradient)
        return total.indices()[0], total.values()


class DenseExchange:
    """Sums all columns with `hvd.allreduce`."""

    def __init__(self) -> None:
        self.entries = 0
        self.gradient = torch.zeros(0)

    def sum(self, columns: Tensor, values: Tensor, dimension: int) -> tuple[Tensor | slice, Tensor]:
        if len(self.gradient) != dimension:
            self.gradient = torch.zeros(dimension)
        self.entries += dimension
        self.gradient.zero_().index_add_(0, columns, values)
        # Horovod: sum the workers' gradients.
        hvd.allreduce_(self.gradient, op=hvd.Sum, name="gradient")
        return slice(None), self.gradient


@dataclass
class Result:
    """The figures of one training."""

    exchange: str
    epoch_s: list[float]
    exchange_s: list[float]
    entries_per_step: float
    loss: float
    accuracy: float
    model: LinearModel


def train(
    exchange_name: str, training: Samples, testing: Samples, args: argparse.Namespace
) -> Result:
    model = LinearModel(training.dimension)
    exchange = SparseExchange() if exchange_name == "sparse" else DenseExchange()
    loss_of = LOSSES[args.loss]
    # Horovod: scale the learning rate by the number of workers.
    lr = args.lr * hvd.size()
    shortest = torch.tensor(len(training.labels))
    # Horovod: all workers run as many steps as the worker with the fewest samples.
    steps = int(hvd.allreduce(shortest, op=hvd.Min, name="steps")) // args.batch_size
    if steps == 0:
        raise ValueError(f"--batch-size must be at most {len(training.labels)}")
    generator = torch.Generator().manual_seed(args.seed + hvd.rank())
    result = Result(exchange_name, [], [], 0.0, 0.0, 0.0, model)
    nothing = torch.zeros(0)
    exchange.sum(nothing.long(), nothing, training.dimension)  # connects
    exchange.entries = 0
    for epoch in range(1, args.epochs + 1):
        order = torch.randperm(len(training.labels), generator=generator)
        hvd.barrier()
        started, exchange_s, loss_sum = time.perf_counter(), 0.0, 0.0
        for step in range(steps):
            rows = order[step * args.batch_size : (step + 1) * args.batch_size]
            margins, (place, columns, values) = model.margins(training, rows)
            losses, derivatives = loss_of(margins)
            loss_sum += float(losses.mean())
            slopes = derivatives * training.labels[rows] / (len(rows) * hvd.size())
            before = time.perf_counter()
            where, gradient = exchange.sum(columns, slopes[place] * values, training.dimension)
            exchange_s += time.perf_counter() - before
            model.step(where, gradient, lr, args.weight_decay)
            if args.log_interval and step % args.log_interval == 0 and hvd.rank() == 0:
                print(f"Train Epoch: {epoch} [{step}/{steps}]\tLoss: {losses.mean():.6f}")
        result.epoch_s.append(time.perf_counter() - started)
        result.exchange_s.append(exchange_s)
        result.loss = loss_sum / steps
    result.entries_per_step = exchange.entries / (steps * args.epochs)
    margins, _ = model.margins(testing, torch.arange(len(testing.labels)))
    counts = torch.tensor([float((margins > 0).sum()), float(len(margins))], dtype=torch.float64)
    # Horovod: add up the counts of all workers.
    correct, count = hvd.allreduce(counts, op=hvd.Sum, name="test").tolist()
    result.accuracy = correct / count
    return result


def table(results: list[Result], dimension: int) -> str:
    lines = ["exchange  s per epoch  of it exchanging  entries sent per step  accuracy"]
    for r in results:
        share = f"{r.entries_per_step:,.0f} ({r.entries_per_step / dimension:.3%})"
        lines.append(
            f"{r.exchange:8}  {min(r.epoch_s):11.3f}  {min(r.exchange_s):16.3f}  {share:>21}  "
            f"{r.accuracy:8.2%}"
        )
    if len(results) == 2:
        sparse, dense = results
        lines.append(f"An epoch is {min(dense.epoch_s) / min(sparse.epoch_s):.1f} times as fast.")
    return "\n".join(lines)


def compare_weights(one: LinearModel, other: LinearModel) -> None:
    """Check that both trainings have the same weights, except for rounding."""
    difference = float((one.v * one.scale - other.v * other.scale).abs().max())
    largest = float((other.v * other.scale).abs().max())
    if difference > 1e-3 * largest:
        fail(f"the weights differ by {difference:g}, with {largest:g} the largest")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sparse linear models, distributed by Horovod")
    parser.add_argument("--loss", choices=sorted(LOSSES), default="logistic")
    parser.add_argument("--exchange", choices=["sparse", "dense", "both"], default="sparse")
    parser.add_argument("--batch-size", type=int, default=100, help="per worker (default: 100)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2.0, help="per worker (default: 2.0)")
    parser.add_argument("--weight-decay", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=0, help="steps between loss lines")
    parser.add_argument("--data", type=Path, help="a file in LIBSVM's format, with two labels")
    parser.add_argument("--dimension", type=int, help=f"default: the file's, or {DIMENSION}")
    parser.add_argument("--metrics", type=Path, help="write the figures to this file")
    args = parser.parse_args(arguments)
    for name in ("batch_size", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.lr <= 0 or not 0 <= args.weight_decay * args.lr < 0.001:
        parser.error("--lr must be above 0, and --weight-decay small against 1 / --lr")
    if args.dimension is not None and not 1 <= args.dimension < 2**31:
        parser.error(f"--dimension must be in [1, 2**31), got {args.dimension}")
    return args


def main() -> None:
    args = parse_arguments()
    # Horovod: initialize library.
    hvd.init()
    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(1)
    training, testing = load(args, hvd.rank(), hvd.size())
    names = ["sparse", "dense"] if args.exchange == "both" else [args.exchange]
    results = [train(name, training, testing, args) for name in names]
    if len(results) == 2:
        compare_weights(results[0].model, results[1].model)
    # Horovod: print and write on the first worker only.
    if hvd.rank() == 0:
        print(f"{args.loss} loss, {hvd.size()} workers, {training.dimension:,} features")
        print(table(results, training.dimension), flush=True)
        if args.metrics is not None:
            figures = {
                r.exchange: {name: value for name, value in vars(r).items() if name != "model"}
                for r in results
            }
            args.metrics.write_text(json.dumps(figures))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, hvd_sparse.errors.HvdSparseError) as error:
        fail(error)
