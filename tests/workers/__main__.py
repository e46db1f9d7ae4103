"""`python -m tests.workers MODULE:FUNCTION ARGS…`: calls a function as one rank of a job."""

from __future__ import annotations

import sys
from importlib import import_module

import horovod.torch as hvd
import torch


def main() -> None:
    name, *arguments = sys.argv[1:]
    module, _, function = name.partition(":")
    torch.set_num_threads(1)
    hvd.init()
    getattr(import_module(module), function)(*arguments)
    hvd.shutdown()


if __name__ == "__main__":
    main()
