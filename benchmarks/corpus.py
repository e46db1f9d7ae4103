"""Text for language models: the installed Python sources.

    corpus = python_sources()
    vocabulary = Vocabulary.of(corpus.train, 8192)
    tokens = vocabulary.encode(corpus.train)
    inputs, targets = windows(tokens, batch=8, length=64, generator=generator)

The hash of a file's content decides between training and validation, so that copies of one file are
on the same side. `Corpus.digest` identifies the text of a result.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

MOST_BYTES = 24_000_000
VALIDATION_PART = 20
"""One file in so many is kept for validation."""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
"""Folders of the standard library that are not its own code, or are tests."""
PIECE = re.compile(rb"[A-Za-z_]+|[0-9]|[ \t]+|\n|[^A-Za-z_0-9 \t\n]")
BYTES = 256


@dataclass(frozen=True)
class Corpus:
    """Text in two parts.

    Attributes:
        train: The bytes to train on.
        validation: The bytes to validate with; no file is in both parts.
        digest: Identifies the content: 12 hexadecimal digits of its hash.
    """

    train: bytes
    validation: bytes
    digest: str


def python_sources(most_bytes: int = MOST_BYTES, packages: Sequence[str] = ("torch",)) -> Corpus:
    """The standard library and the named packages, in the order of their files' hashes.

    Args:
        most_bytes: Files beyond so many bytes are left out.
        packages: Installed packages whose files are also taken.

    Raises:
        ValueError: A package is not installed, or there is too little text.
    """
    files = {sha256(data).hexdigest(): data for data in map(Path.read_bytes, _files(packages))}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    digest, taken = sha256(), 0
    for name in sorted(files):
        if taken + len(files[name]) > most_bytes:
            continue
        taken += len(files[name])
        digest.update(name.encode())
        parts[int(name[-8:], 16) % VALIDATION_PART == 0].append(files[name])
    train, validation = (b"\n".join(part) for part in parts)
    if not train or not validation:
        raise ValueError(f"most_bytes must leave files for both parts, got {most_bytes}")
    return Corpus(train, validation, digest.hexdigest()[:12])


def _files(packages: Sequence[str]) -> Iterator[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in library.rglob("*.py"):
        if not LEFT_OUT & set(path.relative_to(library).parts):
            yield path
    for package in packages:
        found = find_spec(package)
        if found is None or found.origin is None:
            raise ValueError(f"packages must be installed, got {package!r}")
        yield from Path(found.origin).parent.rglob("*.py")


class Vocabulary:
    """Words, runs of blanks and signs by number; what is rare is spelled byte by byte.

    Numbers below 256 are bytes, so that every text can be encoded without loss.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [bytes([byte]) for byte in range(BYTES)] + list(pieces)
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}

    @classmethod
    def of(cls, text: bytes, size: int) -> Vocabulary:
        """The pieces that save the most tokens in a text.

        Raises:
            ValueError: `size` is below 256.
        """
        if size < BYTES:
            raise ValueError(f"size must be at least {BYTES}, got {size}")
        saved = {
            piece: count * (len(piece) - 1)
            for piece, count in Counter(PIECE.findall(text)).items()
            if len(piece) > 1
        }
        return cls(sorted(saved, key=lambda piece: (-saved[piece], piece))[: size - BYTES])

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: bytes) -> Tensor:
        """int64 `(tokens,)`."""
        numbers = self._numbers
        tokens: list[int] = []
        for piece in PIECE.findall(text):
            if piece in numbers:
                tokens.append(numbers[piece])
            else:
                tokens.extend(piece)
        return torch.tensor(tokens)

    def decode(self, tokens: Tensor) -> bytes:
        """The text of some tokens."""
        return b"".join(self.pieces[token] for token in tokens.tolist())


def windows(
    tokens: Tensor, batch: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A batch at random places: inputs, and the tokens that follow; int64 `(batch, length)`."""
    starts = torch.randint(len(tokens) - length, (batch, 1), generator=generator)
    places = starts + torch.arange(length)
    return tokens[places], tokens[places + 1]
