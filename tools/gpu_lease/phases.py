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
        beside: Whether it runs beside others of its call, after those that have the device alone.
        needs_device: Whether it has nothing to do without a CUDA device.
        needs_cupy: Whether it launches kernels; if so it needs a device.
    """

    name: str
    limit_s: float
    call: int
    beside: bool = False
    needs_device: bool = True
    needs_cupy: bool = True


PHASES = (
    Phase("facts", 40.0, 1, needs_device=False, needs_cupy=False),
    *(Phase(name, 170.0, 1, beside=True) for name in ("smoke", "suite", "load", *TOOLS)),
    *(Phase(name, 170.0, 1, beside=True, needs_cupy=False) for name in ("two_processes", "nccl")),
    Phase("timing", 150.0, 2),
    Phase("counters", 60.0, 2),
    Phase("host_time", 25.0, 2),
    Phase("compiled", 120.0, 0, needs_device=False, needs_cupy=False),
)
CALLS = tuple(dict.fromkeys(phase.call for phase in PHASES if phase.call))
MOST_CALL_S, MOST_TOTAL_S, START_S = 600.0, 900.0, 120.0
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
    lines, total_s = [], START_S
    for call in CALLS:
        phases = [phase for phase in PHASES if phase.call == call]
        apart, beside = (
            [p.limit_s for p in phases if p.beside is is_so] for is_so in (False, True)
        )
        limit_s = sum(apart) + max(beside, default=0.0)
        total_s += limit_s
        if limit_s > MOST_CALL_S:
            raise ValueError(f"call {call} takes {limit_s:g} s, above {MOST_CALL_S:g}")
        told = ", ".join(
            f"{phase.name} {phase.limit_s:g} s{' beside others' * phase.beside}" for phase in phases
        )
        lines += [
            f"call {call}: {limit_s / 60:g} min at most: {told}",
            f"    python3 -m tools.gpu_lease --call {call} --out $OUT",
        ]
        for phase in phases:
            function_of(phase)
    if total_s > MOST_TOTAL_S:
        raise ValueError(f"all calls take {total_s:g} s, above {MOST_TOTAL_S:g}")
    return "\n".join(
        [*lines, f"in all {total_s / 60:g} min, with {START_S / 60:g} for the machine's start"]
    )
