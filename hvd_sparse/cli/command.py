"""What a subcommand is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_sparse.tables import table

__all__ = ["Command", "Output", "no_arguments", "table"]


@dataclass(frozen=True)
class Output:
    """What a subcommand found.

    Attributes:
        report: The finding, as plain containers; `--json` prints it.
        text: The same for people.
        status: The process's exit status: 0 where all is well, 1 where something found is not.
    """

    report: dict[str, Any]
    text: str
    status: int = 0


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: As it is typed.
        summary: One line for `hvd-sparse --help`.
        examples: Whole command lines, for its own help.
        add_arguments: Adds its arguments; `--json` is there already.
        run: Does the work; None is for ranks that have nothing to tell. A `HvdSparseError` or an
            `OSError` reaches the user as one line.
        json_file: Whether `--json` names a file to write beside the text, instead of printing JSON.
    """

    name: str
    summary: str
    examples: Sequence[str]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Output | None]
    json_file: bool = False


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """For a subcommand without arguments of its own."""
