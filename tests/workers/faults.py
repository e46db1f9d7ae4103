"""What can go wrong on ranks that stay."""

from __future__ import annotations

import os
import time

import horovod.torch as hvd


def fail_on_rank_1() -> None:
    print(f"rank {hvd.rank()} was here")
    if hvd.rank() == 1:
        raise ValueError("not today")


def hang_on_rank_1() -> None:
    while hvd.rank() == 1:
        time.sleep(0.1)


def die_on_rank_1() -> None:
    if hvd.rank() == 1:
        os._exit(0)


def variable(name: str) -> str | None:
    return os.environ.get(name)
