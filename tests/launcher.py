"""`horovodrun`, but that it is told what Horovod was built with: `python -m tests.launcher …`.

To find that out, Horovod's own command imports torch in a process, at each launch: three seconds of
a core. Examples, the demo and the benchmarks are launched by Horovod's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from horovod.runner import launch

from tests.launch import BUILT_VARIABLE


def told(name: str) -> Callable[..., bool]:
    """In the place of Horovod's `gloo_built` or `mpi_built`."""
    return lambda verbose=False: name in os.environ[BUILT_VARIABLE].split()


if __name__ == "__main__":
    launch.gloo_built, launch.mpi_built = told("gloo"), told("mpi")
    sys.exit(launch.run_commandline())
