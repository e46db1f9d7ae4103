"""A model given on the command line as `module:factory`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from torch import nn

from hvd_sparse.errors import ConfigError


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
