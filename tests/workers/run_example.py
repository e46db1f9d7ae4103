"""Runs a script on ranks that are there already, as `python SCRIPT ARGUMENTS` would."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from unittest.mock import patch


def run_example(script: str, *arguments: str) -> None:
    """Run a script of the repository.

    `hvd.init` has been called on these ranks, so that the script's own call changes nothing, as
    Horovod promises; the script leaves `hvd.shutdown` to the end of the process.
    """
    path = Path(__file__).resolve().parents[2] / script
    with (
        patch.object(sys, "argv", [str(path), *arguments]),
        patch.object(sys, "path", [os.fspath(path.parent), *sys.path]),
    ):
        runpy.run_path(str(path), run_name="__main__")
