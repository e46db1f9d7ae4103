"""The sparse linear example: its data, its losses, its model."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.sparse_linear import (
    LOSSES,
    LinearModel,
    python_texts,
    read_libsvm,
    samples_of,
    trigrams,
)


def test_a_libsvm_file_is_shared_out(tmp_path: Path) -> None:
    path = tmp_path / "data.svm"
    path.write_text("-1 1:0.5 7:2\n\n+1 3:1e-1 # a comment\n-1\n1 2:-1 4:1\n")
    whole, labels = read_libsvm(path, 0, 1)
    assert labels == [-1.0, 1.0, -1.0, 1.0]
    assert [columns.tolist() for columns, _ in whole] == [[0, 6], [2], [], [1, 3]]
    shares = [read_libsvm(path, rank, 2) for rank in range(2)]
    assert shares[0][1] == [-1.0, -1.0]
    assert shares[1][1] == [1.0, 1.0]
    assert [c.tolist() for c, _ in shares[1][0]] == [[2], [1, 3]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1:2\n2 x:3\n", "line 2"),
        ("1 1:2\n2 0:3\n", "line 2: indices begin at 1"),
        ("1 1:2\n1 2:3\n", "must have two labels"),
        ("1 1:2\nyes 2:3\n", "line 2"),
    ],
)
def test_a_bad_file_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "data.svm"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_libsvm(path, 0, 1)


def test_text_becomes_trigrams() -> None:
    pieces = list(islice(python_texts(), 400))
    assert {label for label, _ in pieces} == {1.0, -1.0}
    columns, values = trigrams("the cat and the cat", 5000)
    assert bool((np.diff(columns.astype(np.int64)) > 0).all())
    assert columns.max() < 5000
    # 17 trigrams of characters, of which " ca", "cat", "the", "he ", "e c" come twice; 3 of words.
    assert sum(values**2) == pytest.approx(20)


def test_rows_are_taken_in_any_order() -> None:
    rows = [(np.array([1, 4]), np.array([3.0, 4.0])), (np.array([], dtype=np.int64), np.zeros(0))]
    rows += [(np.array([2]), np.array([5.0]))]
    samples = samples_of(rows, [1.0, -1.0, 1.0], 6)
    place, columns, values = samples.take(torch.tensor([2, 1, 0]))
    assert place.tolist() == [0, 2, 2]
    assert columns.tolist() == [2, 1, 4]
    assert values.tolist() == pytest.approx([1.0, 0.6, 0.8])


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_derivatives(loss: str) -> None:
    margins = torch.tensor([-2.0, -0.5, 0.3, 1.7], requires_grad=True)
    values, derivatives = LOSSES[loss](margins)
    (expected,) = torch.autograd.grad(values.sum(), margins)
    torch.testing.assert_close(derivatives.detach(), expected)


def test_decay_is_that_of_all_weights() -> None:
    model, reference = LinearModel(4), torch.zeros(4)
    for step in range(5):
        gradient = torch.tensor([1.0, -2.0]) * (step + 1)
        model.step(torch.tensor([0, 2]), gradient, 0.1, 0.05)
        reference *= 1 - 0.1 * 0.05
        reference[[0, 2]] -= 0.1 * gradient
    torch.testing.assert_close(model.v * model.scale, reference)
