"""The phases, in the order of what is worth most."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from tools.gpu_lease.results import Results


@dataclass(frozen=True)
class Phase:
    """One phase: the function `run` of a module of its name.

    Attributes:
        name: Its module's name.
        limit_s: Seconds after which it is killed.
        needs_device: Whether it has nothing to do without a CUDA device.
        needs_cupy: Whether it launches kernels; if so it needs a device.
    """

    name: str
    limit_s: float
    needs_device: bool = True
    needs_cupy: bool = True


PHASES = (
    Phase("facts", 60.0, needs_device=False, needs_cupy=False),
    Phase("compiled", 120.0, needs_device=False, needs_cupy=False),
    Phase("smoke", 90.0),
    Phase("suite", 180.0),
    Phase("timing", 120.0),
    Phase("variants", 45.0),
    Phase("host_time", 45.0),
    Phase("step", 60.0),
    Phase("nccl", 45.0, needs_cupy=False),
    Phase("counters", 90.0),
    Phase("sanitizers", 120.0),
)
NAMES = tuple(phase.name for phase in PHASES)


def run(name: str, out: Path) -> None:
    """Run one phase in this process; without the device that it needs, it says so."""
    phase = PHASES[NAMES.index(name)]
    results = Results(out, name)
    if phase.needs_device and not torch.cuda.is_available():
        results.row("skipped", reason="no CUDA device")
        return
    if phase.needs_cupy and find_spec("cupy") is None:
        wheel = f"cupy-cuda{(torch.version.cuda or '13').partition('.')[0]}x"
        error = f"no CuPy beside {sys.executable}: `{sys.executable} -m pip install {wheel}`"
        results.row("kernels", ok=False, error=error)
        return
    run_phase: Callable[[Results], None] = import_module(f"tools.gpu_lease.{name}").run
    run_phase(results)
