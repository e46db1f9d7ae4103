"""Runs a script on ranks that are there already, as `python SCRIPT ARGUMENTS` would."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path
from unittest.mock import patch


def run_example(script: str, *arguments: str) -> list[str]:
    """Run a script of the repository; what it warned of.

    `hvd.init` has been called on these ranks, so that the script's own call changes nothing, as
    Horovod promises; the script leaves `hvd.shutdown` to the end of the process.
    """
    path = Path(__file__).resolve().parents[2] / script
    with (
        patch.object(sys, "argv", [str(path), *arguments]),
        patch.object(sys, "path", [os.fspath(path.parent), *sys.path]),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        runpy.run_path(str(path), run_name="__main__")
    return [str(warning.message) for warning in caught]
