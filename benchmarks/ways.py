"""The ways to average gradients that benchmarks compare: ours, and what a user would pick instead.

Names of ways:

| name | what it is |
|---|---|
| `alone` | computing alone: nothing is averaged |
| `in-step` | the same, but each step waits for the slowest worker |
| `horovod`, `horovod-fp16` | Horovod's optimizer, uncompressed or with its fp16 compression |
| `asleep` | this package with nothing compressed; it sleeps while it waits |
| `gloo` | torch's allreduce of every gradient after backward |
| `ddp`, `ddp-fp16`, `ddp-bf16` | DistributedDataParallel, by itself or with torch's hooks |
| `powersgd-2` | its PowerSGD hook at rank 2, with a single bucket: several cross on gloo |
| `planned@0.01` | a policy with `compress: auto` |
| `oktopk@0.01`, `dgc@0.001`, … | a constructor of `Compression` at a density |
| `topk:oktopk@0.01/float16+gap` | the same with a collective and a wire |
| `sparse_adamw@0.01` | `hvd_sparse.sparse_adamw`, with or without a collective and a wire |
| `oktopk@0.01,hierarchical` | the same in two levels: inside the hosts, and between them |
| `topk@0.01,ddp` | any of ours as DDP's communication hook |

Our ways also exchange the sparse gradients of embeddings; Horovod's optimizer gathers them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

import hvd_sparse
from hvd_sparse.methods import METHODS
from hvd_sparse.planner import Planner

dist: Any = torch.distributed  # its type hints leave out what is used here
NAME = re.compile(r"([a-z0-9_-]+)(?::(\w+))?(?:@([\d.e-]+))?(?:/([\w+]+))?(,hierarchical)?(,ddp)?")
UNAVERAGED = ("alone", "in-step")
SPARSE_ADAMW = "sparse_adamw"
ONE_BUCKET_MB = 100_000
SPARSE_WARMUP_STEPS, POWERSGD_WARMUP_STEPS, DENSE_WARMUP_STEPS = 10, 4, 2
LOSSLESS, ROUNDED = 1e-5, 1e-2


@dataclass
class Way:
    """One way, with the model that it trains.

    Attributes:
        name: As in the table of this module.
        module: The module that is called with a batch.
        optimizer: A torch optimizer, or Horovod's around it.
        first_error: Permitted error of the first averaged gradient, as a share of its norm; None:
            any of it may stay behind.
        warmup_steps: Steps before timing.
        compression: Our compression, if any.
        reduce: Averages gradients after backward, if no hook does.
        backward_end_s: End of the last step's backward, by `perf_counter`.
    """

    name: str
    module: nn.Module
    optimizer: Any
    first_error: float | None = LOSSLESS
    warmup_steps: int = DENSE_WARMUP_STEPS
    compression: Any = None
    reduce: Callable[[], None] | None = None
    backward_end_s: float = 0.0

    def gradients(self) -> list[Tensor]:
        """The gradients that the optimizer sees."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def synchronize(self) -> None:
        """After backward, wait until the optimizer has the averaged gradients."""
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()
        if self.reduce is not None:
            self.reduce()

    def update(self) -> None:
        """Let the optimizer apply the averages."""
        if hasattr(self.optimizer, "skip_synchronize"):
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.step()

    def step(self, *batch: Any) -> None:
        """A whole step of training."""
        self.module.zero_grad()
        self.module(*batch).backward()
        self.backward_end_s = time.perf_counter()
        self.synchronize()
        self.update()

    @property
    def hidden_share(self) -> float | None:
        """The share of the last step's exchanges that backward hid.

        Of ours, which note when their exchanges begin; of exchanges that wait for peers, too.
        """
        if self.compression is None or isinstance(self.module, DistributedDataParallel):
            return None  # DDP's backward ends with its exchanges
        buckets = self.compression.stats().buckets
        spans = [(b.starts["exchange_s"], b.history[-1].exchange_s) for b in buckets if b.history]
        return share_before(self.backward_end_s, spans)

    def close(self) -> None:
        if self.compression is not None:
            self.compression.close()


def is_settled(compression: Any) -> bool:
    """Whether the planner, if any, has decided and no rank still holds gradients of its trial.

    A planner is at work from the first step on. What its plans had not sent of tensors that then
    stay dense goes out with their next gradients, which takes some time of each step. All ranks
    call this together; in a trial it costs nothing.
    """
    planner = getattr(compression, "method", None)
    if not isinstance(planner, Planner):
        return True
    if planner.is_trying:
        return False
    waits = compression.stats().waiting_l1 > 0.0
    return not any(hvd.allgather_object(waits, name="benchmark.waits"))


def share_before(end_s: float, spans: Iterable[tuple[float, float]]) -> float | None:
    """The share of some spans (start, seconds) that lies before a time; None without spans."""
    before_s = total_s = 0.0
    for start_s, seconds in spans:
        before_s += min(max(end_s - start_s, 0.0), seconds)
        total_s += seconds
    return before_s / total_s if total_s > 0 else None


def is_ours(name: str) -> bool:
    """Whether a way compresses sparsely."""
    match = NAME.fullmatch(name)
    return match is not None and match[1] in (*METHODS, "planned", SPARSE_ADAMW)


def check_names(names: Sequence[str]) -> str:
    """The first mistake in some ways' names, or an empty string."""
    for name in names:
        match = NAME.fullmatch(name)
        if match is None or not (is_ours(name) or opponent_of(match[1])):
            return f"unknown way {name!r}: benchmarks/ways.py lists them"
        if is_ours(name) and match[3] is None:
            return f"a density must follow {name!r}, as in {name}@0.01"
        if match[5] and not is_ours(name):
            return f"{name!r} has no two levels"
        if match[6] and not is_ours(name):
            return f"{name!r} is no compression of ours for DDP"
    return ""


def make_way(
    name: str,
    model: nn.Module,
    lr: float,
    optimizer_class: Callable[..., Any] = torch.optim.SGD,
    **options: Any,
) -> Way:
    """Make the way of that name for a model.

    Args:
        name: As in the table of this module.
        model: The model, with the same weights on all ranks.
        lr: Learning rate.
        optimizer_class: Constructor that takes parameters and `lr`; `dgc` and `sparse_adamw` have
            their own.
        **options: For the constructor of ours.
    """
    match = NAME.fullmatch(name)
    assert match is not None, name
    base, collective, density, wire, levels, by_ddp = match.groups()
    # The same names for all ways, as in a job that has one of them: Horovod's ranks tell each other
    # of every name that they have seen, a thousand times a second.
    named = list(model.named_parameters())
    optimizer = optimizer_class(model.parameters(), lr=lr)
    if not is_ours(name):
        opponent = opponent_of(base)
        assert opponent is not None, name
        return opponent(name, model, named, optimizer)
    options |= {"density": float(density)}
    options |= {"collective": collective} if collective else {}
    options |= {"wire": wire} if wire else {}
    whole: dict[str, Any] = (
        {"hierarchical": True} if levels else {}
    )  # of a policy, and not of its rules
    if base == "planned":
        rule = {"compress": "auto", "compressor": "topk", **options}
        policy = {
            "version": 1,
            "plan_cache": "none",
            "rules": [{"match": {"max_numel": 1024}, "compress": "never"}, rule],
            **whole,
        }
        compression: Any = hvd_sparse.Compression.from_policy(policy, named)
    elif base == "dgc":
        optimizer, compression = hvd_sparse.dgc_sgd(named, lr=lr, **options, **whole)
    elif base == SPARSE_ADAMW:
        _, compression = hvd_sparse.sparse_adamw(named, **(options | whole))
        optimizer = hvd_sparse.SparseAdamW(model.parameters(), lr=lr, fused=True)
    else:
        compression = getattr(hvd_sparse.Compression, base)(named, **options, **whole)
    if any(getattr(module, "sparse", False) for module in model.modules()):
        compression.exchange_embeddings(named)
    if by_ddp:
        module = DistributedDataParallel(model)
        hvd_sparse.ddp.register(module, compression)
        way = Way(name, module, optimizer)
    else:
        way = through_horovod(name, model, named, optimizer, compression)
    way.first_error, way.warmup_steps = None, SPARSE_WARMUP_STEPS
    way.compression = compression
    return way


Maker = Callable[[str, nn.Module, list[tuple[str, Any]], Any], Way]


def opponent_of(base: str) -> Maker | None:
    """The constructor of a way that is not ours, or None."""
    if match := re.fullmatch(r"powersgd-(\d+)", base):
        return lambda name, model, named, optimizer: powersgd(name, model, optimizer, int(match[1]))
    return OPPONENTS.get(base)


def through_horovod(
    name: str, model: nn.Module, named: list[tuple[str, Any]], optimizer: Any, compression: Any
) -> Way:
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    return Way(name, model, wrapped)


def alone(name: str, model: nn.Module, named: list[tuple[str, Any]], optimizer: Any) -> Way:
    return Way(name, model, optimizer, first_error=None)


def in_step(name: str, model: nn.Module, named: list[tuple[str, Any]], optimizer: Any) -> Way:
    way = alone(name, model, named, optimizer)
    way.reduce = dist.barrier
    return way


def horovod(name: str, model: nn.Module, named: list[tuple[str, Any]], optimizer: Any) -> Way:
    return through_horovod(name, model, named, optimizer, hvd.Compression.none)


def horovod_fp16(name: str, model: nn.Module, named: list[tuple[str, Any]], optimizer: Any) -> Way:
    way = through_horovod(name, model, named, optimizer, hvd.Compression.fp16)
    way.first_error = ROUNDED
    return way


def asleep(name: str, model: nn.Module, named: list[tuple[str, Any]], optimizer: Any) -> Way:
    compression = hvd_sparse.Compression.topk(named, dense_below=2**31)
    way = through_horovod(name, model, named, optimizer, compression)
    way.compression = compression
    return way


def gloo(name: str, model: nn.Module, named: list[tuple[str, Any]], optimizer: Any) -> Way:
    way = alone(name, model, named, optimizer)
    way.first_error = LOSSLESS

    def reduce() -> None:
        gradients = way.gradients()
        handles = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for gradient, handle in zip(gradients, handles, strict=True):
            handle.wait()
            gradient.div_(hvd.size())

    way.reduce = reduce
    return way


def ddp(
    name: str,
    model: nn.Module,
    optimizer: Any,
    hook: Callable[..., Any] | None = None,
    state: object = None,
    **options: Any,
) -> Way:
    module = DistributedDataParallel(model, **options)
    if hook is not None:
        module.register_comm_hook(state, hook)
    way = Way(name, module, optimizer)
    way.first_error = LOSSLESS if hook is None else ROUNDED
    return way


def bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no strings
    """torch's hook: DDP refuses it by its name unless there is NCCL, but gloo can do it, too."""
    return bf16_compress_hook(state, bucket)


def powersgd(name: str, model: nn.Module, optimizer: Any, rank: int) -> Way:
    """DDP's PowerSGD; its first two steps are dense."""
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
    hook = powerSGD_hook.powerSGD_hook
    way = ddp(name, model, optimizer, hook, state, bucket_cap_mb=ONE_BUCKET_MB)
    way.warmup_steps = POWERSGD_WARMUP_STEPS
    return way


OPPONENTS: dict[str, Maker] = {
    "alone": alone,
    "in-step": in_step,
    "horovod": horovod,
    "horovod-fp16": horovod_fp16,
    "asleep": asleep,
    "gloo": gloo,
    "ddp": lambda name, model, named, optimizer: ddp(name, model, optimizer),
    "ddp-fp16": lambda name, model, named, optimizer: ddp(
        name, model, optimizer, fp16_compress_hook
    ),
    "ddp-bf16": lambda name, model, named, optimizer: ddp(name, model, optimizer, bf16_hook),
}
