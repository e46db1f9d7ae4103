"""`hvd-sparse top`: shows a running job from the recording that it writes."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hvd_sparse.checks import check_above_zero
from hvd_sparse.cli.command import Command, Output
from hvd_sparse.cli.report import add_recording_arguments
from hvd_sparse.errors import UnsupportedError
from hvd_sparse.lab.report.follow import Follower, Present, present
from hvd_sparse.lab.report.log import Recording, chosen_run
from hvd_sparse.lab.report.summary import faults_in_words
from hvd_sparse.tables import nbytes

BAR_CHARACTERS = 30
WIDTH = 100
"""Characters per line where the output is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recording_arguments(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="from one update to the next"
    )
    parser.add_argument("--once", action="store_true", help="print the present state and exit")


def run(options: argparse.Namespace) -> Output | None:
    """Show and update until Ctrl-C; only once where the output is no terminal."""
    check_above_zero("interval", options.interval)
    if not options.recording.exists():
        told = f"{options.recording}: no such file; a training with record= writes it"
        return Output({"error": told}, told, status=1)
    follower = Follower(options.recording)
    if options.once or options.json or not (sys.stdout and sys.stdout.isatty()):  # None: closed
        shown = moment(follower.poll(), options.run_number)
        report = {} if shown is None else asdict(shown)
        console = console_to(io.StringIO(), WIDTH)
        console.print(panel(shown, str(options.recording)))
        return Output(report, console.file.getvalue().rstrip("\n"))
    with suppress(KeyboardInterrupt):  # while it waits, reads or draws
        watch(follower, console_to(None, None), looks(options.interval), options.run_number)
    return None


def looks(interval_s: float) -> Iterator[None]:
    while True:
        yield
        time.sleep(interval_s)


def watch(
    follower: Follower, console: Any, looks: Iterable[object], run_number: int | None = None
) -> None:
    """Show the state of the run, and update it at each look."""
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        for _ in looks:
            shown = moment(follower.poll(), run_number)
            live.update(panel(shown, follower.path), refresh=True)


def moment(runs: list[Recording], run_number: int | None) -> Present | None:
    """The state of the chosen run; None before its first step."""
    if not runs and run_number is None:
        return None
    return present(chosen_run(runs, run_number))


def console_to(file: Any, width: int | None) -> Any:
    """A console of rich.

    Raises:
        UnsupportedError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise UnsupportedError("top needs rich: pip install 'hvd-sparse[top]'") from error
    return Console(file=file, width=width)


def panel(shown: Present | None, title: str) -> Any:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    if shown is None:
        return Panel(Text("no step yet"), title=Text(title))
    waiting = shown.wait_ms / shown.step_ms if shown.step_ms else 0.0
    facts = [
        ("steps", f"{shown.steps:,}"),
        ("step", f"{shown.step_ms:.1f} ms, {100 * waiting:.0f} % of it waiting for buckets"),
    ]
    if shown.plan:
        less = f", {shown.dense_bytes / shown.sent_bytes:.0f} × less than dense"
        sent = f"{nbytes(shown.sent_bytes)} per step{less if shown.sent_bytes else ''}"
        density = f"{shown.density:.3g} applied, {shown.wanted:.3g} wanted"
        facts += [("sent", sent), ("density", f"{density}, target {shown.target:.3g}")]
    facts += [("page faults", faults_in_words(shown.faults))]
    facts += [("plan", "; ".join(shown.plan) or "all dense")]
    rows = [grid(facts)]
    if len(shown.exchange_ms) > 1:
        rows += [Text(), ranks(shown)]
    return Panel(Group(*rows), title=Text(title), subtitle=f"after {shown.at_s:.0f} s")


def grid(rows: Iterable[tuple[str, ...]]) -> Any:
    """A table without lines, its first column in grey."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for first, *others in rows:
        table.add_row(Text(first, style="dim"), *map(Text, others))
    return table


def ranks(shown: Present) -> Any:
    """Each rank's time in exchanges; the bar is by how much it comes later than the first."""
    most = max(shown.exchange_ms)
    spread = most - min(shown.exchange_ms) or 1.0
    rows = []
    for rank, exchange_ms in enumerate(shown.exchange_ms):
        bar = "█" * round(BAR_CHARACTERS * (most - exchange_ms) / max(spread, most / 2))
        note = "the others wait for it" if rank == shown.slowest_rank else ""
        rows.append((f"rank {rank}", f"{exchange_ms:.1f} ms in exchanges", bar, note))
    return grid(rows)


TOP = Command(
    name="top",
    summary="watch a running job through the recording that it writes",
    examples=("hvd-sparse top run.jsonl", "hvd-sparse top run.jsonl --once --json"),
    add_arguments=add_arguments,
    run=run,
)
