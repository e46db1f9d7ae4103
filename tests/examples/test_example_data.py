"""What the training examples read and hide, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import (
    pytorch_bert_pretraining,
    pytorch_imagenet_resnet50,
    pytorch_language_model,
    pytorch_recommendation,
    pytorch_synthetic_benchmark,
)
from examples.pytorch_bert_pretraining import MASK, NOT_ASKED, hide
from examples.pytorch_imagenet_resnet50 import ImageFolder, ResNet50, SyntheticImages
from examples.pytorch_recommendation import read_ratings

WITH_COMPRESSION = (
    pytorch_bert_pretraining,
    pytorch_imagenet_resnet50,
    pytorch_language_model,
    pytorch_recommendation,
    pytorch_synthetic_benchmark,
)


@pytest.mark.parametrize("module", WITH_COMPRESSION, ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    "wrong", ["topq density=0.1", "missing.yaml", "topk density=2", "topk densty=0.1"]
)
def test_a_bad_compression_is_refused(
    module: object, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        module.make_compression(wrong, torch.nn.Linear(2, 2), None)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: --compression '{wrong}': ")


def test_words_are_hidden_as_bert_hides_them() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(300, 8000, (400, 100), generator=generator)
    tokens, targets = hide(rows, 8000, generator)
    asked = targets != NOT_ASKED
    assert torch.equal(targets[asked], rows[asked])
    assert torch.equal(tokens[~asked], rows[~asked])
    assert float(asked.float().mean()) == pytest.approx(0.15, abs=0.01)
    hidden, kept = tokens[asked] == MASK, tokens[asked] == rows[asked]
    assert float(hidden.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(kept.float().mean()) == pytest.approx(0.1, abs=0.02)
    assert bool((hide(rows[:, :1], 8000, generator)[1] != NOT_ASKED).all())


@pytest.mark.parametrize("separator", [",", "\t", "::"])
def test_ratings_are_numbered(tmp_path: Path, separator: str) -> None:
    rows = [("30", "7", "4.0", "1"), ("10", "7", "3.5", "2"), ("30", "2", "5", "3")]
    (tmp_path / "r").write_text("\n".join(separator.join(row) for row in rows))
    users, items, clicked = read_ratings(tmp_path / "r", liked=4.0)
    assert users.tolist() == [1, 0, 1]
    assert items.tolist() == [1, 1, 0]
    assert clicked.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("user,item,rating\n1,2\n", "line 2: must be user, item and rating"), ("", "no ratings")],
)
def test_bad_ratings_are_refused_by_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r").write_text(text)
    with pytest.raises(SystemExit):
        read_ratings(tmp_path / "r", liked=4.0)
    assert message in capsys.readouterr().err


def test_resnet50_has_its_tensors() -> None:
    with torch.device("meta"):
        model = ResNet50(1000)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032  # as torchvision's
    assert len(list(model.parameters())) == 161


def test_images_of_a_folder_are_given_out(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label, shade in (("b", 255), ("a", 0)):
        (tmp_path / label).mkdir()
        image.new("L", (90, 60), shade).save(tmp_path / label / "1.png")
    (tmp_path / "b" / "notes.txt").write_text("no image")
    for is_training in (True, False):
        images = ImageFolder(tmp_path, 24, is_training)
        assert images.classes == ["a", "b"]
        assert [label for _, label in (images[0], images[1])] == [0, 1]
        dark, light = images[0][0], images[1][0]
        assert dark.shape == light.shape == (3, 24, 24)
        assert dark[0].unique().tolist() == pytest.approx([-0.485 / 0.229])
        assert light[2].unique().tolist() == pytest.approx([(1 - 0.406) / 0.225])


def test_images_of_its_own_are_the_same_on_all_workers() -> None:
    one, other = (SyntheticImages(20, 16, first=0) for _ in range(2))
    assert all(torch.equal(one[i][0], other[i][0]) and one[i][1] == i % 10 for i in range(20))
    assert not torch.equal(one[0][0], one[10][0])
    assert not torch.equal(one[0][0], SyntheticImages(20, 16, first=20)[0][0])
