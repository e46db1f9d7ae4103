"""The entry point: parses the arguments, runs one subcommand, and returns its exit status."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_sparse._version import __version__
from hvd_sparse.cli.check import CHECK
from hvd_sparse.cli.command import Command
from hvd_sparse.cli.plan import PLAN
from hvd_sparse.cli.profile import PROFILE
from hvd_sparse.cli.report import REPORT, TRACE
from hvd_sparse.cli.simulate import SIMULATE
from hvd_sparse.cli.top import TOP
from hvd_sparse.cli.tuned import TUNED
from hvd_sparse.cli.validate import VALIDATE
from hvd_sparse.errors import HvdSparseError, say
from hvd_sparse.files import write_text

COMMANDS: tuple[Command, ...] = (
    *(CHECK, TUNED, PLAN, PROFILE, REPORT, TOP, TRACE, VALIDATE, SIMULATE),
)

FAILED = 2
"""Exit status of a command that failed; argparse has the same for wrong arguments."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvd-sparse", description="Tools for gradient sparsification with Horovod."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog="examples:\n" + "\n".join(f"  {example}" for example in command.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command.json_file:
            subparser.add_argument("--json", type=Path, metavar="FILE", help="also write JSON")
        elif command is not TUNED:
            subparser.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hvd-sparse`; returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of α, a terminal that lacks it shows ?
    options = make_parser().parse_args(arguments)
    command: Command = options.command
    try:
        output = command.run(options)
        if output is None:
            return 0
        report = json.dumps(output.report, indent=2)
        try:
            print(report if options.json is True else output.text, flush=True)
        except BrokenPipeError:  # the reader, `head` say, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(options.json, Path):  # last, because it may not be writable
            write_text(options.json, report + "\n")
    except (HvdSparseError, OSError) as error:
        told = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            told = f"{error.filename}: {error.strerror}"
        say(f"hvd-sparse {command.name}: {told}")
        return FAILED
    except KeyboardInterrupt:
        say(f"hvd-sparse {command.name}: interrupted")
        return INTERRUPTED
    return output.status
