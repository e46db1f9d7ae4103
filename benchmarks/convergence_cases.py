"""The trainings of benchmarks.convergence: which memory, how long, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from benchmarks.convergence_adamw import (
    ADAMW_DENSITIES,
    Batches,
    Longer,
    Recommender,
    Tied,
    TransformerText,
    Unclipped,
    VisionTransformer,
    Wide,
)
from benchmarks.convergence_tasks import Budget, Digits, FashionMnist, PythonHelp, Sources, Task
from benchmarks.powersgd import PowerSgd
from hvd_sparse.engine import Method
from hvd_sparse.methods import METHODS

WORLD_SIZE = 4
SGD_TASKS: tuple[type[Task], ...] = (Digits, PythonHelp, Sources)
ADAMW_TASKS: tuple[type[Task], ...] = (TransformerText, VisionTransformer, Recommender)
VARIED_TASKS: tuple[type[Task], ...] = (Longer, Batches, Tied, Unclipped, Wide)
ALL_TASKS: tuple[type[Task], ...] = (*SGD_TASKS, FashionMnist, *ADAMW_TASKS, *VARIED_TASKS)
TASKS: dict[str, type[Task]] = {task.name: task for task in ALL_TASKS}
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

PRECONDITIONED: dict[str, dict[str, Any]] = {
    "sparse_adamw": {},
    "sparse_adamw, decay 0.99": {"residual_decay": 0.99},
    "sparse_adamw, decay 0.95": {"residual_decay": 0.95},
    "sparse_adamw, ramp": {"warmup_steps": 200},
}
"""`sparse_adamw`, and what is tried with it for the sake of low densities."""
MEMORIES = ("plain", "local", "global", "beta1=0", *PRECONDITIONED)
"""plain: error feedback, and the optimizer's own momentum after the exchange. local: DGC's momentum
correction. global: momentum of what all ranks applied. With AdamW, beta1=0: no momentum after the
exchange; local: the momentum is before it; sparse_adamw: none, and the longest steps are sent."""
OTHER_DENSITIES = (0.1, 0.003, 0.001)
"""What AdamW is tried at, beside its first density."""
RATES = (1.0, 0.3, 3.0)
"""Learning rates of AdamW, in units of the task's."""
LOW_RATE = 0.5
"""The rate that the recipe has for density 0.001, in units of the dense one."""
WORKERS = (WORLD_SIZE, 2, 8)
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
    rate: float = 1.0
    workers: int = WORLD_SIZE

    @property
    def levels(self) -> str:
        """Two levels, another rate and other numbers of ranks in words; else empty."""
        levels = f", {self.hosts} hosts x {self.workers // self.hosts}" if self.hosts else ""
        rate = f", rate x {self.rate:g}" if self.rate != 1.0 else ""
        return f"{levels}{rate}" + (f", P = {self.workers}" if self.workers != WORLD_SIZE else "")

    @property
    def words(self) -> str:
        """The case in words."""
        density = f"{self.density:g}"
        if self.method == "dense":
            steps = f"{self.task}, steps of density {density}, dense"
            return f"{steps}{self.levels}, seed {self.seed}"
        wire = "" if self.wire == "float32" else f", {self.wire}"
        method = f"{self.method}, {self.memory}{wire}{self.levels}"
        return f"{self.task}, density {density}, {method}, seed {self.seed}"

    @property
    def budget(self) -> Budget:
        """The training's length and rate; dense trainings have those of their counterparts."""
        budget = TASKS[self.task].budgets[self.density]
        return replace(budget, lr=budget.lr * self.rate)

    @property
    def has_adamw(self) -> bool:
        """Whether the task is trained with AdamW: for equally long at every density."""
        return TASKS[self.task].recipe.optimizer == "adamw"

    @property
    def dense(self) -> Case:
        """The dense training that this one is compared with."""
        budgets = TASKS[self.task].budgets
        density = next(d for d, budget in budgets.items() if budget == budgets[self.density])
        compared = Case(self.task, "dense", "plain", density, "float32", self.seed)
        return compared._replace(rate=self.rate, workers=self.workers)

    @property
    def beta1(self) -> float:
        """AdamW's β1 of what is exchanged sparsely, or of everything."""
        return TASKS[self.task].recipe.momentum if self.memory == "plain" else 0.0

    @property
    def has_dense_steps(self) -> bool:
        """Whether the first steps are dense."""
        return self.has_adamw or self.method in DENSE_FIRST

    def arguments(self) -> dict[str, Any]:
        """Arguments of the method's constructor."""
        if self.method in ("dense", POWERSGD):
            return {}
        task, budget = TASKS[self.task], self.budget
        arguments: dict[str, Any] = {
            "density": self.density,
            "warmup_steps": budget.warmup_steps,
            "dense_steps": budget.dense_steps if self.has_dense_steps else 0,
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
        recipe = asdict(TASKS[self.task].recipe)
        if self.has_adamw:
            recipe["beta1"] = self.beta1
        else:
            del recipe["optimizer"]
        return {
            **recipe,
            "steps": self.budget.steps,
            "lr": self.budget.lr,
            "arguments": self.arguments(),
            "world_size": self.workers,
            "data": data,
            **({"hosts": self.hosts} if self.hosts else {}),
            **({"drops": self.budget.drops} if self.budget.drops else {}),
        }


def memory_arguments(memory: str, momentum: float) -> dict[str, Any]:
    """The constructor's arguments for a memory."""
    if memory in ("local", "global"):
        return {"momentum": momentum, "momentum_kind": memory}
    # DGC corrects momentum unless it is told not to.
    if memory in PRECONDITIONED:
        return {"momentum": 0.0, "preconditioned": True, **PRECONDITIONED[memory]}
    return {"momentum": 0.0}


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
            yield Case(task, "topk", "local", DENSITIES[0], "float32", seed)
    for task in (each.name for each in ADAMW_TASKS):
        yield from with_adamw(task)
    yield from varied()


def varied() -> Iterator[Case]:
    """With AdamW: longer, larger, tied, unclipped, β1 before the exchange, and low densities."""
    base = Case("transformer", "topk", "sparse_adamw", ADAMW_DENSITIES[0], "float32", SEEDS[0])
    for task in VARIED_TASKS:
        each = base._replace(task=task.name, workers=2 if task is Wide else WORLD_SIZE)
        yield from (each.dense, each, each._replace(memory="plain"))
    yield base._replace(memory="local")
    low = base._replace(density=OTHER_DENSITIES[-1])
    for memory in list(PRECONDITIONED)[1:]:
        yield low._replace(memory=memory)
    for rate in RATES[1:]:
        yield low._replace(rate=rate)
    for task in (Longer, Batches):
        for memory in ("sparse_adamw", "beta1=0"):
            yield low._replace(task=task.name, memory=memory)
    yield low._replace(task=Longer.name, density=OTHER_DENSITIES[-2])


def with_adamw(task: str) -> Iterator[Case]:
    """AdamW dense, as it is after error feedback, without β1, and `sparse_adamw`."""
    for seed in SEEDS:
        dense = Case(task, "dense", "plain", ADAMW_DENSITIES[0], "float32", seed)
        yield dense
        for memory in ("sparse_adamw", "plain", "beta1=0"):
            for method in ("topk", "oktopk"):
                yield dense._replace(method=method, memory=memory)
    base = Case(task, "topk", "sparse_adamw", ADAMW_DENSITIES[0], "float32", SEEDS[0])
    yield base.dense._replace(memory="beta1=0")
    for memory in ("sparse_adamw", "plain"):
        yield base._replace(method="oktopk", density=ADAMW_DENSITIES[-1], memory=memory)
    for density in OTHER_DENSITIES:
        for memory in ("sparse_adamw", "beta1=0", "plain"):
            yield base._replace(density=density, memory=memory)
    others = [base._replace(workers=P) for P in WORKERS[1:]]
    for other in (*others, *(base._replace(rate=rate) for rate in RATES[1:])):
        yield from (other.dense, other, other._replace(memory="plain"))


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
                memory = "plain" if method == "randomk" else "local"
                yield Case(task, method, memory, density, "float32", SEEDS[0])


def fashion() -> Iterator[Case]:
    """Three seeds of what the README advises, one of the others."""
    both = [(method, memory) for memory in TRIED_MEMORIES for method in ("topk", "oktopk")]
    advised = (*both, ("dgc", "local"))
    rest = (("dragonn", "local"), ("exdyna", "global"), ("sidco", "global"))
    for seed in SEEDS:
        yield Case("fashion", "dense", "plain", DENSITIES[0], "float32", seed)
        for density in DENSITIES:
            for method, memory in advised if seed != SEEDS[0] else (*advised, *rest):
                yield Case("fashion", method, memory, density, "float32", seed)
            if seed == SEEDS[0]:
                yield Case("fashion", "oktopk", "global", density, "float32", seed, LEVELS_HOSTS)
        yield Case("fashion", POWERSGD, "plain", DENSITIES[0], "float32", seed)
        low = Case("fashion", "oktopk", "local", DENSITIES[1], "float32", seed, rate=LOW_RATE)
        yield from (low.dense, low)


def lossy(task: str, seed: int) -> Iterator[Case]:
    """Trainings over wires that round."""
    for density in DENSITIES:
        for wire in LOSSY_WIRES:
            for method in ("oktopk", "dgc"):
                yield Case(task, method, TRIED_MEMORIES[0], density, wire, seed)
