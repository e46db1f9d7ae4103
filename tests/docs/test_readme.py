"""The README's claims are rows of docs/results.md, and the guides' files are what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hvd_sparse
from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
LAUNCH = ROOT / "examples" / "launch"
WAYS = {  # columns of the README, rows of the results
    "Horovod": "Horovod",
    "its fp16": "Horovod, fp16",
    "DDP, bf16": "DDP, bf16",
    "DDP, PowerSGD of rank 2": "DDP, PowerSGD of rank 2",
    "`topk`, 0.01": "`topk`, density 0.01",
    "computing alone": "computing alone",
}


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the first table whose head begins with a word."""
    rows: list[list[str]] = []
    for line in text[text.index(f"| {first} |" if first == "way" else f"| {first}") :].splitlines():
        if not line.startswith("|"):
            break
        rows.append([cell.strip(" *") for cell in line.strip("| ").split("|")])
    return [rows[0], *rows[2:]]


def test_each_time_of_a_step_is_a_result() -> None:
    head, *rows = table(README, "a training step")
    of_results = table(RESULTS, "way")
    models = [cell.replace(", 35 M", "") for cell in of_results[0]]
    found = {row[0]: row for row in of_results[1:]}
    assert len(rows) == 6
    for row in rows:
        case = re.sub(r", [\d.]+ M", "", row[0])
        place = [re.sub(r", [\d.]+ M", "", model) for model in models].index(case)
        for column, cell in zip(head[1:], row[1:], strict=True):
            assert cell == f"{found[WAYS[column]][place].split(' ')[0]} ms", (row[0], column)


def test_the_times_to_a_loss_are_results() -> None:
    claims = re.search(r"after (\d+) s\. Horovod needs (\d+) s, PowerSGD of rank 2 (\d+) s", README)
    assert claims is not None
    rows = [line for line in RESULTS.splitlines() if "| 1 Gb/s | Horovod |" in line]
    after = RESULTS[RESULTS.index(rows[0]) :].splitlines()
    ours = next(line for line in after if "`topk`, density 0.05, `float16+gap`" in line)
    power = next(line for line in after if "PowerSGD of rank 2" in line)
    for seconds, line in zip(claims.groups(), (ours, rows[0], power), strict=True):
        assert re.search(rf"\b{seconds} s\b", line), (seconds, line)


def test_its_size_and_what_it_admits() -> None:
    assert len(README.splitlines()) <= 100
    for words in ("one machine with two cores", "emulated network hosts", "No cluster"):
        assert words in README


def test_the_guides_files_are_well_formed() -> None:
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    assert job["kind"] == "MPIJob"
    replicas = job["spec"]["mpiReplicaSpecs"]
    command = replicas["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert command[2] == str(replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"])
    assert not subprocess.run(["bash", "-n", LAUNCH / "slurm.sbatch"], check=False).returncode
    lines = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    known = {"FROM", "SHELL", "RUN", "WORKDIR", "COPY", "ENV", "CMD", "#"}
    assert {line.split()[0] for line in lines if line.strip()} == known


def test_the_dockerfile_has_no_finding() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("the extra dev is older than its hadolint: make setup")
    done = subprocess.run(
        [hadolint, LAUNCH / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.slow
def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    for name in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(name, reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api.html").read_text()
    for name in set(hvd_sparse.__all__) - {"__version__"}:
        assert name in api, name
    assert (tmp_path / "search" / "search_index.json").exists()
