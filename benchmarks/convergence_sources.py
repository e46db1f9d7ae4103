"""A larger text for benchmarks.convergence: the sources of Python and of installed packages.

Files are taken in the order of their contents' SHA-256, each content once, until there are 16 MB. A
file is read for the test where its hash says so, so no file is in both parts. The hash of all of it
is kept with every training: other versions of Python or torch are another text.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.convergence_tasks import Budget, Recipe, Text

LIMIT_BYTES = 16_000_000
PACKAGES = ("numpy", "scipy", "sklearn", "torch")
ALPHABET = bytes(range(32, 127)) + b"\n"


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
    """A feed-forward network of 2.1 million parameters on 16 MB of Python."""

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
