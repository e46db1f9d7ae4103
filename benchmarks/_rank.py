"""Shared by the benchmarks' ranks: torch's group, turns, byte counts, checks."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from socket import gethostbyname, gethostname
from statistics import median
from typing import Any
from zlib import crc32

import horovod.torch as hvd
import torch
import torch.distributed
from torch import Tensor

from hvd_sparse.cores import bind
from hvd_sparse.transports import Transport

dist: Any = torch.distributed  # its type hints leave out what is used here
THREADS = "/proc/self/task"
HOROVODS_THREADS: set[str] = set()
"""Their numbers: those that `hvd.init()` has started."""


def start_rank(parser: ArgumentParser) -> Namespace:
    """Parse arguments, start Horovod and torch's group, use one thread.

    Args:
        parser: Has the benchmark's own arguments. `--out` and `--interface`, which every launch
            passes, are added.
    """
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interface")
    options = parser.parse_args()
    hvd.init()
    HOROVODS_THREADS.update(set(os.listdir(THREADS)) - {str(os.getpid())})
    bind(hvd.rank(), hvd.size())  # with --tuned: a lab's hosts share this machine's cores, too
    torch.set_num_threads(1)
    join_torch_group(options.interface)
    return options


def end_rank(out: Path, found: object, *transports: Transport) -> None:
    """Write rank 0's results, and shut down when all ranks have arrived.

    Args:
        out: The file.
        found: The results, as JSON types.
        transports: Transports to close at the end.
    """
    if hvd.rank() == 0:
        out.write_text(json.dumps(found))
    hvd.barrier()
    for transport in transports:
        transport.close()
    hvd.shutdown()


def join_torch_group(interface: str | None) -> None:
    """Make torch's default group, over gloo: for DDP, and for its barrier, which sleeps.

    Horovod's barrier spins: on few cores the ranks that wait in it slow down those that still work.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface or "lo"
    store_host = gethostbyname(gethostname()) if interface else "127.0.0.1"
    store = dist.TCPStore(store_host, 0, is_master=True) if hvd.rank() == 0 else None
    meeting = (store_host, store.port) if store else None
    host, port = hvd.broadcast_object(meeting, 0, name="benchmark.store")
    store = store or dist.TCPStore(host, port)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def interface_bytes(interface: str | None) -> int:
    """Bytes that a network interface has sent; 0 for none."""
    if interface is None:
        return 0
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def processor_s() -> dict[str, float]:
    """Processor seconds so far: of the training's thread, of Horovod's threads, of all others."""
    found = dict.fromkeys(("training", "Horovod", "others"), 0.0)
    for thread in os.listdir(THREADS):
        of = "Horovod" if thread in HOROVODS_THREADS else "others"
        of = "training" if thread == str(os.getpid()) else of
        with suppress(FileNotFoundError):  # it has just ended
            found[of] += int(Path(THREADS, thread, "schedstat").read_text().split()[0]) / 1e9
    return found


def in_turns(names: Sequence[str], turn: int) -> list[str]:
    """The names in an order that changes with every turn, the same on all ranks.

    What comes after a dense reduction finds cold caches.
    """
    order = list(names)
    Random(turn).shuffle(order)
    return order


def turns_within(seconds: float, fewest: int, most: int) -> Iterator[int]:
    """Numbers of turns, from 0: `fewest`, and further ones that will probably end in time."""
    start = time.perf_counter()
    for turn in range(most):
        yield turn
        passed = time.perf_counter() - start
        say(f"  turn {turn + 1} of {most}, {passed:.0f} s")
        over = turn + 1 >= fewest and passed * (turn + 2) / (turn + 1) > seconds
        if hvd.broadcast_object(over, 0, name="benchmark.over"):
            break


def timed(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Median seconds of the slowest rank, by function; `prepare` runs before each, untimed.

    The functions take turns, in an order that changes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats):
        for name in in_turns(list(functions), turn):
            prepare()
            dist.barrier()
            start = time.perf_counter()
            functions[name]()
            seconds[name].append(time.perf_counter() - start)
            dist.barrier()  # the next preparation takes no core from a rank that is still timed
    return {name: median(each) for name, each in slowest_ranks(seconds).items()}


def slowest_ranks(mine: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The slowest rank's time for every name and turn."""
    everyone = hvd.allgather_object(dict(mine), name="benchmark.figures")
    return {
        name: [max(each) for each in zip(*(rank[name] for rank in everyone), strict=True)]
        for name in mine
    }


def make_gradients(numel: int, count: int) -> list[Tensor]:
    """Heavy-tailed gradients whose large entries the ranks partly share, as in data parallelism."""
    shared = torch.Generator().manual_seed(1)
    scale = torch.randn(numel, generator=shared).exp_()
    own = torch.Generator().manual_seed(2 + hvd.rank())
    return [torch.randn(numel, generator=own).mul_(scale) for _ in range(count)]


def everywhere(values: object, name: str) -> list[Any]:
    """Gather a value from all ranks, in their order."""
    found: list[Any] = hvd.allgather_object(values, name=name)
    return found


def check_replicas(tensors: Sequence[Tensor], what: str) -> None:
    """Ends the benchmark unless all ranks hold the same, bit for bit."""
    mine = [crc32(tensor.detach().cpu().contiguous().numpy().data) for tensor in tensors]
    for rank, theirs in enumerate(everywhere(mine, "benchmark.checksums")):
        if theirs != mine:
            raise SystemExit(f"{what}: ranks {hvd.rank()} and {rank} have different tensors")


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of `expected`."""
    wrong = sum(float((a - e).square().sum()) for a, e in zip(actual, expected, strict=True))
    whole = sum(float(e.square().sum()) for e in expected)
    return float((wrong / whole) ** 0.5)


def say(message: str) -> None:
    """Print progress on rank 0."""
    if hvd.rank() == 0:
        print(message, file=sys.stderr, flush=True)
