"""`make demo`: the digits example under horovodrun, dense and then sparse, compared.

Trains between two hosts of a network lab (tools/netlab) with slow links, so that the gain in time
shows; on loopback if no lab can be made. The two trainings of a place differ only in
`--compression`.

Writes demo-output/: a plot, the table, every step's figures as JSON, and horovodrun's own output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import IO, Any, NoReturn

from examples.pytorch_digits import Net, make_compression, parse_compression
from hvd_sparse import tables
from tools.netlab import Netlab, NetlabError, Network, missing
from tools.netlab.lab import bytes_per_s

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "pytorch_digits.py"
SPARSE = "topk density=0.01 collective=oktopk"
HOSTS = 2  # a core for each of them, on a machine with 2
LAB_EPOCHS, LOOPBACK_EPOCHS = 10, 20
NO_LAB = """\
No network lab here: {reason}.
The demo runs on loopback, which is no bottleneck: it cannot show the gain in time, only the bytes
that are saved and what that costs."""
# What horovodrun puts before each line of a worker: "[0]<stderr>:", with MPI "[1,0]<stderr>:".
FROM_WORKER = re.compile(r"\[(?:\d+,)?\d+\]<std(?:out|err)>:")


WARMUP_STEPS = 5
NOTES = """\
Sparse is --compression "{sparse}". Everything else is the same: {numel:,} parameters,
their first values, the batches.
Step: median. Training: all steps together. Train loss: mean of the last 10 steps.
kB/step: what a worker sends for gradients. For sparse ones it is counted on the wire, headers
included; for dense ones it is the volume of a ring allreduce, 2 (P - 1) / P x 4 bytes x numbers."""
HOST_NOTE = """
MB/host: everything that a host's interface sent, from Horovod's start to its end."""


@dataclass(frozen=True)
class Run:
    """One training; the lists, from examples/pytorch_digits.py, have one entry per step.

    Attributes:
        place: Network and number of workers; runs of one place are compared.
        host_bytes: Mean bytes sent by a host; None if not known.
    """

    place: str
    epochs: int
    compression: str
    world_size: int
    numel: int
    test_loss: float
    test_accuracy: float
    loss: list[float]
    step_s: list[float]
    step_bytes: list[float]
    host_bytes: float | None = None

    @property
    def label(self) -> str:
        return "dense" if self.compression == "none" else "sparse"

    @property
    def training_s(self) -> float:
        return sum(self.step_s)

    @property
    def bytes_per_step(self) -> float:
        return mean(self.step_bytes)


class DemoError(Exception):
    """A run failed; the message is one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def parse_arguments() -> argparse.Namespace:
    parser = Parser(prog="make demo", description="Dense against sparse training.")
    rates = ["100mbit", "1gbit"]
    parser.add_argument(
        "--rate",
        nargs="+",
        default=rates,
        help=f"links, as tc writes rates; default: {rates}",
    )
    parser.add_argument("--loopback", action="store_true", help="make no network lab")
    parser.add_argument(
        "--np", type=int, nargs="+", default=[2, 4], help="numbers of workers on loopback"
    )
    parser.add_argument("--compression", default=SPARSE, help=f'default: "{SPARSE}"')
    parser.add_argument(
        "--epochs", type=int, help=f"default: {LAB_EPOCHS}, on loopback {LOOPBACK_EPOCHS}"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output")
    parser.add_argument("--mpi", action="store_true", help="run over MPI instead of gloo")
    args = parser.parse_args()
    if min(args.np) < 1 or (args.epochs is not None and args.epochs < 1):
        parser.error("--np and --epochs must be at least 1")
    # A mistake here ends the demo before the first run, not after it.
    make_compression(*parse_compression(args.compression), Net())
    return args


def check_own_name() -> None:
    """Check that this machine can resolve its own name: otherwise Horovod's gloo crashes."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        message = f"this machine's own name, {name}, does not resolve; add it to /etc/hosts"
        raise DemoError(message) from error


def in_words(rate: str) -> str:
    """A rate in words: 1gbit is 1 Gb/s."""
    bits = 8 * bytes_per_s(rate)
    return f"{bits / 1e9:g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:g} Mb/s"


def train_in_lab(args: argparse.Namespace) -> list[Run]:
    """Train dense and sparse between two hosts, at each rate."""
    runs = []
    for rate in args.rate:
        place = f"{HOSTS} hosts, {in_words(rate)}"
        for compression in ("none", args.compression):
            # A lab for each, so that its bytes are those of one training.
            with Netlab(HOSTS, rate) as network:
                run = train(place, compression, HOSTS, args, network)
                sent = [network.traffic(name).sent_bytes for name in network.names]
            runs.append(replace(run, host_bytes=mean(sent)))
    return runs


def train_on_loopback(args: argparse.Namespace) -> list[Run]:
    """Train dense and sparse, with each number of workers."""
    check_own_name()
    return [
        train(f"loopback, {workers} workers", compression, workers, args)
        for workers in args.np
        for compression in ("none", args.compression)
    ]


def train(
    place: str,
    compression: str,
    workers: int,
    args: argparse.Namespace,
    network: Network | None = None,
) -> Run:
    """Run the example, with one worker per host of a network or on this machine."""
    metrics, log = args.output / "run.json", args.output / "horovodrun.log"
    metrics.unlink(missing_ok=True)
    hosts = network.slots(1) if network else f"localhost:{workers}"
    command = [Path(sys.executable).parent / "horovodrun", "-np", workers, "-H", hosts]
    if args.mpi:
        command += ["--mpi", "--mpi-args=--oversubscribe --allow-run-as-root"]
    else:
        # On a loaded machine with more workers than cores, Horovod's 30 s can pass.
        command += ["--gloo", "--gloo-timeout-seconds", 300]
    command += [sys.executable, EXAMPLE, "--no-cuda", "--metrics", metrics]
    command += ["--epochs", args.epochs, "--compression", compression]
    line = [str(part) for part in command]
    print(f"\n{place}, {'dense' if compression == 'none' else compression}:", flush=True)
    with log.open("w") as own_output:
        status = follow(network.on("nl1", line) if network else line, own_output)
    if status != 0 or not metrics.is_file():
        raise DemoError(f"{compression!r} on {place} failed; all output is in {log}")
    return Run(place=place, epochs=args.epochs, **json.loads(metrics.read_text()))


def follow(command: list[str], own_output: IO[str]) -> int:
    """Run a command; print the workers' output, and keep all output in a file.

    Of horovodrun's own output, only the last line is printed, and only after a silent failure.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    heard, last = False, ""
    try:
        for line in lines(process.stdout):
            text, count = FROM_WORKER.subn("", line)
            if count:
                sys.stdout.write(text)
                sys.stdout.flush()
                heard = True
            else:
                last = line.strip() or last
            own_output.write(line)
        if (status := process.wait()) != 0 and not heard:
            print(last, file=sys.stderr)
        return status
    finally:
        stop(process)


def lines(stream: IO[bytes]) -> Iterator[str]:
    """Pieces of output that end in a line feed or, like a progress bar's, in a carriage return."""
    rest = b""
    while piece := os.read(stream.fileno(), 4096):
        *complete, rest = re.split(rb"(?<=[\r\n])", rest + piece)
        yield from (line.decode(errors="replace") for line in complete)
    yield rest.decode(errors="replace")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End horovodrun with its workers, if the demo is interrupted."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


def table(runs: list[Run]) -> str:
    """One line per run, each compared with the dense run of its place."""
    heads = "place,gradients,step,epoch,training,speed-up,kB/step,fewer,MB/host"
    dense = {run.place: run for run in runs if run.label == "dense"}
    rows = [[*heads.split(","), "train loss", "test accuracy"]]
    for run in runs:
        other = dense[run.place]
        rows.append(
            [
                run.place,
                run.label,
                f"{median(run.step_s[WARMUP_STEPS:] or run.step_s) * 1e3:.1f} ms",
                f"{run.training_s / run.epochs:.2f} s",
                f"{run.training_s:.1f} s",
                ratio(other.training_s, run.training_s),
                f"{run.bytes_per_step / 1e3:,.1f}",
                ratio(other.bytes_per_step, run.bytes_per_step),
                "-" if run.host_bytes is None else f"{run.host_bytes / 1e6:,.1f}",
                f"{mean(run.loss[-10:]):.4f}",
                f"{run.test_accuracy:.2%}",
            ]
        )
    rows.insert(1, ["-" * max(map(len, column)) for column in zip(*rows, strict=True)])
    notes = NOTES.format(sparse=runs[-1].compression, numel=runs[0].numel)
    if runs[0].host_bytes is not None:
        notes += HOST_NOTE
    return "\n".join([tables.table(rows), "", notes])


def ratio(dense: float, this: float) -> str:
    return f"{dense / this:.1f} x" if this else "-"


def plot(runs: list[Run], path: Path) -> None:
    """Draw the loss over time for each place, and the bytes over the steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    places = list(dict.fromkeys(run.place for run in runs))
    figure, row = plt.subplots(
        1, len(places) + 1, figsize=(4.6 * (len(places) + 1), 3.8), layout="constrained"
    )
    for axes, place in zip(row, places, strict=False):
        for run in runs:
            if run.place == place:
                name = f"{run.label}: {run.training_s:.1f} s"
                axes.plot(list(accumulate(run.step_s)), smooth(run.loss), label=name)
        label(axes, f"Training loss, {place}", "seconds", "mean loss of 10 steps")
    for run in runs:
        row[-1].plot([sent / 1e3 for sent in run.step_bytes], label=f"{run.label}, {run.place}")
    row[-1].set_yscale("log")
    label(row[-1], "Sent per step and worker", "step", "kB")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend()


def smooth(values: list[float], width: int = 10) -> list[float]:
    """Mean over the last `width` values."""
    return [mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def main() -> int:
    args = parse_arguments()
    started = time.monotonic()
    reason = "--loopback asks for none" if args.loopback else missing()
    no_lab = NO_LAB.format(reason=reason) if reason else ""
    args.epochs = args.epochs or (LOOPBACK_EPOCHS if reason else LAB_EPOCHS)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        if reason:
            print(no_lab)
        print("Training, dense and then sparse: 1 to 3 minutes on 2 cores.", flush=True)
        runs = train_on_loopback(args) if reason else train_in_lab(args)
        text = "\n".join(filter(None, [table(runs), no_lab]))
        (args.output / "table.txt").write_text(text + "\n")
        (args.output / "runs.json").write_text(json.dumps([vars(run) for run in runs]))
        (args.output / "run.json").unlink()
        plot(runs, args.output / "digits.png")
    except (DemoError, NetlabError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"\n{text}\n")
    print(f"Plot: {args.output / 'digits.png'} ({time.monotonic() - started:.0f} s in all)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
