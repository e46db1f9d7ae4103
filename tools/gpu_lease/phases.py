"""The phases, in the order of what is worth most, and the calls that they are run in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from tools.gpu_lease.results import Results
from tools.gpu_lease.sanitizers import TOOLS


@dataclass(frozen=True)
class Phase:
    """One phase: the function `run` of a module.

    Attributes:
        name: Its module's name, or that of a sanitizer's tool.
        limit_s: Seconds after which it is killed.
        call: Number of the call that runs it; 0: none does, since it needs no device.
        needs_device: Whether it has nothing to do without a CUDA device.
        needs_cupy: Whether it launches kernels; if so it needs a device.
    """

    name: str
    limit_s: float
    call: int
    needs_device: bool = True
    needs_cupy: bool = True


PHASES = (
    Phase("facts", 30.0, 1, needs_device=False, needs_cupy=False),
    Phase("smoke", 90.0, 1),
    Phase("memcheck", 60.0, 1),
    Phase("initcheck", 60.0, 1),
    Phase("suite", 150.0, 2),
    Phase("racecheck", 90.0, 2),
    Phase("synccheck", 60.0, 2),
    Phase("load", 240.0, 3),
    Phase("timing", 210.0, 4),
    Phase("counters", 80.0, 4),
    Phase("variants", 40.0, 4),
    Phase("host_time", 30.0, 4),
    Phase("step", 240.0, 5),
    Phase("two_processes", 240.0, 6, needs_cupy=False),
    Phase("nccl", 60.0, 6, needs_cupy=False),
    Phase("compiled", 120.0, 0, needs_device=False, needs_cupy=False),
)
CALLS = tuple(dict.fromkeys(phase.call for phase in PHASES if phase.call))
MOST_CALL_S, MOST_TOTAL_S, START_S = 600.0, 1800.0, 120.0
"""Seconds that a lease allows a call and all of them, and that a machine's start takes."""
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
    function_of(phase)(results)


def function_of(phase: Phase) -> Callable[[Results], None]:
    """What the phase runs."""
    name = "sanitizers" if phase.name in TOOLS else phase.name
    function: Callable[[Results], None] = import_module(f"tools.gpu_lease.{name}").run
    return function


def planned() -> str:
    """The calls with their minutes, and what comes back; checked against what a lease allows.

    Raises:
        ValueError: A call is too long, or all of them are.
    """
    lines = []
    for call in CALLS:
        phases = [phase for phase in PHASES if phase.call == call]
        limit_s = sum(phase.limit_s for phase in phases)
        if limit_s > MOST_CALL_S:
            raise ValueError(f"call {call} takes {limit_s:g} s, above {MOST_CALL_S:g}")
        told = ", ".join(f"{phase.name} {phase.limit_s:g} s" for phase in phases)
        lines += [
            f"call {call}: {limit_s / 60:g} min at most: {told}",
            f"    python3 -m tools.gpu_lease --call {call} --out $OUT",
        ]
        for phase in phases:
            function_of(phase)
    total_s = START_S + sum(phase.limit_s for phase in PHASES if phase.call)
    if total_s > MOST_TOTAL_S:
        raise ValueError(f"all calls take {total_s:g} s, above {MOST_TOTAL_S:g}")
    return "\n".join(
        [*lines, f"in all {total_s / 60:g} min, with {START_S / 60:g} for the machine's start"]
    )
