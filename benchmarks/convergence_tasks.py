"""What benchmarks.convergence trains: two CNNs on images, and two networks on text.

The data come with what is installed: scikit-learn's handwritten digits, Debian's package
`dataset-fashion-mnist`, the help texts of Python's `pydoc_data`, and the sources of Python and of
installed packages. What is trained with AdamW is in benchmarks/convergence_adamw.py.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIMIT_BYTES = 16_000_000
PACKAGES = ("numpy", "scipy", "sklearn", "torch")
ALPHABET = bytes(range(32, 127)) + b"\n"


@dataclass(frozen=True)
class Budget:
    """Length, learning rate and warm-up of a training.

    The fewer entries are sent, the longer they wait, and the lower a learning rate must be: at
    density 0.001 an entry waits a thousand steps. The dense trainings have the same.

    Attributes:
        steps: Steps of the whole run.
        lr: Learning rate after its warm-up; it falls to 0 along a cosine.
        dense_steps: Dense steps at its beginning, for compressors that need them.
        warmup_steps: Steps of the warm-up of density after them.
        drops: Shares of the run after which the rate is a tenth, instead of the cosine.
    """

    steps: int
    lr: float
    dense_steps: int
    warmup_steps: int
    drops: tuple[float, ...] = ()

    def lr_at(self, step: int, rising_steps: int) -> float:
        """The learning rate of one step; it rises over the first `rising_steps`."""
        if step < rising_steps:
            return self.lr * (step + 1) / rising_steps
        if self.drops:
            return self.lr * 0.1 ** sum(step >= drop * self.steps for drop in self.drops)
        done = (step - rising_steps) / max(1, self.steps - rising_steps)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Recipe:
    """How a task is trained; the same for all compressors and densities.

    Attributes:
        batch: Samples per rank and step.
        lr_warmup_steps: Steps over which the learning rate rises.
        momentum: Momentum of the optimizer, or of a memory instead.
        clip_norm: Limit on the norm of a rank's gradient; with AdamW, on that of the mean.
        optimizer: "sgd", or "adamw", whose β1 is the momentum.
    """

    batch: int
    lr_warmup_steps: int
    momentum: float
    clip_norm: float
    optimizer: str = "sgd"


class Task(ABC):
    """A model, its data and its metric.

    Attributes:
        name: Its name.
        metric: The metric measured at the end.
        unit: Its unit.
        gap_unit: The unit of `gap`.
        limits: The largest permitted gap, by density.
        recipe: How it is trained.
        budgets: Length and rate of its trainings, by density.
        hard_thresholds: λ of the hard threshold that gives about this density.
        curve_points: Evaluations of a run, at equal distances.
    """

    name: str
    metric: str
    unit: str
    gap_unit: str
    limits: ClassVar[Mapping[float, float]]
    recipe: Recipe
    budgets: ClassVar[Mapping[float, Budget]]
    hard_thresholds: ClassVar[Mapping[float, float]]
    curve_points: int = 20

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A new model; the same for the same seed."""

    @abstractmethod
    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """The loss of one random batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The metric, on data that is not trained on."""

    def data(self) -> str:
        """Digest of data that depends on the installation; otherwise empty."""
        return ""

    @staticmethod
    @abstractmethod
    def gap(value: float, dense: float) -> float:
        """How much worse a value is than the dense one: points, or percent."""


class Digits(Task):
    """A CNN of 72,000 parameters on digits that are shifted by up to a pixel."""

    name, metric, unit, gap_unit = "digits", "test accuracy", "%", "points"
    limits: ClassVar[Mapping[float, float]] = {0.01: 0.3, 0.001: 0.7}
    recipe = Recipe(batch=32, lr_warmup_steps=25, momentum=0.9, clip_norm=5.0)
    budgets: ClassVar[Mapping[float, Budget]] = {
        0.01: Budget(steps=1500, lr=0.1, dense_steps=20, warmup_steps=100),
        0.001: Budget(steps=4000, lr=0.05, dense_steps=40, warmup_steps=200),
    }
    hard_thresholds: ClassVar[Mapping[float, float]] = {0.01: 0.3, 0.001: 2.0}
    train_samples = 1437

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)[order]
        labels = torch.tensor(digits.target)[order]
        self.padded = F.pad(images, (1, 1, 1, 1))
        self.labels = labels
        shifts = [(0, 0), (0, 2), (2, 0), (2, 2), (1, 1)]
        test = self.padded[self.train_samples :]
        self.test_images = torch.cat([test[:, :, y : y + 8, x : x + 8] for y, x in shifts])
        self.test_labels = labels[self.train_samples :].repeat(len(shifts))

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 16, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(self.train_samples, (self.recipe.batch,), generator=generator)
        y, x = torch.randint(3, (2,), generator=generator).tolist()
        images = self.padded[chosen, :, y : y + 8, x : x + 8]
        return F.cross_entropy(model(images), self.labels[chosen])

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            guesses = model(self.test_images).argmax(1)
        return 100.0 * float((guesses == self.test_labels).float().mean())

    @staticmethod
    def gap(value: float, dense: float) -> float:
        return dense - value


class Residual(nn.Module):
    """Two convolutions of 3 x 3 with batch normalisation, beside a shortcut (He et al., 2016)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class FashionMnist(Task):
    """A ResNet of 78,000 parameters, 8 epochs with two drops of the rate.

    Xiao, Rasul, Vollgraf, "Fashion-MNIST" (2017): 60,000 and 10,000 images of 28 x 28 in 10
    classes. Training images are shifted by up to 2 pixels and mirrored.
    """

    name, metric, unit, gap_unit = "fashion", "test accuracy", "%", "points"
    limits: ClassVar[Mapping[float, float]] = {0.01: 0.5, 0.001: 0.5}
    recipe = Recipe(batch=32, lr_warmup_steps=100, momentum=0.9, clip_norm=5.0)
    budget = Budget(steps=3750, lr=0.1, dense_steps=40, warmup_steps=300, drops=(0.5, 0.75))
    budgets: ClassVar[Mapping[float, Budget]] = {0.01: budget, 0.001: budget}
    hard_thresholds: ClassVar[Mapping[float, float]] = {0.01: 0.3, 0.001: 2.0}
    curve_points = 5
    folder = Path("/usr/share/datasets/fashion-mnist")

    def __init__(self) -> None:
        if not self.folder.is_dir():
            raise SystemExit(f"{self.folder} is missing: apt-get install dataset-fashion-mnist")
        images, self.labels = self._read("train")
        self.padded = F.pad(images, (2, 2, 2, 2))
        self.test_images, self.test_labels = self._read("t10k")

    def _read(self, part: str) -> tuple[Tensor, Tensor]:
        """Images of mean 0, float32 `(n, 1, 28, 28)`, and labels, int64 `(n,)`."""

        def content(kind: str, header_bytes: int) -> Tensor:
            data = gzip.decompress((self.folder / f"{part}-{kind}-ubyte.gz").read_bytes())
            return torch.frombuffer(bytearray(data[header_bytes:]), dtype=torch.uint8)

        images = content("images-idx3", 16).view(-1, 1, 28, 28)
        return (images / 255 - 0.286) / 0.353, content("labels-idx1", 8).long()

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            Residual(16, 16, 1),
            Residual(16, 32, 2),
            Residual(32, 64, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(self.labels), (self.recipe.batch,), generator=generator)
        y, x = torch.randint(5, (2,), generator=generator).tolist()
        images = self.padded[chosen, :, y : y + 28, x : x + 28]
        if torch.rand((), generator=generator) < 0.5:
            images = images.flip(3)
        return F.cross_entropy(model(images), self.labels[chosen])

    def evaluate(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            guesses = torch.cat([model(part).argmax(1) for part in self.test_images.split(1000)])
        model.train()
        return 100.0 * float((guesses == self.test_labels).float().mean())

    @staticmethod
    def gap(value: float, dense: float) -> float:
        return dense - value


class CharacterLstm(nn.Module):
    """Predicts the next character."""

    def __init__(self, characters: int, width: int = 96, embedded: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedded)
        self.lstm = nn.LSTM(embedded, width, batch_first=True)
        self.out = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(self.embedding(text))[0])
        return out


class Text(Task):
    """An LSTM that predicts the next character; `train` and `test` are what it reads.

    Attributes:
        length: Characters of a sample.
        characters: Size of the alphabet.
        train: Codes of the training text, `(n,)`.
        test: Samples of the test text, `(rows, length + 1)`.
    """

    metric, unit, gap_unit = "test loss", "nats", "%"
    length: int
    test_rows = 512

    def keep(self, characters: int, train: Tensor, test: Tensor) -> None:
        """Take the texts; the test is a fixed choice of rows."""
        self.characters = characters
        self.train = train
        rows = len(test) // (self.length + 1)
        chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
        self.test = test[: rows * (self.length + 1)].view(rows, -1)[chosen[: self.test_rows]]

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        last = len(self.train) - self.length - 1
        starts = torch.randint(last, (self.recipe.batch, 1), generator=generator)
        return self._loss(model, self.train[starts + torch.arange(self.length + 1)].long())

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(self._loss(model, self.test.long()))

    def _loss(self, model: nn.Module, text: Tensor) -> Tensor:
        guesses = model(text[:, :-1])  # of as many last characters as the model predicts
        return F.cross_entropy(guesses.flatten(0, 1), text[:, -guesses.shape[1] :].flatten())

    @staticmethod
    def gap(value: float, dense: float) -> float:
        return 100.0 * (value / dense - 1)


class PythonHelp(Text):
    """An LSTM of 62,000 parameters on the characters of Python's help texts."""

    name = "text"
    limits: ClassVar[Mapping[float, float]] = {0.01: 1.0, 0.001: 4.0}
    recipe = Recipe(batch=8, lr_warmup_steps=50, momentum=0.9, clip_norm=1.0)
    budgets: ClassVar[Mapping[float, Budget]] = {
        0.01: Budget(steps=12_000, lr=2.0, dense_steps=150, warmup_steps=500),
        0.001: Budget(steps=16_000, lr=0.5, dense_steps=150, warmup_steps=800),
    }
    hard_thresholds: ClassVar[Mapping[float, float]] = {0.01: 0.07, 0.001: 0.27}
    length = 20

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        common = sorted({c for c in text if c.isascii() and c.isprintable()} | {"\n"})
        codes = {c: i for i, c in enumerate(common)}
        encoded = torch.tensor([codes[c] for c in text if c in codes])
        pieces = encoded.split(2000)
        train = torch.cat([piece for i, piece in enumerate(pieces) if i % 10])
        self.keep(len(common), train, torch.cat(pieces[::10]))

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return CharacterLstm(self.characters)


class NextCharacter(nn.Module):
    """Predicts the one character after its context: Bengio's feed-forward language model (2003)."""

    def __init__(self, characters: int, context: int, width: int, embedded: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedded)
        self.first = nn.Linear(context * embedded, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        hidden = F.relu(self.first(self.embedding(text).flatten(1)))
        out: Tensor = self.out(F.relu(self.second(hidden)))
        return out.unsqueeze(1)


class Sources(Text):
    """A feed-forward network of 2.1 million parameters on 16 MB of Python.

    Files are taken in the order of their contents' SHA-256, each content once, until there are 16
    MB. A file is read for the test where its hash says so, so no file is in both parts. The hash of
    all of it is kept with every training: other versions of Python or torch are another text.
    """

    name = "sources"
    limits: ClassVar[Mapping[float, float]] = {0.01: 1.0, 0.001: 4.0}
    recipe = Recipe(batch=64, lr_warmup_steps=100, momentum=0.9, clip_norm=1.0)
    budgets: ClassVar[Mapping[float, Budget]] = {
        0.01: Budget(steps=2000, lr=1.0, dense_steps=30, warmup_steps=120),
        0.001: Budget(steps=12_000, lr=0.3, dense_steps=100, warmup_steps=560),
    }
    hard_thresholds: ClassVar[Mapping[float, float]] = {0.01: 0.07, 0.001: 0.27}
    length = 16
    test_rows = 8192

    def __init__(self) -> None:
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        digest, size = hashlib.sha256(), 0
        for name, text in sorted(contents()):
            if size >= LIMIT_BYTES:
                break
            parts[name[-1] % 10 == 0].append(text)
            digest.update(name)
            size += len(text)
        self.digest = digest.hexdigest()[:16]
        self.keep(len(ALPHABET), codes(parts[False]), codes(parts[True]))

    def data(self) -> str:
        return self.digest

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return NextCharacter(self.characters, self.length, width=1024, embedded=56)


def contents() -> Iterator[tuple[bytes, bytes]]:
    """The sources, each content once: its SHA-256, and its characters that are in the alphabet."""
    others = bytes(set(range(256)) - set(ALPHABET))
    paths = sysconfig.get_paths()
    library, installed = Path(paths["stdlib"]), Path(paths["purelib"])
    folders = [p for p in library.iterdir() if p.name != "site-packages"]
    folders += [installed / name for name in PACKAGES]
    seen = set()
    for folder in folders:
        for path in [folder] if folder.suffix == ".py" else folder.rglob("*.py"):
            text = path.read_bytes()
            name = hashlib.sha256(text).digest()
            if name not in seen:
                seen.add(name)
                yield name, text.translate(None, others)


def codes(texts: list[bytes]) -> Tensor:
    """Every character's place in the alphabet, uint8 `(n,)`."""
    table = bytes(max(0, ALPHABET.find(bytes([c]))) for c in range(256))
    return torch.frombuffer(bytearray(b"".join(texts).translate(table)), dtype=torch.uint8)
