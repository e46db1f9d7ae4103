"""`make demo`: the digits example under horovodrun, dense and then sparse, compared.

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
from pathlib import Path
from typing import IO, NoReturn

from examples.pytorch_digits import Net, make_compression, parse_compression
from tools.demo_report import Run, plot, table

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "pytorch_digits.py"
SPARSE = "topk density=0.01 collective=oktopk"
# What horovodrun puts before each line of a worker: "[0]<stderr>:", with MPI "[1,0]<stderr>:".
FROM_WORKER = re.compile(r"\[(?:\d+,)?\d+\]<std(?:out|err)>:")


class DemoError(Exception):
    """A run failed; the message is one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def parse_arguments() -> argparse.Namespace:
    parser = Parser(prog="make demo", description="Dense against sparse training.")
    parser.add_argument("--np", type=int, nargs="+", default=[2, 4], help="numbers of workers")
    parser.add_argument("--compression", default=SPARSE, help=f'default: "{SPARSE}"')
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output")
    parser.add_argument("--mpi", action="store_true", help="run over MPI instead of gloo")
    args = parser.parse_args()
    if min(args.np) < 1 or args.epochs < 1:
        parser.error("--np and --epochs must be at least 1")
    # A mistake here ends the demo before the first run, not after it.
    make_compression(*parse_compression(args.compression), Net())
    return args


def check_own_name() -> None:
    """Horovod's gloo dies of a segmentation fault where a machine cannot resolve its own name."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        message = f"this machine's own name, {name}, does not resolve; add it to /etc/hosts"
        raise DemoError(message) from error


def train(workers: int, compression: str, args: argparse.Namespace) -> Run:
    """One run of the example; returns its figures."""
    metrics, log = args.output / "run.json", args.output / "horovodrun.log"
    metrics.unlink(missing_ok=True)
    command = [Path(sys.executable).parent / "horovodrun", "-np", workers]
    command += ["-H", f"localhost:{workers}"]
    if args.mpi:
        command += ["--mpi", "--mpi-args=--oversubscribe --allow-run-as-root"]
    else:
        # On a loaded machine with more workers than cores, Horovod's 30 s can pass.
        command += ["--gloo", "--gloo-timeout-seconds", 300]
    command += [sys.executable, EXAMPLE, "--no-cuda", "--metrics", metrics]
    command += ["--epochs", args.epochs, "--compression", compression]
    with log.open("w") as own_output:
        status = follow([str(part) for part in command], own_output)
    if status != 0 or not metrics.is_file():
        raise DemoError(f"{compression!r} on {workers} workers failed; all output is in {log}")
    return Run(**json.loads(metrics.read_text()))


def follow(command: list[str], own_output: IO[str]) -> int:
    """Run a command; pass on what workers say, and keep everything in a file.

    What horovodrun itself says, tracebacks among it, is left to the file, but for its last line.
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
    """Pieces that end in a line feed or, as a progress bar's do, in a carriage return."""
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


def main() -> int:
    args = parse_arguments()
    started = time.monotonic()
    try:
        check_own_name()
        args.output.mkdir(parents=True, exist_ok=True)
        runs = []
        counts = " and ".join(map(str, args.np))
        about = "dense and then sparse: 1 to 3 minutes on 2 cores"
        print(f"Training on {counts} workers, {about}.", flush=True)
        for workers in args.np:
            for compression in ("none", args.compression):
                runs.append(train(workers, compression, args))
        text = table(runs)
        (args.output / "table.txt").write_text(text + "\n")
        (args.output / "runs.json").write_text(json.dumps([vars(run) for run in runs]))
        (args.output / "run.json").unlink()
        plot(runs, args.output / "digits.png")
    except (DemoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"\n{text}\n")
    print(f"Plot: {args.output / 'digits.png'} ({time.monotonic() - started:.0f} s in all)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
