"""The models that benchmarks train, with their real tensors.

Each is a module whose `forward` returns the loss of a batch, and which draws batches:

    model = MODELS["vgg16"]()
    model(*model.batch(generator)).backward()
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BenchmarkModel(nn.Module):
    """A module whose `forward` returns the loss.

    Attributes:
        title: Its name in tables and plots.
    """

    title: ClassVar[str]

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """A random batch: the arguments of `forward`."""
        raise NotImplementedError


class Vgg16(BenchmarkModel):
    """VGG-16 for images of 32 × 32: 13 convolutions and one linear layer, 14.7 M."""

    title = "VGG-16, 14.7 M"
    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in self.widths:
            if width == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.classifier = nn.Linear(512, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images)), labels)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return images_and_labels(6, 32, 10, generator)


class Bottleneck(nn.Module):
    """ResNet's: 1 × 1, 3 × 3, 1 × 1, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


class ResNet50(BenchmarkModel):
    """ResNet-50 for images of 64 × 64: 161 tensors, 25.6 M."""

    title = "ResNet-50, 25.6 M"

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
        layers += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        inputs = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
                inputs = 4 * width
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images)), labels)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return images_and_labels(4, 64, 1000, generator)


class BertStyle(BenchmarkModel):
    """A transformer encoder with BERT's vocabulary, whose head shares the embedding."""

    is_causal = False

    def __init__(self, width: int, layers: int, batch: int, length: int) -> None:
        super().__init__()
        self.vocabulary, self.shape = 30522, (batch, length)
        self.embedding = nn.Embedding(self.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(torch.randn(512, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(
            *(width, width // 64, 4 * width), dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(self.vocabulary))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens) + self.position[: tokens.shape[1]])
        mask = None
        if self.is_causal:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.transform(self.layers(x, mask=mask, is_causal=self.is_causal))
        scores = F.linear(x, self.embedding.weight, self.bias)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(zipf(self.shape, self.vocabulary, generator) for _ in range(2))


class Transformer35(BertStyle):
    """Six layers of width 512."""

    title = "transformer, 35 M"

    def __init__(self) -> None:
        super().__init__(width=512, layers=6, batch=1, length=64)


class CausalTransformer35(Transformer35):
    """The same, which sees no token before it has to be predicted."""

    title = "causal transformer, 35 M"
    is_causal = True


class BertBase(BertStyle):
    """Twelve layers of width 768, as BERT-base."""

    title = "BERT-base, 110 M"

    def __init__(self) -> None:
        super().__init__(width=768, layers=12, batch=1, length=32)


class Lstm24(BenchmarkModel):
    """A language model: embedding, two layers of LSTM, output."""

    title = "LSTM, 24.8 M"
    vocabulary = 10_000

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(self.vocabulary, self.width)
        self.lstm = nn.LSTM(self.width, self.width, 2, batch_first=True)
        self.head = nn.Linear(self.width, self.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.lstm(self.embedding(tokens))[0])
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(zipf((4, 20), self.vocabulary, generator) for _ in range(2))


class Extreme(BenchmarkModel):
    """DRAGONN's extreme classification layer, 4096 × 30938: one tensor of 126.7 M."""

    title = "extreme classification, 126.7 M"
    shape: ClassVar[tuple[int, int]] = (4096, 30938)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(*self.shape, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), labels)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        inputs, classes = self.shape
        return torch.randn(8, inputs, generator=generator), zipf((8,), classes, generator)


class Recommendation(BenchmarkModel):
    """Two tables with sparse gradients, and a perceptron: 200,000 users and 50,000 items."""

    title = "recommendation, 16.1 M"
    users, items, width = 200_000, 50_000, 64

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(self.users, self.width, sparse=True)
        self.item = nn.Embedding(self.items, self.width, sparse=True)
        self.scores = nn.Sequential(nn.Linear(2 * self.width, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, users: Tensor, items: Tensor, clicked: Tensor) -> Tensor:
        scores = self.scores(torch.cat([self.user(users), self.item(items)], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, clicked)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        ids = (zipf((512,), self.users, generator), zipf((512,), self.items, generator))
        return *ids, torch.randint(2, (512,), generator=generator).float()


class Cnn(BenchmarkModel):
    """Many small tensors, and one large fully connected layer."""

    title = "CNN with a large linear layer"

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        widths = (3, 16, 32, 32, 64, 64, 64)
        for number, (inputs, outputs) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number % 2 else []
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.large = nn.Linear(64 * 8 * 8, 1024)
        self.last = nn.Linear(1024, 10)

    def forward(self, images: Tensor) -> Tensor:
        loss: Tensor = self.last(torch.relu(self.large(self.features(images)))).square().mean()
        return loss

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randn(2, 3, 64, 64, generator=generator),)


class SmallTransformer(BenchmarkModel):
    """Embedding, four layers, output."""

    title = "small transformer"
    vocabulary, width = 4000, 128

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, self.width)
        layer = nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.head(self.layers(self.embedding(tokens))).square().mean()
        return loss

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(0, self.vocabulary, (2, 32), generator=generator),)


class Single(BenchmarkModel):
    """One layer like DRAGONN's extreme classification, a sixteenth as large."""

    title = "one layer of 7.9 M"
    numel = 126_700_000 // 16

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, self.numel // 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x).square().mean()
        return loss

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randn(1, 128, generator=generator),)


class Small800(BenchmarkModel):
    """Many small tensors, where the calls for each of them decide: 4.4 M in 800."""

    title = "800 tensors, 4.4 M"
    fewest, most = 1_000, 10_000

    def __init__(self) -> None:
        super().__init__()
        numels = torch.linspace(self.fewest, self.most, 800).int().tolist()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(numel)) for numel in numels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(
            [(p * x[: p.numel()]).tanh().square().mean() for p in self.scales]
        ).mean()

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randn(self.most, generator=generator),)


class Tiny(BenchmarkModel):
    """For trials of a benchmark itself: 0.1 M in four tensors."""

    title = "tiny, 0.1 M"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 32))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randn(4, 64, generator=generator),)


class Waited(torch.autograd.Function):
    """A layer whose backward takes a time, and whose weight has a given gradient."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, weight: Tensor, gradient: Tensor, wait_s: float) -> Tensor:
        ctx.gradient, ctx.wait_s = gradient, wait_s
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        time.sleep(ctx.wait_s)  # as on a device: the processor is free meanwhile
        return outputs[0], ctx.gradient.clone(), None, None


class Simulated(BenchmarkModel):
    """Another model's tensors, and a backward that only waits.

    Attributes:
        like: The other model's name.
        backward_s: Seconds of a backward; each tensor's share is in proportion to its elements.
        gradients: Those of every step; all such models of a process share them.
    """

    like: ClassVar[str]
    backward_s = 0.15
    gradients: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(shape) for shape in shapes_of(self.like))
        total = sum(p.numel() for p in self.tensors)
        self.waits_s = [self.backward_s * p.numel() / total for p in self.tensors]

    def forward(self) -> Tensor:
        chain = torch.zeros(1, requires_grad=True)
        for layer in zip(self.tensors, self.gradients, self.waits_s, strict=True):
            chain = Waited.apply(chain, *layer)  # type: ignore[no-untyped-call]
        return chain.sum()

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Nothing; the first call draws the gradients."""
        if not self.gradients:
            drawn = [torch.randn(p.shape, generator=generator) for p in self.tensors]
            type(self).gradients = drawn
        return ()


class SimulatedVgg16(Simulated):
    title = "VGG-16, backward simulated"
    like = "vgg16"


class SimulatedBertBase(Simulated):
    title = "BERT-base, backward simulated"
    like = "bert-base"


MODELS: dict[str, type[BenchmarkModel]] = {
    "vgg16": Vgg16,
    "transformer35": Transformer35,
    "lstm": Lstm24,
    "resnet50": ResNet50,
    "extreme": Extreme,
    "recommendation": Recommendation,
    "bert-base": BertBase,
    "vgg16-simulated": SimulatedVgg16,
    "bert-base-simulated": SimulatedBertBase,
    "cnn": Cnn,
    "transformer": SmallTransformer,
    "single": Single,
    "small800": Small800,
    "tiny": Tiny,
}


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """The shapes of a model's tensors, in its order."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in MODELS[model]().parameters()]


def images_and_labels(
    batch: int, size: int, classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random images, and a random label for each."""
    images = torch.randn(batch, 3, size, size, generator=generator)
    return images, torch.randint(classes, (batch,), generator=generator)


def zipf(shape: tuple[int, ...], numel: int, generator: torch.Generator) -> Tensor:
    """Numbers below `numel`; the i-th is about 1/i as frequent as the first."""
    draws = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (numel**draws).long() - 1
