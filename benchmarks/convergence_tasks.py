"""What benchmarks.convergence trains: a CNN on images, and an LSTM on text.

Both come with what is installed anyway: scikit-learn's handwritten digits, and the help texts of
Python's own `pydoc_data`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """How a task is trained; the same for all compressors.

    Attributes:
        steps: Steps of the whole run.
        batch: Samples per rank and step.
        lr: Learning rate after its warm-up; it falls to 0 along a cosine.
        lr_warmup_steps: Steps over which it rises.
        momentum: Of the optimizer, or of momentum correction in its place.
        clip_norm: Limit on the norm of the averaged gradient.
        warmup_steps: Steps of a compressor's warm-up of density.
        dense_steps: Dense steps before it, for those that need them.
    """

    steps: int
    batch: int
    lr: float
    lr_warmup_steps: int
    momentum: float
    clip_norm: float
    warmup_steps: int
    dense_steps: int

    def lr_at(self, step: int) -> float:
        """The learning rate of one step."""
        if step < self.lr_warmup_steps:
            return self.lr * (step + 1) / self.lr_warmup_steps
        done = (step - self.lr_warmup_steps) / (self.steps - self.lr_warmup_steps)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


class Task(ABC):
    """A model, its data, and what is told of it in the end.

    Attributes:
        name: What it is called.
        metric: What is measured in the end.
        unit: Its unit.
        recipe: How it is trained.
        hard_thresholds: λ of the hard threshold, by the density that it is to come near.
    """

    name: str
    metric: str
    unit: str
    recipe: Recipe
    hard_thresholds: ClassVar[Mapping[float, float]]

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A new model; the same for the same seed."""

    @abstractmethod
    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """The loss of one random batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The metric, on data that is not trained on."""

    @staticmethod
    @abstractmethod
    def gap(value: float, dense: float) -> float:
        """How much worse a value is than the dense one: points, or percent."""


class Digits(Task):
    """A CNN of 72,000 parameters on digits that are shifted by up to a pixel."""

    name, metric, unit = "digits CNN", "test accuracy", "%"
    recipe = Recipe(
        steps=500,
        batch=32,
        lr=0.2,
        lr_warmup_steps=25,
        momentum=0.9,
        clip_norm=5.0,
        warmup_steps=100,
        dense_steps=75,
    )
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


class CharacterLstm(nn.Module):
    """Predicts the next character."""

    def __init__(self, characters: int, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.out = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(self.embedding(text))[0])
        return out


class PythonHelp(Task):
    """An LSTM of 62,000 parameters on the characters of Python's help texts."""

    name, metric, unit = "text LSTM", "test loss", "nats"
    recipe = Recipe(
        steps=2000,
        batch=8,
        lr=4.0,
        lr_warmup_steps=50,
        momentum=0.9,
        clip_norm=1.0,
        warmup_steps=500,
        dense_steps=400,
    )
    hard_thresholds: ClassVar[Mapping[float, float]] = {0.01: 0.07, 0.001: 0.27}
    length = 20

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        common = sorted({c for c in text if c.isascii() and c.isprintable()} | {"\n"})
        codes = {c: i for i, c in enumerate(common)}
        encoded = torch.tensor([codes[c] for c in text if c in codes])
        self.characters = len(common)
        pieces = encoded.split(2000)
        self.train = torch.cat([piece for i, piece in enumerate(pieces) if i % 10])
        test = torch.cat(pieces[::10])
        rows = len(test) // (self.length + 1)
        chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:512]
        self.test = test[: rows * (self.length + 1)].view(rows, -1)[chosen]

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return CharacterLstm(self.characters)

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        last = len(self.train) - self.length - 1
        starts = torch.randint(last, (self.recipe.batch, 1), generator=generator)
        return self._loss(model, self.train[starts + torch.arange(self.length + 1)])

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(self._loss(model, self.test))

    def _loss(self, model: nn.Module, text: Tensor) -> Tensor:
        guesses = model(text[:, :-1])
        return F.cross_entropy(guesses.flatten(0, 1), text[:, 1:].flatten())

    @staticmethod
    def gap(value: float, dense: float) -> float:
        return 100.0 * (value / dense - 1)


TASKS: tuple[type[Task], ...] = (Digits, PythonHelp)
