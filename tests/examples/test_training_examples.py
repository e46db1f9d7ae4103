"""The training examples, in a short form."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, horovodrun, launch_environment, run_in_group

EXAMPLES = REPOSITORY / "examples"
SHORT_BENCHMARK = ("--batch-size", 1, "--num-warmup-batches", 1, "--num-batches-per-iter", 1)
SHORT_TRAINING = ("--most-bytes", 20_000, "--width", 32, "--length", 32, "--batch-size", 32)


@pytest.mark.launches
def test_the_synthetic_benchmark_counts_images_and_bytes() -> None:
    done = horovodrun(
        2,
        EXAMPLES / "pytorch_synthetic_benchmark.py",
        *(*SHORT_BENCHMARK, "--num-iters", 2, "--compression", "topk density=0.001"),
    )
    assert len(re.findall(r"Iter #\d: [\d.]+ img/sec per CPU", done.stdout)) == 2
    sent = re.search(r"Sent sparsely by a worker in a step: (\d+) kB of 58.9 MB", done.stdout)
    assert sent is not None
    assert 0.5 * 118 < int(sent[1]) < 1.5 * 118  # 8 bytes for one element of a thousand


@pytest.mark.launches
def test_the_language_model_learns_and_goes_on(tmp_path: Path) -> None:
    script = EXAMPLES / "pytorch_language_model.py"
    options = (*SHORT_TRAINING, "--lr", 0.01, "--checkpoint", tmp_path / "checkpoint")
    options += ("--compression", "oktopk density=0.05 dense_below=0")
    first = horovodrun(2, script, *options, "--epochs", 1)
    second = horovodrun(2, script, *options, "--epochs", 3)
    assert "Trained 2 epochs" in second.stdout
    losses = [
        float(re.findall(r"Average loss: ([\d.]+)", done.stdout)[0]) for done in (first, second)
    ]
    assert losses[1] < losses[0] < 5.55  # the logarithm of 256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("pytorch_synthetic_benchmark.py", "topq density=0.1"),
        ("pytorch_synthetic_benchmark.py", "missing.yaml"),
        ("pytorch_language_model.py", "topk density=2"),
        ("pytorch_language_model.py", "topk densty=0.1"),
    ],
)
def test_a_bad_compression_is_refused(name: str, wrong: str) -> None:
    short = SHORT_BENCHMARK if "synthetic" in name else SHORT_TRAINING
    command = [sys.executable, EXAMPLES / name, "--compression", wrong, *short]
    environment = launch_environment()
    done = run_in_group(list(map(str, command)), env=environment, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert f"error: --compression '{wrong}': " in done.stderr
