"""The trainings of benchmarks.convergence: which memory, how long, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks.convergence_tasks import Budget, Digits, FashionMnist, PythonHelp, Sources, Task
from benchmarks.powersgd import PowerSgd
from hvd_sparse.engine import Method
from hvd_sparse.methods import METHODS

WORLD_SIZE = 4
TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Digits, PythonHelp, Sources, FashionMnist)
}
DENSITIES = (0.01, 0.001)
SEEDS = (10, 11, 12)
"""Seeds of the reported trainings. Recipes were chosen on seed 0."""
MAX_MEAN_DENSITY = 0.02
"""Goal for a whole training at density 0.001."""

PROMISED = ("oktopk", "exdyna", "dgc", "dragonn", "clt_k")
"""Compressors with a goal relative to dense."""
OTHERS = ("topk", "sidco", "mstopk", "gaussiank", "randomk", "hard_threshold")
POWERSGD = "powersgd"
"""PowerSGD of rank 2, for comparison; its rows stand at the first density, which it has not."""
METHOD_NAMES = ("dense", *PROMISED, *OTHERS, POWERSGD)
DENSE_FIRST = ("oktopk", "exdyna", "clt_k")
"""Compressors that apply only k entries a step: their first steps are dense, as in some trainings
of Ok-Topk's authors."""

MEMORIES = ("plain", "local", "global")
"""plain: error feedback, and the optimizer's own momentum after the exchange. local: DGC's momentum
correction. global: momentum of what all ranks applied."""
PAPER_MEMORY = {"dgc": "local", "dragonn": "local"}
"""The memory in a method's paper, where it is not plain error feedback."""
TRIED_MEMORIES = ("global", "local")
"""The best memories: local momentum on the texts, either on the digits."""
LEVELS_METHODS = ("oktopk", "dgc")
LEVELS_HOSTS, LEVELS_DENSITY = 2, 0.001
"""Numbers of hosts; 0 is flat, otherwise two levels."""
HOSTS = (0, LEVELS_HOSTS)
LOSSY_WIRES = ("float16+gap", "qsgd4")


class Case(NamedTuple):
    """One training; two levels if `hosts` is not 0, with equally many ranks per host."""

    task: str
    method: str
    memory: str
    density: float
    wire: str
    seed: int
    hosts: int = 0

    @property
    def levels(self) -> str:
        """Two levels in words; empty for flat."""
        return f", {self.hosts} hosts x {WORLD_SIZE // self.hosts}" if self.hosts else ""

    @property
    def words(self) -> str:
        """The case in words."""
        density = f"{self.density:g}"
        if self.method == "dense":
            return f"{self.task}, steps of density {density}, dense, seed {self.seed}"
        wire = "" if self.wire == "float32" else f", {self.wire}"
        method = f"{self.method}, {self.memory}{wire}{self.levels}"
        return f"{self.task}, density {density}, {method}, seed {self.seed}"

    @property
    def budget(self) -> Budget:
        """The training's length and rate; dense trainings have those of their counterparts."""
        return TASKS[self.task].budgets[self.density]

    @property
    def dense(self) -> Case:
        """The dense training that this one is compared with."""
        budgets = TASKS[self.task].budgets
        density = next(d for d, budget in budgets.items() if budget == self.budget)
        return Case(self.task, "dense", "plain", density, "float32", self.seed)

    def arguments(self) -> dict[str, Any]:
        """Arguments of the method's constructor."""
        if self.method in ("dense", POWERSGD):
            return {}
        task, budget = TASKS[self.task], self.budget
        arguments: dict[str, Any] = {
            "density": self.density,
            "warmup_steps": budget.warmup_steps,
            "dense_steps": budget.dense_steps if self.method in DENSE_FIRST else 0,
            "wire": self.wire,
            **memory_arguments(self.memory, task.recipe.momentum),
        }
        if self.method == "hard_threshold":
            arguments["threshold"] = task.hard_thresholds[self.density]
        return arguments

    def make(self) -> Method | PowerSgd | None:
        """The method; None: dense."""
        if self.method == "dense":
            return None
        if self.method == POWERSGD:
            return PowerSgd(rank=2)
        method = METHODS[self.method](**self.arguments()).make()
        assert isinstance(method, Method)
        return method

    def recipe(self, data: str) -> dict[str, Any]:
        """Everything that determines the result; stored beside it."""
        return {
            **asdict(TASKS[self.task].recipe),
            "steps": self.budget.steps,
            "lr": self.budget.lr,
            "arguments": self.arguments(),
            "world_size": WORLD_SIZE,
            "data": data,
            **({"hosts": self.hosts} if self.hosts else {}),
            **({"drops": self.budget.drops} if self.budget.drops else {}),
        }


def memory_arguments(memory: str, momentum: float) -> dict[str, Any]:
    """The constructor's arguments for a memory."""
    # DGC corrects momentum unless it is told not to.
    return (
        {"momentum": 0.0} if memory == "plain" else {"momentum": momentum, "momentum_kind": memory}
    )


def memories_of(method: str) -> tuple[str, ...]:
    """The paper's memory, then those that may be better."""
    return tuple(dict.fromkeys((*TRIED_MEMORIES, PAPER_MEMORY.get(method, "plain"))))


def cases() -> Iterator[Case]:
    """All trainings, the most telling first; the large model's, which take hours, at the end."""
    small, large = ["digits", "text"], ["sources"]
    for seed in SEEDS:
        for task in small:
            yield from promised(task, seed)
        for task in small:
            yield from lossy(task, seed)
    for seed in SEEDS:
        for task in small:
            yield from in_two_levels(task, seed)
    yield from others(small)
    for seed in SEEDS:
        for task in large:
            yield from promised(task, seed)
    yield from others(large)
    yield from fashion()
    for seed in SEEDS[1:]:
        for task in small:
            yield Case(task, "topk", TRIED_MEMORIES[0], DENSITIES[0], "float32", seed)


def promised(task: str, seed: int) -> Iterator[Case]:
    """Dense trainings, and the compressors with a goal in all memories."""
    for density in DENSITIES:
        yield Case(task, "dense", "plain", density, "float32", seed)
        for place in range(3):
            for method in PROMISED:
                memories = memories_of(method)
                if place < len(memories):
                    yield Case(task, method, memories[place], density, "float32", seed)


def in_two_levels(task: str, seed: int) -> Iterator[Case]:
    """Two-level trainings with the best memory; each is also trained flat."""
    memory = TRIED_MEMORIES[0]
    for method in LEVELS_METHODS:
        yield Case(task, method, memory, LEVELS_DENSITY, "float32", seed, LEVELS_HOSTS)


def others(tasks: Sequence[str]) -> Iterator[Case]:
    """The other compressors, for one seed."""
    for task in tasks:
        for density in DENSITIES:
            for method in OTHERS:
                memory = "plain" if method == "randomk" else TRIED_MEMORIES[0]
                yield Case(task, method, memory, density, "float32", SEEDS[0])


def fashion() -> Iterator[Case]:
    """Three seeds of what the README advises, one of the others."""
    advised = (("topk", "global"), ("oktopk", "global"), ("dgc", "local"))
    rest = (("dragonn", "local"), ("exdyna", "global"), ("sidco", "global"))
    for seed in SEEDS:
        yield Case("fashion", "dense", "plain", DENSITIES[0], "float32", seed)
        for density in DENSITIES:
            for method, memory in advised if seed != SEEDS[0] else (*advised, *rest):
                yield Case("fashion", method, memory, density, "float32", seed)
            if seed == SEEDS[0]:
                yield Case("fashion", "oktopk", "global", density, "float32", seed, LEVELS_HOSTS)
        yield Case("fashion", POWERSGD, "plain", DENSITIES[0], "float32", seed)


def lossy(task: str, seed: int) -> Iterator[Case]:
    """Trainings over wires that round."""
    for density in DENSITIES:
        for wire in LOSSY_WIRES:
            for method in ("oktopk", "dgc"):
                yield Case(task, method, TRIED_MEMORIES[0], density, wire, seed)
