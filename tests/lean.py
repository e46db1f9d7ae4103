"""What each rank would otherwise spend seconds of a core on, and no test asks for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch


def start_lean() -> None:
    """Called when all is imported: one thread, a collector that passes torch over, no compiler.

    The first call of any optimizer imports `torch._dynamo`, which takes two seconds, only to tell
    the compiler to leave the optimizer alone. Where nothing is compiled, all of it comes to this.
    """
    torch.set_num_threads(1)
    compiler: Any = ModuleType("torch._dynamo")
    compiler.disable = _as_it_is
    compiler.graph_break = lambda: None
    torch._dynamo = sys.modules["torch._dynamo"] = compiler
    gc.freeze()


def start_with_compiler() -> None:
    """The same for ranks that are forked from here, and need it, as DDP does."""
    torch.set_num_threads(1)
    import_module("torch._dynamo")
    gc.freeze()


def bring_compiler() -> None:
    """Called before something is compiled."""
    del torch._dynamo, sys.modules["torch._dynamo"]
    import_module("torch._dynamo")


def _as_it_is(function: Callable[..., Any], *options: object, **more: object) -> Callable[..., Any]:
    return function
