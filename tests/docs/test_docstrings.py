"""Ruff demands docstrings on the public face, and only there."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hvd_sparse
from tests.docs.pages import ROOT

PUBLIC = [getattr(hvd_sparse, name) for name in hvd_sparse.__all__ if name[0] != "_"]
NAMED = {getattr(found, "__module__", found.__name__) for found in PUBLIC}
FACE = {
    *NAMED,
    "hvd_sparse.adapter.compressor",
    "hvd_sparse.lab.simulator.simulation",
    "hvd_sparse.planner.planner",
    "hvd_sparse.policy.load",
}


@pytest.mark.parametrize(
    ("module", "is_demanded"),
    [
        *((module, True) for module in sorted(FACE)),
        ("hvd_sparse.topology", False),
        ("hvd_sparse.engine.engine", False),
    ],
)
def test_the_face_has_docstrings(module: str, is_demanded: bool) -> None:
    path = str(importlib.import_module(module).__file__)
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", path, "-"]
    done = subprocess.run(
        [*command, "--output-format=concise"],
        input='"""A module."""\n\n\ndef name() -> None:\n    pass\n',
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ("D103" in done.stdout) == is_demanded, done.stdout + done.stderr
