"""The text that language models are trained on."""

from __future__ import annotations

import pytest
import torch

from benchmarks.corpus import Vocabulary, python_sources, windows

MOST_BYTES = 6_000_000


def test_the_sources_are_the_same_every_time_and_split_by_file() -> None:
    first, again = (python_sources(MOST_BYTES, packages=()) for _ in range(2))
    assert first == again
    assert len(first.train) + len(first.validation) == pytest.approx(MOST_BYTES, rel=0.01)
    assert 0 < len(first.validation) < len(first.train) / 4


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'no_such_package'"):
        python_sources(MOST_BYTES, packages=("no_such_package",))
    with pytest.raises(ValueError, match="got 100"):
        python_sources(100, packages=())
    with pytest.raises(ValueError, match="size must be at least 256, got 255"):
        Vocabulary.of(b"text", 255)


def test_tokens_are_text_without_loss() -> None:
    text = "for x in range(10):\n    print(x)  # déjà\n\x00for".encode()
    vocabulary = Vocabulary.of(text, 258)
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens) == text
    assert len(vocabulary) == 258
    assert len(tokens) < len(text)
    assert torch.equal(vocabulary.encode(b"\xff"), torch.tensor([255]))


def test_windows_reach_both_ends() -> None:
    tokens = torch.arange(6)
    inputs, targets = windows(tokens, 200, 3, torch.Generator().manual_seed(0))
    assert torch.equal(targets, inputs + 1)
    assert {*inputs[:, 0].tolist()} == {0, 1, 2}
