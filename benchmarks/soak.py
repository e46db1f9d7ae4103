"""Trains for many steps with faults that a training must survive, and checks its books.

    python -m benchmarks.soak [--steps 20000 | --hours H] [--seed 0] [--json FILE]

With `--hours`, rounds of new seeds follow each other: a training among faults that it survives, and
one that a rank ends. After each round the figures so far are in the file.

Four ranks under horovodrun train a small model with a loss scaler. Every gradient is a whole
number, so the books must balance to the last bit: the gradients of all steps that counted equal the
change of the weights plus the residuals. Memory, descriptors and threads must not grow after the
settling phase. A training that a rank ends must end on all ranks, soon. The exit status is 1 if one
of these fails.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import io
import json
import logging
import math
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import horovod.torch as hvd
import psutil
import torch
from torch import Tensor, nn

from benchmarks.report import Row, Spread, row_of, write_report
from hvd_sparse import Compression, ConfigError
from hvd_sparse.errors import CheckpointError
from tools.ledger import Ledger

RANKS = 4
TIMEOUT_S = 20.0
"""Longer than a busy machine keeps a process waiting."""
BUSY_S = 1.1 * TIMEOUT_S

SETTLING = 0.4
"""Share of the steps after which memory must stay constant."""
PROGRESS_STEPS = 500

SCALE, SCALES = 2.0**8, (2.0**4, 2.0**14)
"""The first loss scale, and the range outside of which it is reset."""

BOOKS_STEPS = 50
"""The books are checked after so many steps, and in the end."""

STEPS_BETWEEN = {
    **{"spoil": 40, "load": 150, "save": 200, "fork": 200, "look": 200, "hold": 200},
    **{"reassign": 250, "reconnect": 400, "busy": 4000},
}
"""Each fault occurs once in about so many steps, and at least once."""
FOR_HOURS = {"strangers": 150, "starve": 400}
"""The same, with `--hours` only."""
HOLD_S = STARVE_S = 3.0
STRANGERS = 100

DEADLY = {
    **{"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT},
    **{"raise": signal.SIGUSR1, "handler": signal.SIGUSR1, "exit": signal.SIGUSR2},
}
"""How a rank ends a training, round by round: what it sends itself."""
HANDLER_S = 9.0
END_S = TIMEOUT_S + 20.0
"""What all ranks may take to end, the launcher included; and the handler of the script's own."""
ROUND_STEPS = 600

METHODS: dict[str, Callable[..., Any]] = {
    "oktopk": Compression.oktopk,
    "topk": Compression.topk,
    "exdyna": Compression.exdyna,
    "dgc": lambda *arguments, **options: Compression.dgc(*arguments, momentum=0.0, **options),
}


class Model(nn.Module):
    """Two tensors for the engine, and one that is too small for it."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(3000))
        self.other = nn.Parameter(torch.zeros(40, 50))
        self.bias = nn.Parameter(torch.zeros(30))


class Soak:
    """One rank's training.

    Args:
        steps: Number of steps.
        seed: Decides the faults of each step, the same on all ranks.
        folder: Of all ranks, for checkpoints.
        between: Steps between two faults of each kind.
    """

    def __init__(self, steps: int, seed: int, folder: Path, between: dict[str, int]) -> None:
        self.steps, self.folder, self.between = steps, folder, between
        self.faults: Counter[str] = Counter()
        self.skipped = self.checks = 0
        self.worst = 0.0
        self._chance = random.Random(seed)
        # A first one of every kind, before the settling phase ends.
        first = self._chance.sample(range(2, int(SETTLING * steps)), len(between))
        self._first = dict(zip(first, between, strict=True))
        self.model = Model()
        self.compression = Compression.oktopk(
            self.model.named_parameters(), density=0.02, timeout_s=TIMEOUT_S, record="/dev/full"
        )
        self._optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1.0),
            named_parameters=self.model.named_parameters(),
            compression=self.compression,
            op=hvd.Sum,
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=50)
        self.ledger = Ledger(self.model.named_parameters())
        self._gradients = torch.Generator().manual_seed(hvd.rank())

    def run(self) -> list[dict[str, int]]:
        """Train; returns this process's resources after settling and at the end."""
        held = []
        began_at = time.monotonic()
        for step in range(self.steps):
            self.step(self._faults_of(step))
            if (step + 1) % BOOKS_STEPS == 0:
                self.check_books()
            if step + 1 in (int(SETTLING * self.steps), self.steps):
                held.append(resources())
            if hvd.rank() == 0 and (step + 1) % PROGRESS_STEPS == 0:
                seconds = time.monotonic() - began_at
                faults = ", ".join(f"{count} {name}" for name, count in self.faults.items())
                memory = f"{resources()['resident'] / 1e6:.1f} MB"
                progress = f"step {step + 1} of {self.steps}, {seconds:.0f} s, {memory}: {faults}"
                print(progress, flush=True)
        return held

    def end_sometime(self, fault: str) -> None:
        """Any rank, at any time of the first steps."""
        rank, after_s = self._chance.randrange(RANKS), self._chance.uniform(0.0, 6.0)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, fail)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
        if hvd.rank() == rank:
            failed_at = (self.folder / "failed_at").open("w")  # there may be no descriptor then
            timer = threading.Timer(after_s, end_by, (fault, failed_at))
            timer.daemon = True
            timer.start()
        if fault == "handler":
            atexit.register(finish, self.folder / f"finished.{hvd.rank()}")

    def _faults_of(self, step: int) -> list[str]:
        by_chance = [n for n, apart in self.between.items() if self._chance.random() * apart < 1]
        names = sorted({*by_chance, *filter(None, [self._first.get(step)])})
        if "reconnect" in names:  # ranks connect within timeout_s, and each needs descriptors
            names = [name for name in names if name not in ("busy", "starve")]
        self.faults.update(names)
        return names

    def step(self, faults: list[str]) -> None:
        """One step with the faults of these names."""
        own = {
            name: torch.randint(-9, 10, p.shape, generator=self._gradients).float()
            for name, p in self.model.named_parameters()
        }
        self._between_steps(faults)
        spoils = self._chance.choice([*own]), self._chance.choice(["inf", "-inf", "nan"])
        spoilers = self._chance.sample(range(RANKS), self._chance.choice([1, RANKS]))
        chosen = self._chance.randrange(RANKS)
        before, within = ([FAULTS[name] for name in f if name in faults] for f in PLACES)
        if "busy" in faults and hvd.rank() == chosen:
            time.sleep(BUSY_S)
        if "starve" in faults and hvd.rank() == (chosen + 1) % RANKS:
            time.sleep(STARVE_S)  # the chosen one waits, and asks
        if hvd.rank() == chosen:
            for fault in before:
                fault(self.compression)
        self._optimizer.zero_grad()
        loss = torch.zeros(())
        for name, p in self.model.named_parameters():
            factor = own[name].clone()
            if "spoil" in faults and name == spoils[0] and hvd.rank() in spoilers:
                factor.view(-1)[7] = float(spoils[1])
            loss = loss + (p * factor).sum()
        self.scaler.scale(loss).backward()
        if hvd.rank() == chosen:
            for fault in within:
                fault(self.compression)
        self._optimizer.synchronize()
        with self._optimizer.skip_synchronize():
            self.scaler.step(self._optimizer)
        kept = SCALES[0] <= self.scaler.get_scale() <= SCALES[1]
        self.scaler.update(None if kept else SCALE)
        if "spoil" in faults:
            self.skipped += 1
        else:
            self.ledger.feed(own)

    def _between_steps(self, faults: list[str]) -> None:
        method, density = self._chance.choice([*METHODS]), self._chance.choice([0.01, 0.02, 0.05])
        if {"reconnect", "save"} & {*faults}:
            await_faults()
        if "load" in faults:
            file = io.BytesIO()
            torch.save(self.compression.state_dict(), file)
            file.seek(0)
            self.compression.load_state_dict(torch.load(file, weights_only=True))
        if "save" in faults:
            self._save()
        if "reassign" in faults:
            self.compression.reassign(METHODS[method](density=density).method)
        if "reconnect" in faults:
            self.compression.close()

    def _save(self) -> None:
        """Into a folder, from which it is loaded; and to where no rank can, or only this one."""
        self.compression.save_checkpoint(self.folder / "saved")
        self.compression.load_checkpoint(self.folder / "saved")
        for place in ("/dev/null", "/dev/null/below"):
            try:
                self.compression.save_checkpoint(place)
            except CheckpointError:
                continue
            raise AssertionError(f"a checkpoint was saved to {place}")

    def check_books(self) -> None:
        self.checks += 1
        self.worst = max(self.worst, self.imbalance())

    def imbalance(self) -> float:
        """The largest entry by which the ledger of all ranks is off."""
        residual = self.compression.state_dict()["residual"]
        return self.ledger.lost(residual, self.scaler.get_scale())


def finish(file: Path) -> None:
    """An exit handler of the script's own, which takes its time."""
    time.sleep(HANDLER_S)
    file.touch()


def fork(compression: Any) -> None:
    """A child ends by an exception, while a step is under way."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        compression.stats()
        raise ValueError("a child's own failure")
    os.waitpid(child, 0)


def look(compression: Any) -> None:
    """Other threads ask for statistics and states."""

    def ask() -> None:
        for _ in range(100):
            compression.stats()
            with suppress(ConfigError):  # within a step
                compression.state_dict()

    for _ in range(3):
        threading.Thread(target=ask, name="fault", daemon=True).start()


def hold(_: Any) -> None:
    """Keep Python's lock."""
    ctypes.PyDLL(None).usleep(int(1e6 * HOLD_S))


def strangers(_: Any) -> None:
    """Connect to all ports of this rank, say nothing or nonsense, and go."""
    for listening in psutil.Process().net_connections("tcp"):
        if listening.status == psutil.CONN_LISTEN:
            for number in range(STRANGERS):
                with suppress(OSError), socket.create_connection(listening.laddr, 0.1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * (number % 2))


def starve(_: Any) -> None:
    """Have no descriptors for a while."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    timer = threading.Timer(STARVE_S, resource.setrlimit, (resource.RLIMIT_NOFILE, (before, most)))
    timer.name = "fault"
    timer.start()


FAULTS: dict[str, Callable[[Any], None]] = {
    **{"hold": hold, "strangers": strangers, "starve": starve},
    **{"fork": fork, "look": look},
}
PLACES = (("hold", "strangers", "starve"), ("fork", "look"))
"""Before a step, and while it is under way; in this order, as strangers take descriptors."""


def fail(number: int, _: object) -> None:
    """At a signal, wherever the training is."""
    if number == signal.SIGUSR2:
        sys.exit(7)
    raise ValueError("a failure of the script's own")


def end_by(fault: str, failed_at: TextIO) -> None:
    """End this process, at any moment of a step."""
    print(time.time(), file=failed_at, flush=True)
    os.kill(os.getpid(), DEADLY[fault])


def await_faults() -> None:
    """Wait until this process has its descriptors again."""
    for thread in threading.enumerate():
        if thread.name == "fault":
            thread.join()


def resources() -> dict[str, int]:
    """Memory, descriptors and threads of this process, once its faults are over."""
    await_faults()
    return {
        "resident": psutil.Process().memory_info().rss,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def gathered(held: list[dict[str, int]]) -> list[dict[str, list[int]]]:
    """Gather the figures of all ranks, in order."""
    names = list(held[0])
    mine = torch.tensor([[point[name] for point in held for name in names]])
    table: Tensor = hvd.allgather(mine, name="soak.held")
    return [
        {name: table[:, len(names) * i + place].tolist() for place, name in enumerate(names)}
        for i in range(len(held))
    ]


def complaints(summary: dict[str, Any], growth: float) -> list[str]:
    """Everything that differs from what is expected."""
    settled, end = summary["settled"], summary["end"]
    found = []
    if max(summary["imbalance"], summary["worst_imbalance"]) != 0:
        found.append(f"the books are off by {summary['worst_imbalance']:g}")
    if summary["skipped_steps"] != summary["faults"]["spoil"]:
        found.append(f"{summary['skipped_steps']} steps were skipped, not one for each `spoil`")
    for rank in range(RANKS):
        if end["resident"][rank] > (1 + growth) * settled["resident"][rank]:
            found.append(f"rank {rank}: resident memory grew by more than {growth:.0%}")
        for name in ("descriptors", "threads"):
            if end[name][rank] != settled[name][rank]:
                was, now = settled[name][rank], end[name][rank]
                found.append(f"rank {rank}: {was} {name} are {now} in the end")
    return found


def run_rank(args: argparse.Namespace) -> int:
    """Train, and write the summary on rank 0; returns 1 if there are complaints."""
    hvd.init()
    torch.set_num_threads(1)
    began_at = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        between = {**STEPS_BETWEEN, **(FOR_HOURS if args.hours else {})}
        between = {name: apart for name, apart in between.items() if name not in args.without}
        soak = Soak(args.steps, args.seed, args.folder, between)
        if args.deadly:
            soak.end_sometime(args.deadly)
        held = soak.run()
    points = gathered(held)
    off = sum("recording to /dev/full is off" in str(w.message) for w in caught)
    imbalance = soak.imbalance()  # settles the last step, which counts then
    summary = {
        "imbalance": imbalance,
        "steps": args.steps,
        "seed": args.seed,
        "seconds": round(time.monotonic() - began_at, 1),
        "faults": {name: soak.faults[name] for name in soak.between},
        "recordings_given_up": off,
        "skipped_steps": soak.compression.stats().skipped_steps,
        "checks": soak.checks,
        "worst_imbalance": soak.worst,
        "settled": points[0],
        "end": points[1],
    }
    summary["complaints"] = found = complaints(summary, args.growth)
    if hvd.rank() == 0:
        print(json.dumps(summary), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(summary, indent=2) + "\n")
    soak.compression.close()
    hvd.shutdown()
    return 1 if found else 0


def launched(*options: object, limit_s: float | None = None) -> int | None:
    """The status of one training; None: it did not end in time."""
    command = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(RANKS)]
    command += ["-H", f"localhost:{RANKS}", "--gloo-timeout-seconds", "120", sys.executable]
    command += ["-m", "benchmarks.soak", *map(str, options), "--rank"]
    # Each connection's threads would get arenas anew, and malloc keeps much in each.
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MALLOC_ARENA_MAX": "2"}
    process = subprocess.Popen(command, env={**os.environ, **fixed}, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        everyone = psutil.Process(process.pid).children(recursive=True) if _lives(process) else []
        for each in everyone:
            with suppress(psutil.Error):
                print("still there:", each.pid, each.status(), *each.cmdline(), flush=True)
                each.kill()
        process.kill()
        process.wait()


def _lives(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def run_for_hours(args: argparse.Namespace) -> int:
    """Round after round; returns 1 if any of them had complaints."""
    until = time.monotonic() + 3600 * args.hours
    survived: Counter[str] = Counter()
    found: list[str] = []
    ends: dict[str, list[float]] = {}
    number = 0
    while number == 0 or time.monotonic() < until:
        seed, fault = args.seed + number, [*DEADLY][number % len(DEADLY)]
        number += 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            common = ["--hours", args.hours, "--seed", seed, "--folder", folder]
            common += ["--steps", args.steps, "--growth", args.growth]
            common += ["--without", *args.without] if args.without else []
            summary_file = folder / "summary.json"
            status = launched(*common, "--json", summary_file)
            summary = json.loads(summary_file.read_text()) if summary_file.exists() else {}
            found += [f"seed {seed}: {each}" for each in summary.get("complaints", [])]
            if status != 0 and not summary.get("complaints"):
                found.append(f"seed {seed}: the training ended by status {status}")
            survived.update(summary.get("faults", {}))
            survived.update(steps=summary.get("steps", 0), checks=summary.get("checks", 0))

            # While a rank is busy nobody waits for one that is stopped, and so nobody gives it up.
            without = ["--without", "busy", *args.without]
            status = launched(*common, *without, "--deadly", fault, limit_s=300.0)
            failed_at = folder / "failed_at"
            since = float((failed_at.exists() and failed_at.read_text()) or math.nan)
            seconds = time.time() - since - (HANDLER_S if fault == "handler" else 0.0)
            ends.setdefault(fault, []).append(seconds)
            if status in (0, None) or not seconds < END_S:
                found.append(f"seed {seed}: {fault}: status {status} after {seconds:.1f} s")
        write(args, survived, ends, found)
    return 1 if found else 0


def write(
    args: argparse.Namespace,
    survived: Counter[str],
    ends: dict[str, list[float]],
    found: list[str],
) -> None:
    """The figures so far."""
    case = f"{RANKS} ranks"
    rows = [Row(case, name, count, "times") for name, count in survived.items()]
    rows.append(Row(case, "complaints", len(found), "times", goal=0, met=not found))
    for fault, seconds in ends.items():
        spread = Spread.of(seconds, float)
        late = [each for each in seconds if not each < END_S]
        case = f"{RANKS} ranks, timeout_s {TIMEOUT_S:g}"
        goal = {"goal": f"at most {END_S:g} s", "met": not late}
        rows.append(row_of(case, f"{fault}, until the launcher has ended", spread, "s", **goal))
    write_report("soak", rows, args.json)
    print(*found, sep="\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, help="of a training; 20,000, or 600 with --hours")
    parser.add_argument("--hours", type=float, default=0.0, help="begin rounds for so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--growth",
        type=float,
        help="share by which resident memory may grow after 40%% of the steps (0.01; 0.05)",
    )
    parser.add_argument("--without", nargs="*", default=[], help="faults that are left out")
    parser.add_argument("--json", metavar="FILE", help="where to write the summary")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    for inner in ("--deadly", "--folder"):
        parser.add_argument(inner, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.steps = args.steps or (ROUND_STEPS if args.hours else 20_000)
    args.growth = args.growth or (0.05 if args.hours else 0.01)
    args.folder = Path(args.folder)
    if args.steps < 200:
        parser.error(f"--steps must be at least 200, got {args.steps}")
    logging.basicConfig()
    if args.rank:
        return run_rank(args)
    if args.hours:
        return run_for_hours(args)
    with tempfile.TemporaryDirectory() as folder:
        return launched(*sys.argv[1:], "--folder", folder) or 0


if __name__ == "__main__":
    sys.exit(main())
