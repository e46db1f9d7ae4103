"""`python -m tests.call MODULE:FUNCTION ARGS…`: calls a function as one rank of a job."""

from __future__ import annotations

import sys
from importlib import import_module

import horovod.torch as hvd

from tests.lean import start_lean


def main() -> None:
    name, *arguments = sys.argv[1:]
    module, _, function = name.partition(":")
    called = getattr(import_module(module), function)
    start_lean()
    hvd.init()
    called(*arguments)
    hvd.shutdown()


if __name__ == "__main__":
    main()
