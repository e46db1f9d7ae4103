"""What benchmarks.convergence trains with AdamW: two transformers and a recommender."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.convergence_tasks import Budget, Digits, PythonHelp, Recipe, Task

ADAMW_DENSITIES = (0.01, 0.1, 0.003, 0.001, 0.04)
"""The last one is for compressors that apply k entries, where `topk` at 0.01 applies up to 4 k."""
LIMITS: Mapping[float, float] = {0.01: 1.0, 0.1: 1.0, 0.003: 2.0, 0.001: 4.0, 0.04: 1.0}
POINTS: Mapping[float, float] = {0.01: 0.3, 0.1: 0.3, 0.003: 0.5, 0.001: 0.7, 0.04: 0.3}


def budgets(steps: int, lr: float) -> dict[float, Budget]:
    """The same training at every density."""
    return {density: Budget(steps, lr, 20, 0) for density in ADAMW_DENSITIES}


class Block(nn.Module):
    """A layer of a transformer, normalised before attention and before the feed-forward part."""

    def __init__(self, width: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.queries(self.before(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.between(x))))
        return out


class LanguageTransformer(nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, characters: int, length: int, width: int = 96, *, tied: bool = False):
        super().__init__()
        self.embedding, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4, is_causal=True) for _ in range(3)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, characters)
        if tied:
            self.out.weight = self.embedding.weight
        for embedding in (self.embedding, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.places.weight[: text.shape[1]]
        out: Tensor = self.out(self.norm(self.blocks(x)))
        return out


class TransformerText(PythonHelp):
    """A transformer of 0.36 million parameters on the characters of Python's help texts."""

    name = "transformer"
    limits: ClassVar[Mapping[float, float]] = LIMITS
    recipe = Recipe(8, lr_warmup_steps=30, momentum=0.9, clip_norm=1.0, optimizer="adamw")
    budgets: ClassVar[Mapping[float, Budget]] = budgets(600, 3e-3)
    hard_thresholds: ClassVar[Mapping[float, float]] = {}
    length, width, tied = 32, 96, False
    test_rows = 256

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return LanguageTransformer(self.characters, self.length, self.width, tied=self.tied)


class Longer(TransformerText):
    """The same transformer for four times as long."""

    name = "transformer-x4"
    budgets: ClassVar[Mapping[float, Budget]] = budgets(2400, 3e-3)


class Batches(TransformerText):
    """The same transformer with batches of four times as much text."""

    name = "transformer-batch-x4"
    recipe = replace(TransformerText.recipe, batch=32)


class Tied(TransformerText):
    """The same transformer with one matrix for both embeddings."""

    name, tied = "transformer-tied", True


class Unclipped(TransformerText):
    """The same transformer without clipping."""

    name = "transformer-unclipped"
    recipe = replace(TransformerText.recipe, clip_norm=1e9)


class Wide(TransformerText):
    """A transformer of 9.6 million parameters."""

    name, width = "transformer-9.6M", 512
    budgets: ClassVar[Mapping[float, Budget]] = budgets(300, 1e-3)


class VisionNet(nn.Module):
    """A transformer on 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, 4, is_causal=False) for _ in range(layers)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, 2, stride=2).transpose(1, 2)
        seen = self.blocks(self.patches(patches) + self.places)
        out: Tensor = self.out(self.norm(seen).mean(1))
        return out


class VisionTransformer(Digits):
    """A vision transformer of 0.15 million parameters on the digits."""

    name = "vision"
    limits: ClassVar[Mapping[float, float]] = POINTS
    recipe = Recipe(16, lr_warmup_steps=30, momentum=0.9, clip_norm=1.0, optimizer="adamw")
    budgets: ClassVar[Mapping[float, Budget]] = budgets(800, 2e-3)
    hard_thresholds: ClassVar[Mapping[float, float]] = {}

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return VisionNet()


class RecommenderNet(nn.Module):
    """Two embeddings, most of whose rows are rare, and a small network on both."""

    def __init__(self, users: int, items: int, width: int = 32) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.wide, self.out = nn.Linear(3 * width, 64), nn.Linear(64, 1)
        for embedding in (self.users, self.items):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        both = torch.cat([user, item, user * item], 1)
        out: Tensor = self.out(F.relu(self.wide(both))).view(-1)
        return out


class Recommender(Task):
    """Whether a user likes an item: hidden factors, drawn once; items and users by Zipf's law."""

    name, metric, unit, gap_unit = "recommender", "test loss", "nats", "%"
    limits: ClassVar[Mapping[float, float]] = LIMITS
    recipe = Recipe(256, lr_warmup_steps=30, momentum=0.9, clip_norm=1.0, optimizer="adamw")
    budgets: ClassVar[Mapping[float, Budget]] = budgets(1200, 3e-3)
    hard_thresholds: ClassVar[Mapping[float, float]] = {}
    users, items, factors = 3000, 2000, 4

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.of_users = torch.randn(self.users, self.factors, generator=generator)
        self.of_items = torch.randn(self.items, self.factors, generator=generator)
        self.shares = [1.0 / torch.arange(1, n + 1).float() for n in (self.users, self.items)]
        self.test = self.batch(8192, generator)

    def batch(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pairs of user and item, int64 `(rows, 2)`, and whether the user liked it."""
        pairs = torch.stack(
            [s.multinomial(rows, replacement=True, generator=generator) for s in self.shares], 1
        )
        taste = (self.of_users[pairs[:, 0]] * self.of_items[pairs[:, 1]]).sum(1)
        liked = torch.rand(rows, generator=generator) < torch.sigmoid(2.0 * taste)
        return pairs, liked.float()

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return RecommenderNet(self.users, self.items)

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        pairs, liked = self.batch(self.recipe.batch, generator)
        return F.binary_cross_entropy_with_logits(model(pairs), liked)

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(F.binary_cross_entropy_with_logits(model(self.test[0]), self.test[1]))

    @staticmethod
    def gap(value: float, dense: float) -> float:
        return 100.0 * (value / dense - 1)
