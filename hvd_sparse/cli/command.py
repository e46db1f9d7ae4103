"""What a subcommand is, and the arguments that several of them share."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from hvd_sparse.adapter.session import RunOptions
from hvd_sparse.errors import ConfigError, one_line
from hvd_sparse.methods import METHODS
from hvd_sparse.policy.load import Policy, load_policy


@dataclass(frozen=True)
class Output:
    """What a subcommand found.

    Attributes:
        report: The result as plain containers, which `--json` prints.
        text: The result as text.
        status: The process's exit status: 0, or 1 where the subcommand found a problem.
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
        examples: Complete command lines, for its own help.
        add_arguments: Adds its arguments; `--json` is already there.
        run: Does the work; returns None on ranks that print nothing. A `HvdSparseError` or an
            `OSError` is printed as one line.
        json_file: Whether `--json` names a file that is written beside the text, instead of
            printing JSON.
    """

    name: str
    summary: str
    examples: Sequence[str]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Output | None]
    json_file: bool = False


def add_candidate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the methods from which a planner chooses."""
    parser.add_argument("--policy", metavar="FILE", help="a policy file with compress: auto")
    parser.add_argument(
        "--compressor",
        default="topk",
        choices=sorted(METHODS),
        help="the compressor, without a policy (default: %(default)s)",
    )
    parser.add_argument(
        "--density", type=float, default=0.01, help="its density (default: %(default)s)"
    )


def policy_of(options: argparse.Namespace) -> Policy:
    """The policy that the candidate arguments describe."""
    source: Any = options.policy
    if source is None:
        rule = {"compress": "auto", "compressor": options.compressor, "density": options.density}
        small = {"match": {"max_numel": RunOptions.dense_below - 1}, "compress": "never"}
        source = {"version": 1, "rules": [small, rule]}
    return load_policy(source)


TIME_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
RATE_BIT_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
RATE_BIT_PER_S |= {"kbyte": 8e3, "mbyte": 8e6, "gbyte": 8e9, "tbyte": 8e12}


def seconds(text: str) -> float:
    """Parse a time, `30us` for example."""
    return _parse(text.lower().replace("µ", "u").replace("μ", "u"), TIME_S, "30us")


def bytes_per_s(text: str) -> float:
    """Parse a rate as `tc` spells it, `25gbit` or `300gbyte`; `25Gb/s` and `300GB/s` will do."""
    unit = re.sub(r"(?<=[kKmMgGtT])([bB])(/s|ps)$", lambda m: {"b": "bit", "B": "byte"}[m[1]], text)
    return _parse(unit.lower(), RATE_BIT_PER_S, "25gbit") / 8


def _parse(text: str, units: dict[str, float], example: str) -> float:
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]+)", text.strip())
    if match is None or match[2] not in units or not 0 < float(match[1]) < inf:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and one of {', '.join(units)}, as {example}; got {text!r}"
        )
    return float(match[1]) * units[match[2]]


def load_model(text: str) -> nn.Module:
    """Make a model that is given as `module:factory`.

    The module is imported as Python would import it in the current directory, without arguments.

    Raises:
        ConfigError: The factory does not exist, fails, or returns no complete `torch.nn.Module`.
    """
    module_name, _, factory_name = text.partition(":")
    if not module_name or not factory_name:
        raise ConfigError(
            f"model must be module:factory, as torchvision.models:resnet18; got {text!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    arguments, sys.argv = sys.argv, [module_name]
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
        model = factory()
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise ConfigError(f"model {text!r} cannot be made: {one_line(error)}") from error
    finally:
        sys.argv = arguments
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {text!r} is no torch.nn.Module but a {type(model).__name__}")
    if any(map(is_lazy, model.parameters())):
        raise ConfigError(f"model {text!r} has uninitialized parameters: run it in the factory")
    return model
