"""The CUDA sources, as strings that need no include path."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # Python 3.11 on

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$')
_KERNEL = re.compile(r"^KERNEL (\w+)\(", re.MULTILINE)


def source_dir() -> Traversable:
    """Where they are: in an installed package, or beside it in a checkout."""
    shipped = files("hvd_sparse") / "csrc" / "cuda"
    return shipped if shipped.is_dir() else Path(__file__).resolve().parents[3] / "csrc" / "cuda"


def kernels() -> dict[str, str]:
    """The kernels, and the file, without its suffix, that each is in."""
    return {
        kernel: path.name.removesuffix(".cu")
        for path in sorted(source_dir().iterdir(), key=lambda path: path.name)
        if path.name.endswith(".cu")
        for kernel in _KERNEL.findall(path.read_text(encoding="utf-8"))
    }


def source(family: str) -> str:
    """One file with its includes written out: CuPy's cache then sees every change of a header."""
    return "\n".join(_expanded(source_dir(), f"{family}.cu", set())) + "\n"


def _expanded(folder: Traversable, name: str, included: set[str]) -> list[str]:
    included.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((folder / name).read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if line == "#pragma once" else line)
        elif include[1] not in included:
            lines += _expanded(folder, include[1], included)
            lines.append(f'#line {number + 1} "{name}"')
        else:
            lines.append("")
    return lines
