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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.corpus import Vocabulary, python_sources, windows
from benchmarks.models import BenchmarkModel, zipf
from hvd_sparse import ops
from hvd_sparse.accumulator import Accumulator, Scope
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
CACHE = Path(__file__).resolve().parents[1] / "build" / "gradients"


@cache
def tokens() -> Tensor:
    text = python_sources(most_bytes=1_000_000, packages=()).train
    encoded: Tensor = Vocabulary.of(text, 2000).encode(text)
    return encoded


class Images(BenchmarkModel):
    """Convolutions with batch normalisation, on patches whose stripes tell the class."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 128)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(images), labels)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        labels = torch.randint(10, (8,), generator=generator)
        stripes = (torch.arange(16) * (labels.view(-1, 1) + 1) / 4).sin().view(8, 1, 1, 16)
        return stripes + torch.randn(8, 3, 16, 16, generator=generator), labels


class Text(BenchmarkModel):
    """Predicts the next token; the output is the embedding (tied) or a layer of its own."""

    def __init__(self, body: nn.Module, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 96)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.body, self.head = body, nn.Linear(96, 2000)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.body(self.embedding(inputs))
        scores: Tensor = self.head(x[0] if isinstance(x, tuple) else x)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """From a part of the text that the generator's seed tells: a rank's own."""
        part = tokens().tensor_split(RANKS)[generator.initial_seed() % RANKS]
        return windows(part, 4, 24, generator)


class Experts(nn.Module):
    """A token goes through one of eight experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(96, 8)
        sizes = [nn.Sequential(nn.Linear(96, 192), nn.ReLU(), nn.Linear(192, 96)) for _ in range(8)]
        self.experts = nn.ModuleList(sizes)

    def forward(self, x: Tensor) -> Tensor:
        odds = self.router(x).softmax(-1)
        chosen = odds.argmax(-1)
        outputs = [odds[..., i, None] * expert(x) for i, expert in enumerate(self.experts)]
        mixed: Tensor = x + sum(y * (chosen == i).unsqueeze(-1) for i, y in enumerate(outputs))
        return mixed


class Clicks(BenchmarkModel):
    """Users and items as dense embeddings, most rows of which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(8000, 32), nn.Embedding(3000, 32)
        self.scores = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, users: Tensor, items: Tensor, clicked: Tensor) -> Tensor:
        x = torch.cat([self.user(users), self.item(items)], 1)
        return F.binary_cross_entropy_with_logits(self.scores(x).squeeze(1), clicked)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        users, items = zipf((256,), 8000, generator), zipf((256,), 3000, generator)
        return users, items, ((users * 7 + items * 3) % 5 < 2).float()


def transformer() -> Text:
    layer = nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True)
    return Text(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), tied=True)


MODELS: dict[str, Callable[[], BenchmarkModel]] = {
    "cnn": Images,
    "transformer": transformer,
    "lstm": lambda: Text(nn.LSTM(96, 96, 2, batch_first=True), tied=False),
    "experts": lambda: Text(Experts(), tied=False),
    "recommender": Clicks,
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
    module, steps = MODELS[model](), []
    generators = [torch.Generator().manual_seed(RANKS + rank) for rank in range(RANKS)]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        gradients = torch.stack([_gradient(module, generator) for generator in generators])
        if not KEPT <= step < STEPS - KEPT:
            steps.append(gradients)
        parts = gradients.mean(0).split([p.numel() for p in module.parameters()])
        for parameter, part in zip(module.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    CACHE.mkdir(parents=True, exist_ok=True)
    torch.save(torch.stack(steps), path)
    return torch.stack(steps)


def _gradient(module: BenchmarkModel, generator: torch.Generator) -> Tensor:
    module.zero_grad()
    module(*module.batch(generator)).backward()
    return torch.cat(
        [
            p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten()
            for p in module.parameters()
        ]
    )


def shuffled(steps: Tensor) -> Tensor:
    """Each step's values of all ranks in random order: one distribution, and independent places."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(steps[0].numel(), generator=generator)
    return steps.flatten(1)[:, order].view_as(steps)


class Counted(Accumulator):
    """Counts its passes, and what DRAGONN's table has no room for."""

    def __init__(self, accumulation: ops.Accumulation, scope: Scope | None) -> None:
        super().__init__(accumulation, scope)
        self.passes, self.lost = 0, 0.0

    def select(self, threshold: float) -> SparseStream:
        self.passes += 1
        return super().select(threshold)

    def topk(self, k: int) -> tuple[SparseStream, float]:
        self.passes += 1
        return super().topk(k)

    def hash_select(
        self, threshold: float, slots: int, slots_per_bucket: int, seed: int
    ) -> SparseStream:
        self.passes += 1
        stream = super().hash_select(threshold, slots, slots_per_bucket, seed)
        left = int((self.residual.abs() >= threshold).sum())
        self.lost = left / max(1, left + stream.nnz)
        return stream


@dataclass(frozen=True)
class Step:
    """What one rank's step came to.

    Attributes:
        passes: Over the whole vector.
        nnz_share: Entries sent over k, or over all nonzeros where they are fewer; entries applied
            where each rank selects in a part of its own.
        words: Received, over k (P-1)/P.
        lost: Share of what passed DRAGONN's threshold and lost its slot.
        drift: What this rank's residual gave less its part of what was applied, as one random
            projection of both: all ranks' drifts of a step sum up to nothing.
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
            reduction = collective.reduce(taken, lambda at: ops.take_at(residual, at))
            accumulator.put_back(reduction.returned)
            sent = taken.nnz if accumulator.width == numel else reduction.reduced.nnz
            words = transport.traffic.since(before).bytes_received / 4 * P / (k * (P - 1))
            share = sent / max(1, min(k, nonzero))
            applied = weights[reduction.reduced.indices.long()] @ reduction.reduced.values.double()
            drift = float(weights @ (whole - residual).double() - applied / P)
            done.append(Step(accumulator.passes, share, words, accumulator.lost, drift))
        return done

    return [step for steps in run_ranks(P, train) for step in steps]


def table(models: Sequence[str], compressors: Sequence[str], density: float) -> Iterator[str]:
    """Second passes, nnz/k and words of each compressor and model: real, and shuffled."""
    yield f"| density {density:g} | " + " | ".join(models) + " |"
    yield "|---" * (len(models) + 1) + "|"
    for compressor in compressors:
        cells = [
            "; ".join(
                _said(measured(compressor, steps, density))
                for steps in (recorded(model), shuffled(recorded(model)))
            )
            for model in models
        ]
        yield f"| `{compressor}` | " + " | ".join(cells) + " |"


def _said(steps: Sequence[Step]) -> str:
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
        for line in table(arguments.models, arguments.compressors, density):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
