"""Gradients of real trainings, and what compressors make of them.

    python -m benchmarks.gradients                     # the tables of docs/algorithms.md
    python -m benchmarks.gradients --models lstm --densities 0.001

Five small networks are trained by four virtual ranks in one process, each with data of its own;
the gradients of some early and some late steps are kept under build/gradients. Beside them stand
the same magnitudes with nothing of their order: all ranks' values of a step, shuffled together.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.corpus import Vocabulary, python_sources, windows
from benchmarks.models import zipf
from hvd_sparse import ops
from hvd_sparse.accumulator import Accumulator
from hvd_sparse.methods.catalogue import METHODS, ExdynaOptions, GaussiankOptions
from hvd_sparse.methods.method_options import AnyCollectiveOptions, MethodOptions
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport, run_ranks

RANKS, STEPS, KEPT = 4, 40, 4
"""Virtual ranks; steps of a training; kept of them at its beginning and at its end."""
COMPRESSORS: dict[str, Callable[..., MethodOptions]] = {
    **{name: METHODS[name] for name in METHODS if name not in ("hard_threshold", "randomk")},
    "exdyna, as written": partial(ExdynaOptions, as_written=True),
    "gaussiank, fair": partial(GaussiankOptions, least_share=0.75),
}
Network = tuple[nn.Module, Callable[[torch.Generator], Tensor]]
"""A module, and its loss of a batch that a generator draws."""
CACHE = Path(__file__).resolve().parents[1] / "build" / "gradients"


@cache
def tokens() -> Tensor:
    text = python_sources(most_bytes=1_000_000, packages=()).train
    encoded: Tensor = Vocabulary.of(text, 2000).encode(text)
    return encoded


def images() -> Network:
    """Convolutions with batch normalisation, on patches whose stripes tell the class."""
    layers: list[nn.Module] = []
    for i, o in pairwise((3, 32, 64, 128, 128)):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))

    def loss(generator: torch.Generator) -> Tensor:
        labels = torch.randint(10, (8,), generator=generator)
        stripes = (torch.arange(16) * (labels.view(-1, 1) + 1) / 4).sin().view(8, 1, 1, 16)
        noise = torch.randn(8, 3, 16, 16, generator=generator)
        return F.cross_entropy(module(stripes + noise), labels)

    return module, loss


def text(body: nn.Module, tied: bool = False) -> Network:
    """Predicts the next token of a part of the text that is the rank's own."""
    embedding, head = nn.Embedding(2000, 96), nn.Linear(96, 2000)
    nn.init.normal_(embedding.weight, std=0.05)
    if tied:
        head.weight = embedding.weight

    def loss(generator: torch.Generator) -> Tensor:
        part = tokens().tensor_split(RANKS)[generator.initial_seed() % RANKS]
        inputs, targets = windows(part, 4, 24, generator)
        x = body(embedding(inputs))
        scores = head(x[0] if isinstance(x, tuple) else x)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    return nn.ModuleList([embedding, body, head]), loss


class Experts(nn.Module):
    """A token goes through one of eight experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(96, 8)
        sizes = [nn.Sequential(nn.Linear(96, 192), nn.ReLU(), nn.Linear(192, 96)) for _ in range(8)]
        self.experts = nn.ModuleList(sizes)

    def forward(self, x: Tensor) -> Tensor:
        odds = self.router(x).softmax(-1)
        chosen = F.one_hot(odds.argmax(-1), 8) * odds
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        mixed: Tensor = x + (outputs * chosen.unsqueeze(-2)).sum(-1)
        return mixed


def clicks() -> Network:
    """Users and items as dense embeddings, most rows of which have no gradient."""
    user, item = nn.Embedding(8000, 32), nn.Embedding(3000, 32)
    scores = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def loss(generator: torch.Generator) -> Tensor:
        users, items = zipf((256,), 8000, generator), zipf((256,), 3000, generator)
        clicked = ((users * 7 + items * 3) % 5 < 2).float()
        x = scores(torch.cat([user(users), item(items)], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(x, clicked)

    return nn.ModuleList([user, item, scores]), loss


MODELS: dict[str, Callable[[], Network]] = {
    "cnn": images,
    "transformer": lambda: text(
        nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True), tied=True
    ),
    "lstm": lambda: text(nn.LSTM(96, 96, 2, batch_first=True)),
    "experts": lambda: text(Experts()),
    "recommender": clicks,
}


@cache
def recorded(model: str) -> Tensor:
    """The ranks' gradients in 2 · `KEPT` steps, float32 `(steps, RANKS, n)`; kept in a file."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = CACHE / f"{model}-{version}.pt"
    if path.exists():
        kept: Tensor = torch.load(path)
        return kept
    torch.manual_seed(0)
    (module, loss), steps = MODELS[model](), []
    parameters = list(module.parameters())
    generators = [torch.Generator().manual_seed(RANKS + rank) for rank in range(RANKS)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        of_ranks = [torch.autograd.grad(loss(generator), parameters) for generator in generators]
        gradients = torch.stack([nn.utils.parameters_to_vector(each) for each in of_ranks])
        if not KEPT <= step < STEPS - KEPT:
            steps.append(gradients)
        for parameter, *parts in zip(parameters, *of_ranks, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        optimizer.step()
    CACHE.mkdir(parents=True, exist_ok=True)
    torch.save(torch.stack(steps), path)
    return torch.stack(steps)


def shuffled(steps: Tensor) -> Tensor:
    """Each step's values of all ranks in random order: one distribution, and independent places."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(steps[0].numel(), generator=generator)
    return steps.flatten(1)[:, order].view_as(steps)


class Counted(Accumulator):
    """Counts its passes, and what DRAGONN's table has no room for."""

    passes, lost = 0, 0.0

    def select(self, threshold: float) -> SparseStream:
        self.passes += 1
        return super().select(threshold)

    def topk(self, k: int) -> tuple[SparseStream, float]:
        self.passes += 1
        return super().topk(k)

    def hash_select(self, threshold: float, *table: int) -> SparseStream:
        self.passes += 1
        stream = super().hash_select(threshold, *table)
        left = int((self.residual.abs() >= threshold).sum())
        self.lost = left / max(1, left + stream.nnz)
        return stream


@dataclass(frozen=True)
class Step:
    """What one rank's step came to.

    Attributes:
        nnz_share: Sent over k, or over all nonzeros if fewer; applied, where a rank selects a part.
        words: Received, over k (P-1)/P.
        lost: Share of what passed DRAGONN's threshold and lost its slot.
        drift: A random projection of what left the residual less 1/P of what was applied: all
            ranks' drifts of a step sum up to nothing.
    """

    passes: int
    nnz_share: float
    words: float
    lost: float
    drift: float


def measured(compressor: str, steps: Tensor, density: float) -> list[Step]:
    """Select and exchange by plain error feedback, over the `local` transport."""
    _, P, numel = steps.shape
    k = max(1, round(density * numel))
    options = COMPRESSORS[compressor](density=density)
    if isinstance(options, AnyCollectiveOptions):
        options = replace(options, collective="topk_allgather")

    def train(transport: Transport) -> list[Step]:
        selector, residual, done = options.selector(), torch.zeros(numel), list[Step]()
        collective = options.collective_factory()(transport, numel, k)
        weights = torch.randn(numel, generator=torch.Generator().manual_seed(1)).double()
        for gradient in steps[:, transport.rank]:
            whole = residual + gradient
            nonzero = int(whole.count_nonzero())
            accumulator = Counted(ops.Accumulation(residual, [gradient]), collective.scope())
            before = transport.traffic.snapshot()
            taken = selector.select(accumulator, k)
            reduction = collective.reduce(taken, lambda at: ops.on(at.device).take_at(residual, at))
            accumulator.put_back(reduction.returned)
            sent = taken.nnz if accumulator.width == numel else reduction.reduced.nnz
            words = transport.traffic.since(before).bytes_received / 4 * P / (k * (P - 1))
            share = sent / max(1, min(k, nonzero))
            applied = weights[reduction.reduced.indices.long()] @ reduction.reduced.values.double()
            drift = float(weights @ (whole - residual).double() - applied / P)
            done.append(Step(accumulator.passes, share, words, accumulator.lost, drift))
        return done

    return [step for steps in run_ranks(P, train) for step in steps]


def said(steps: Sequence[Step]) -> str:
    """Second passes, nnz/k, and the words of the worst rank."""
    again = sum(step.passes > 1 for step in steps) / len(steps)
    shares = [step.nnz_share for step in steps]
    words = max(step.words for step in steps)
    return f"{again:.0%}, {min(shares):.2f}–{max(shares):.2f}, {words:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="What compressors make of real gradients.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--compressors", nargs="+", choices=list(COMPRESSORS), default=list(COMPRESSORS)
    )
    parser.add_argument("--densities", nargs="+", type=float, default=[0.01, 0.001])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for density in arguments.densities:
        print(f"| density {density:g} |", " | ".join(arguments.models), "|")
        print("|---" * (len(arguments.models) + 1) + "|")
        for compressor in arguments.compressors:
            cells = [
                "; ".join(
                    said(measured(compressor, steps, density))
                    for steps in (recorded(model), shuffled(recorded(model)))
                )
                for model in arguments.models
            ]
            print(f"| `{compressor}` |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
