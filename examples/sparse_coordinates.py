"""Logistic regression by stochastic coordinate descent, with sparse updates.

    horovodrun -np 2 python examples/sparse_coordinates.py
    horovodrun -np 4 python examples/sparse_coordinates.py --exchange both
    horovodrun -np 4 python examples/sparse_coordinates.py --data url_combined.svm

Source: Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning"
(SC '19), section 8.2; the steps are those of Richtárik and Takáč, "Distributed Coordinate Descent
Method for Learning with Big Data" (2013).

Every worker has all samples and a slice of the weights. In each iteration it takes a step in each
of 100 random coordinates of its slice, and `hvd_sparse.sparse_allgather` sends all workers' steps
to all. `--exchange dense` gathers the whole slices with `hvd.allgather`. `--exchange both` runs one
after the other and compares. The samples are those of sparse_linear.py.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import horovod.torch as hvd
import torch
from sparse_linear import (  # type: ignore[import-not-found]  # stands beside this file
    DIMENSION,
    LinearModel,
    Result,
    Samples,
    compare_weights,
    fail,
    load,
    logistic,
    table,
)
from torch import Tensor

import hvd_sparse


class Columns:
    """The samples column by column, each entry multiplied by its sample's label.

    Attributes:
        curvature: (dimension,), a bound on the loss's second derivative in every coordinate.
        filled: Columns with entries; the loss does not depend on the others.
    """

    def __init__(self, samples: Samples) -> None:
        rows = torch.arange(len(samples.labels))
        place, columns, values = samples.take(rows)
        order = columns.argsort(stable=True)
        counts = torch.bincount(columns, minlength=samples.dimension)
        self.starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.rows = place[order]
        self.values = (values * samples.labels[place])[order]
        self.filled = counts.nonzero().flatten()
        squares = torch.zeros(samples.dimension).index_add_(0, columns, values.square())
        self.curvature = squares / (4 * len(rows))
        self.longest_row = int((samples.starts[1:] - samples.starts[:-1]).max())

    def take(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entries of some columns: position of the column, row and value."""
        lengths = self.starts[columns + 1] - self.starts[columns]
        place = torch.repeat_interleave(torch.arange(len(columns)), lengths)
        shift = self.starts[columns] - lengths.cumsum(0) + lengths
        entries = torch.arange(len(place)) + shift[place]
        return place, self.rows[entries], self.values[entries]


class Descent:
    """The weights and every sample's margin: its label times its prediction.

    Args:
        samples: All samples.
        decay: λ; the objective is the mean loss and λ/2 times the weights' squares.
        damping: Divisor of a step, because other steps are taken at the same time.
    """

    def __init__(self, samples: Samples, decay: float, damping: float, columns: Columns) -> None:
        self.columns, self.decay, self.damping = columns, decay, damping
        self.weights = torch.zeros(samples.dimension)
        self.margins = torch.zeros(len(samples.labels))

    def objective(self) -> float:
        losses, _ = logistic(self.margins)
        return float(losses.mean() + self.decay / 2 * self.weights.square().sum())

    def steps(self, coordinates: Tensor) -> Tensor:
        """The step in each coordinate that minimises a bound on the objective."""
        place, rows, values = self.columns.take(coordinates)
        slopes = logistic(self.margins[rows])[1] * values / len(self.margins)
        gradient = self.decay * self.weights[coordinates]
        gradient.index_add_(0, place, slopes)
        return -gradient / (self.damping * (self.columns.curvature[coordinates] + self.decay))

    def go(self, coordinates: Tensor, steps: Tensor) -> None:
        self.weights[coordinates] += steps
        place, rows, values = self.columns.take(coordinates)
        self.margins.index_add_(0, rows, steps[place] * values)


def damping_of(longest_row: int, drawn: int, slice_numel: int, workers: int) -> float:
    """β of Richtárik and Takáč, if a sample has at most this many entries.

    With it the objective falls in expectation, although the steps are independent.
    """
    if slice_numel < 2:
        return float(longest_row)
    within = (drawn - 1) * (longest_row - 1) / (slice_numel - 1)
    between = drawn / slice_numel - (drawn - 1) / (slice_numel - 1)
    return 1 + within + between * (workers - 1) / workers * longest_row


class SparseExchange:
    """Gathers only the steps, as sparse vectors."""

    def __init__(self) -> None:
        self.entries = 0

    def go(self, descent: Descent, mine: slice, coordinates: Tensor, steps: Tensor) -> None:
        self.entries += len(coordinates)
        update = torch.sparse_coo_tensor(
            coordinates.view(1, -1), steps, descent.weights.shape, check_invariants=False
        ).coalesce()
        # hvd_sparse: every worker gets all workers' steps, in the order of the workers.
        for part in hvd_sparse.sparse_allgather(update):
            descent.go(part.indices()[0], part.values())


class DenseExchange:
    """Gathers the whole slices with `hvd.allgather`."""

    def __init__(self) -> None:
        self.entries = 0

    def go(self, descent: Descent, mine: slice, coordinates: Tensor, steps: Tensor) -> None:
        own = descent.weights[mine].clone()
        own[coordinates - mine.start] += steps
        self.entries += len(own)
        # Horovod: every worker gets all workers' slices.
        weights = hvd.allgather(own, name="weights")
        changed = (weights != descent.weights).nonzero().flatten()
        descent.go(changed, weights[changed] - descent.weights[changed])
        descent.weights = weights


def train(name: str, training: Samples, testing: Samples, args: argparse.Namespace) -> Result:
    rank, size = hvd.rank(), hvd.size()
    columns = Columns(training)
    # Horovod: each worker has a slice of the weights; lengths differ by at most one.
    bounds = [training.dimension * r // size for r in range(size + 1)]
    mine = slice(bounds[rank], bounds[rank + 1])
    counts = [
        int(((columns.filled >= low) & (columns.filled < high)).sum())
        for low, high in pairwise(bounds)
    ]
    if min(counts) == 0:
        raise ValueError(f"worker {counts.index(0)} has no feature in its slice")
    own = columns.filled[(columns.filled >= mine.start) & (columns.filled < mine.stop)]
    drawn = min(args.coordinates, *counts)
    damping = damping_of(columns.longest_row, drawn, min(counts), size)
    descent = Descent(training, args.decay, damping, columns)
    exchange = SparseExchange() if name == "sparse" else DenseExchange()
    generator = torch.Generator().manual_seed(args.seed + rank)
    iterations = args.iterations or max(counts) // drawn
    result = Result(name, [], [], 0.0, 0.0, 0.0, LinearModel(training.dimension))
    exchange.go(descent, mine, own[:0], torch.zeros(0))  # connects
    exchange.entries = 0
    for epoch in range(1, args.epochs + 1):
        hvd.barrier()
        started, exchange_s = time.perf_counter(), 0.0
        for iteration in range(iterations):
            if iteration % (len(own) // drawn) == 0:
                order = own[torch.randperm(len(own), generator=generator)]
            first = iteration % (len(own) // drawn) * drawn
            coordinates = order[first : first + drawn].sort().values
            steps = descent.steps(coordinates)
            before = time.perf_counter()
            exchange.go(descent, mine, coordinates, steps)
            exchange_s += time.perf_counter() - before
        result.epoch_s.append(time.perf_counter() - started)
        result.exchange_s.append(exchange_s)
        result.loss = descent.objective()
        if rank == 0:
            print(f"{name}, epoch {epoch}: objective {result.loss:.6f}", flush=True)
    result.entries_per_step = exchange.entries / (iterations * args.epochs)
    result.model.v = descent.weights
    margins, _ = result.model.margins(testing, torch.arange(len(testing.labels)))
    result.accuracy = float((margins > 0).float().mean())  # every worker has all samples
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Coordinate descent, distributed by Horovod")
    parser.add_argument("--exchange", choices=["sparse", "dense", "both"], default="sparse")
    parser.add_argument("--coordinates", type=int, default=100, help="per worker and iteration")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--iterations", type=int, help="of an epoch; default: all coordinates once")
    parser.add_argument("--decay", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--data", type=Path, help="a file in LIBSVM's format, with two labels")
    parser.add_argument("--dimension", type=int, help=f"default: the file's, or {DIMENSION}")
    parser.add_argument("--metrics", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    for name in ("coordinates", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.iterations is not None and args.iterations < 1:
        parser.error("--iterations must be at least 1")
    if not args.decay > 0:
        parser.error("--decay must be above 0")
    if args.dimension is not None and not 1 <= args.dimension < 2**31:
        parser.error(f"--dimension must be in [1, 2**31), got {args.dimension}")
    return args


def main() -> None:
    args = parse_arguments()
    # Horovod: initialize library.
    hvd.init()
    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(1)
    training, testing = load(args, 0, 1)
    names = ["sparse", "dense"] if args.exchange == "both" else [args.exchange]
    results = [train(name, training, testing, args) for name in names]
    if len(results) == 2:
        compare_weights(results[0].model, results[1].model)
    # Horovod: print and write on the first worker only.
    if hvd.rank() == 0:
        print(f"coordinate descent, {hvd.size()} workers, {training.dimension:,} features")
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
