"""What a subcommand is."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hvd_sparse.errors import ConfigError


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


# MERGED cli.model
# A model given on the command line as `module:factory`.


def load_model(text: str) -> nn.Module:
    """Import a module, as Python run in the current directory would, and call its factory.

    Raises:
        ConfigError: There is no such thing, it fails, or it makes no `torch.nn.Module`.
    """
    module_name, _, factory_name = text.partition(":")
    if not module_name or not factory_name:
        raise ConfigError(
            f"model must be module:factory, as torchvision.models:resnet18; got {text!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
        model = factory()
    except Exception as error:  # whatever the user's code raises
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"model {text!r} cannot be made: {words}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {text!r} is no torch.nn.Module but a {type(model).__name__}")
    return model
