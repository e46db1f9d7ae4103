"""The examples, in a short form, under gloo and MPI: each runs as its command would."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from hvd_sparse.lab.report.log import read_runs
from tests.ranks import Ranks, World, with_ranks


def run_example(script: str, *arguments: str) -> list[str]:
    """Run a script of the repository; what it warned of.

    `hvd.init` has been called on these ranks, so that the script's own call changes nothing, as
    Horovod promises; the script leaves `hvd.shutdown` to the end of the process.
    """
    path = Path(__file__).resolve().parents[2] / script
    with (
        patch.object(sys, "argv", [str(path), *arguments]),
        patch.object(torch.cuda, "is_available", lambda: False),  # there may be one for all ranks
        patch.object(sys, "path", [os.fspath(path.parent), *sys.path]),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        runpy.run_path(str(path), run_name="__main__")
    return [str(warning.message) for warning in caught]


GLOO, MPI = World(2), World(2, "mpi")
SHORT_TEXT = ("--most-bytes=20000", "--length=32", "--batch-size=32")
SHORT_RATINGS = ("--users=50", "--items=20", "--ratings=2000", "--width=8", "--batch-size=50")
SHORT_RATINGS += ("--lr=0.1",)
SHORT_RESNET = ("--image-size=32", "--batch-size=2", "--val-batch-size=2")


def example(ranks: Ranks, name: str, *arguments: object) -> str:
    """What the first worker prints; the others keep silent."""
    done = ranks.run(run_example, f"examples/{name}", *map(str, arguments))
    assert done[1].output == ""
    assert not [words for words in done[0].result if "other weights than" in words]
    return done[0].output


def write_separable(path: Path, rows: int, features: int) -> None:
    """Samples of two classes that differ in a few of their features."""
    choose = random.Random(3)
    lines = []
    for row in range(rows):
        label = row % 2
        telling = {label * 10 + choose.randrange(10) + 1 for _ in range(3)}
        other = {choose.randrange(20, features) + 1 for _ in range(5)}
        pairs = " ".join(f"{i}:{choose.uniform(0.5, 2):.3f}" for i in sorted(telling | other))
        lines.append(f"{label + 1} {pairs}  # row {row}")
    path.write_text("\n".join(lines) + "\n")


def loss_in(output: str) -> float:
    return float(re.findall(r"Average loss: ([\d.]+)", output)[0])


@pytest.mark.slow
@with_ranks(GLOO)
def test_the_synthetic_benchmark_counts_images_and_bytes(ranks: Ranks) -> None:
    out = example(
        ranks,
        "pytorch_synthetic_benchmark.py",
        *("--batch-size=1", "--num-warmup-batches=1", "--num-batches-per-iter=1"),
        *("--num-iters=2", "--compression=topk density=0.001"),
    )
    assert len(re.findall(r"Iter #\d: [\d.]+ img/sec per CPU", out)) == 2
    sent = re.search(r"Sent sparsely by a worker in a step: (\d+) kB of 58.9 MB", out)
    assert sent is not None
    assert 0.5 * 118 < int(sent[1]) < 1.5 * 118  # 8 bytes for one element of a thousand


@with_ranks(GLOO)
def test_the_language_model_learns_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 400)
    options = (*SHORT_TEXT, "--width=32", "--lr=0.01", f"--checkpoint={tmp_path / 'checkpoint'}")
    options += (f"--data={text}", "--compression=oktopk density=0.05 dense_below=0")
    first, second = (
        example(ranks, "pytorch_language_model.py", *options, f"--epochs={n}") for n in (1, 3)
    )
    assert "Trained 2 epochs" in second
    options = (*options[:-1], f"--checkpoint={tmp_path / 'dense'}", "--optimizer=adamw")
    example(ranks, "pytorch_language_model.py", *options, "--compression=none", "--epochs=1")
    options += ("--compression=oktopk density=0.05 dense_below=0",)
    assert "Trained 1 epochs" in example(
        ranks, "pytorch_language_model.py", *options, "--epochs=2"
    )  # a dense training goes on as a sparse one
    assert loss_in(second) < loss_in(first) < 5.55  # the logarithm of 256


@with_ranks(GLOO, MPI)
def test_bert_learns_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    options = (*SHORT_TEXT, "--vocabulary=400", "--hidden=32", "--layers=1", "--lr=0.01")
    options += (f"--checkpoint={tmp_path / 'checkpoint'}", f"--record={tmp_path / 'run.jsonl'}")
    options += ("--compression=examples/policies/transformer.yaml",)
    first, second = (
        example(ranks, "pytorch_bert_pretraining.py", *options, f"--epochs={n}") for n in (1, 3)
    )
    assert loss_in(second) < loss_in(first) < 6  # the logarithm of 400
    state = torch.load(tmp_path / "checkpoint" / "model.pt", weights_only=True)
    assert state["epochs"] == 3
    runs = read_runs(tmp_path / "run.jsonl")
    counts = [sum(line["steps"] for line in run.steps) for run in runs]
    assert counts[1] == 2 * counts[0] > 0


@with_ranks(GLOO, MPI)
def test_sparse_tables_lose_nothing(ranks: Ranks) -> None:
    gathered, exchanged = (
        example(ranks, "pytorch_recommendation.py", *SHORT_RATINGS, f"--compression={compression}")
        for compression in ("none", "topk dense_below=1000000")
    )
    assert loss_in(exchanged) == pytest.approx(loss_in(gathered), abs=2e-4)
    assert loss_in(exchanged) < 0.6


@with_ranks(GLOO)
def test_dense_tables_are_sent_by_the_policy(ranks: Ranks, tmp_path: Path) -> None:
    lines = ["userId,movieId,rating,timestamp"]
    lines += [f"{7 * u},{3 * i},{5 if (u + i) % 2 else 2.5},0" for u in range(60) for i in range(9)]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    out = example(
        ranks,
        "pytorch_recommendation.py",
        *(f"--data={tmp_path / 'ratings.csv'}", "--tables=dense", "--width=8", "--batch-size=16"),
        *("--compression=examples/policies/recommendation.yaml", "--epochs=20"),
        f"--record={tmp_path / 'run.jsonl'}",
    )
    assert loss_in(out) < 0.6
    plan = read_runs(tmp_path / "run.jsonl")[0].plans[0]
    assert [sorted(bucket["names"]) for bucket in plan.buckets] == [["item.weight", "user.weight"]]


@pytest.mark.slow
@with_ranks(GLOO)
def test_resnet_reads_folders_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(12):
        part = "val" if number >= 8 else "train"
        name = "dark" if number % 2 else "light"
        folder = tmp_path / part / name
        folder.mkdir(parents=True, exist_ok=True)
        shade = 20 * number + (200 if name == "light" else 0)
        image.new("RGB", (40 + number, 48), (shade % 256, shade // 2 % 256, 7)).save(
            folder / f"{number}.png"
        )
    options = (*SHORT_RESNET, f"--train-dir={tmp_path / 'train'}", f"--val-dir={tmp_path / 'val'}")
    options += (f"--checkpoint-format={tmp_path}/{{epoch}}.pt",)
    options += ("--compression=examples/policies/cnn.yaml",)
    name = "pytorch_imagenet_resnet50.py"
    first = example(ranks, name, *options, "--epochs=1", "--batches-per-allreduce=2")
    second = example(ranks, name, *options, "--epochs=2")  # two steps: weights are compared
    assert re.findall(r"#(\d): loss [\d.]+, accuracy", first) == ["1", "1"]
    assert re.findall(r"#(\d): loss [\d.]+, accuracy", second) == ["2", "2"]


@with_ranks(MPI)
def test_resnet_trains_on_images_of_its_own(ranks: Ranks) -> None:
    options = (*SHORT_RESNET, "--synthetic-images=8", "--epochs=1", "--compression=oktopk")
    out = example(ranks, "pytorch_imagenet_resnet50.py", *options)
    assert "Train Epoch #1: loss" in out
    assert "Validate Epoch #1: loss" in out


@with_ranks(GLOO)
def test_both_exchanges_of_linear_models_learn_the_same(ranks: Ranks, tmp_path: Path) -> None:
    write_separable(tmp_path / "data.svm", 400, 2000)
    out = example(
        ranks,
        "sparse_linear.py",
        *(f"--data={tmp_path / 'data.svm'}", "--exchange=both", "--loss=hinge", "--epochs=4"),
        *("--batch-size=20", f"--metrics={tmp_path / 'metrics.json'}"),
    )
    assert "times as fast" in out
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["sparse"]["accuracy"] == found["dense"]["accuracy"] > 0.95
    assert found["sparse"]["loss"] == pytest.approx(found["dense"]["loss"], rel=1e-3)
    assert found["sparse"]["entries_per_step"] < 200 < found["dense"]["entries_per_step"]


@with_ranks(GLOO, MPI)
def test_coordinate_descent_gathers_all_steps(ranks: Ranks, tmp_path: Path) -> None:
    write_separable(tmp_path / "data.svm", 200, 400)
    out = example(
        ranks,
        "sparse_coordinates.py",
        *(f"--data={tmp_path / 'data.svm'}", "--exchange=both", "--coordinates=40", "--epochs=3"),
        f"--metrics={tmp_path / 'metrics.json'}",
    )
    falling = [float(found) for found in re.findall(r"sparse, .*objective ([\d.]+)", out)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < falling[0] < 0.694  # the logarithm of 2
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["sparse"]["accuracy"] == found["dense"]["accuracy"] > 0.85
    assert found["sparse"]["loss"] == pytest.approx(found["dense"]["loss"], rel=1e-4)
    assert found["sparse"]["entries_per_step"] == 40
    assert found["dense"]["entries_per_step"] == 200  # a worker's slice
