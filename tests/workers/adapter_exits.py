"""Ranks that fail between `backward()` and `step()`: how each of their processes ends, and when.

    python adapter_exits.py CASE...                     worlds of three ranks under gloo, one by one
    horovodrun -np 3 … python adapter_exits.py CASE     one rank; the launcher says which

A rank runs in a child process. So one start serves many worlds, and a launcher that ends all ranks
with the first one that fails does not do so here. Prints a line of JSON for each case and rank:
code (negative: the signal that ended it), seconds since the failure, and what it wrote on stderr.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
from torch import nn

from hvd_sparse import Compression
from tests.workers.lean import start_lean

WORLD_SIZE = 3
FAILING = 1
STEPS = 4
TIMEOUT_S = 5.0
LIMIT_S = 60.0
LATE_S = 2.0
LINGER_S = 4.0


class Lingers:
    """Prolongs the interpreter's end.

    Peers come late to the failing step, in which the failing rank already waits for their messages.
    These come after its interpreter has begun to end: a thread that still waits is ended by Python
    when it comes back from native code.
    """

    def __del__(self, sleep: Callable[[float], None] = time.sleep, for_s: float = LINGER_S) -> None:
        sleep(for_s)


until_the_end: list[Lingers] = []


def fail() -> None:
    raise ValueError("a failure of the script's own")


CASES: Mapping[str, tuple[bool, Callable[[], object]]] = {
    "nothing": (False, lambda: None),
    "raise": (False, fail),
    "raise_everywhere": (True, fail),
    "exit": (False, lambda: sys.exit(7)),
    "interrupt": (False, lambda: os.kill(os.getpid(), signal.SIGINT)),
    "terminate": (False, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "kill": (False, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stop": (False, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
}
"""By name: whether all ranks fail, or only one; and how."""


def train(case: str, failed_at: Path) -> None:
    """Train for some steps, and fail after the last `backward()`."""
    everywhere, failure = CASES[case]
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=Compression.topk(
            # A bucket for each layer: the first one is sent before Horovod refuses to go on.
            model.named_parameters(),
            bucket_numel=1 << 20,
            timeout_s=TIMEOUT_S,
        ),
    )
    for step in range(STEPS):
        model.zero_grad()
        if step == STEPS - 1 and not everywhere and hvd.rank() != FAILING:
            time.sleep(LATE_S)
        model(torch.randn(4, 1024)).square().mean().backward()
        if step == STEPS - 1 and (everywhere or hvd.rank() == FAILING):
            if everywhere:
                hvd.barrier()  # else the first to fail would end a slow one's backward
            until_the_end.append(Lingers())
            failed_at.write_text(str(time.time()))
            failure()
        optimizer.step()


Train = Callable[[str, Path], object]
"""Trains by the name of a case, and writes into the file when it fails."""


def start(
    case: str, failed_at: Path, environment: Mapping[str, str], train: Train
) -> tuple[int, Path]:
    """Fork a rank; its process and what it writes on stderr. Returns in this process only."""
    errors = failed_at.with_name(f"stderr.{environment.get('HOROVOD_RANK', '')}")
    child = os.fork()
    if child:
        return child, errors
    os.environ.update(environment)
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    train(case, failed_at)
    sys.exit()  # by way of the interpreter's own end


def watch(case: str, ranks: Mapping[int, tuple[int, Path]], failed_at: Path) -> None:
    """Report each rank's end; what has not ended by the limit, or is stopped, is killed."""
    running = dict(ranks)
    limit = math.inf
    while running:
        for rank, (child, errors) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if ended == 0:
                continue
            if os.WIFSTOPPED(status):
                continue
            del running[rank]
            failed_at.with_name(f"ended.{rank}").touch()
            since = time.time() - float(failed_at.read_text() if failed_at.exists() else "nan")
            report = json.dumps(
                {
                    "case": case,
                    "rank": rank,
                    "code": os.waitstatus_to_exitcode(status),
                    "seconds": since,
                    "stderr": errors.read_text()[-6000:],
                }
            )
            failed_at.with_name(f"report.{rank}").write_text(report)
            print(report, flush=True)
        if limit == math.inf and failed_at.exists():
            limit = time.monotonic() + LIMIT_S
        others = [r for r in range(WORLD_SIZE) if r != FAILING]
        others_ended = all(failed_at.with_name(f"ended.{r}").exists() for r in others)
        if (case.endswith("stop") and others_ended) or time.monotonic() > limit:
            for child, _ in running.values():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def run_world(case: str, train: Train) -> None:
    """Three ranks under gloo, started as `horovodrun` starts them."""
    rendezvous = RendezvousServer(verbose=0)
    port = rendezvous.start()
    slots = get_host_assignments(parse_hosts(f"localhost:{WORLD_SIZE}"), WORLD_SIZE)
    rendezvous.init(slots)
    failed_at = Path(tempfile.mkdtemp()) / "failed_at"
    common = {key: str(v) for key, v in create_run_env_vars("127.0.0.1", ["lo"], port).items()}
    ranks = {
        slot.rank: start(case, failed_at, {**common, **create_slot_env_vars(slot)}, train)
        for slot in slots
    }
    watch(case, ranks, failed_at)
    rendezvous.stop()


def main(train: Train) -> None:
    cases = sys.argv[1:]
    rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    start_lean()
    if rank is None:
        for case in cases:
            run_world(case, train)
    else:
        folder = Path(cases[1])
        folder.mkdir(exist_ok=True)
        failed_at = folder / "failed_at"
        child = start(cases[0], failed_at, {"HOROVOD_RANK": rank}, train)
        watch(cases[0], {int(rank): child}, failed_at)


if __name__ == "__main__":
    main(train)
