"""`hvd-sparse tuned`: starts a job with what is quicker than the defaults on busy hosts."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType

from hvd_sparse import cores
from hvd_sparse.cli.command import Command, Output
from hvd_sparse.errors import ConfigError, say

SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # Horovod's threads wake up so often (ms), though they have one small tensor in a step.
        "cycle-time": {"HOROVOD_CYCLE_TIME": "10"},
        # glibc gives large blocks back when they are freed, and the next step pays for new pages.
        "malloc": {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)},
        "binding": {cores.VARIABLE: "1"},
    }
)
"""By the option that leaves them out. The launcher passes them on to all workers."""


def missing(left_out: Mapping[str, object] = MappingProxyType({})) -> dict[str, str]:
    """What `tuned` would set here: variables of the environment that are set stay as they are."""
    return {
        name: value
        for option, settings in SETTINGS.items()
        for name, value in settings.items()
        if not left_out.get(f"no_{option}".replace("-", "_")) and name not in os.environ
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, settings in SETTINGS.items():
        parser.add_argument(
            f"--no-{option}", action="store_true", help=f"leave {', '.join(settings)} as it is"
        )
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="COMMAND", help="starts the job")


def run(options: argparse.Namespace) -> Output | None:
    """Become the job's launcher: its signals and its exit status are the command's own."""
    if options.job[:1] == ["--"]:
        del options.job[0]
    if not options.job:
        raise ConfigError("COMMAND must start a job, as horovodrun -np 4 python train.py; got none")
    if shutil.which(options.job[0]) is None:
        raise ConfigError(f"there is no command {options.job[0]!r} in PATH")
    added = missing(vars(options))
    told = " ".join(f"{name}={value}" for name, value in added.items()) or "nothing: all is set"
    say(f"hvd-sparse tuned: sets {told}")
    os.execvpe(options.job[0], options.job, {**os.environ, **added})
    return None


TUNED = Command(
    name="tuned",
    summary="start a job with Horovod's cycle, malloc and cores set for compressed training",
    examples=(
        "hvd-sparse tuned horovodrun -np 4 python train.py",
        "hvd-sparse tuned --no-binding horovodrun -np 4 python train.py",
    ),
    add_arguments=add_arguments,
    run=run,
)
