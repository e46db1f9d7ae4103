"""Ruff demands docstrings on the public face, and only there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

FACE = (
    "__init__",
    "adapter/compressor",
    "compression",
    "errors",
    "functional/api",
    "lab/simulator/simulation",
    "optim",
    "planner/planner",
    "policy/load",
    "recording/recorder",
    "streams/stream",
)


@pytest.mark.parametrize(
    ("module", "is_demanded"),
    [*((module, True) for module in FACE), ("topology", False), ("engine/engine", False)],
)
def test_the_face_has_docstrings(module: str, is_demanded: bool) -> None:
    path = ROOT / "hvd_sparse" / f"{module}.py"
    assert path.is_file()
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", str(path), "-"]
    done = subprocess.run(
        [*command, "--output-format=concise"],
        input='"""A module."""\n\n\ndef name() -> None:\n    pass\n',
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ("D103" in done.stdout) == is_demanded, done.stdout + done.stderr
