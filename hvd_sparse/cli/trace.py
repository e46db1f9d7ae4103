"""`hvd-sparse trace`: turns a recording into a Chrome trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hvd_sparse.cli.command import Command, Output
from hvd_sparse.cli.report import add_recording_arguments, output_of
from hvd_sparse.files import write_text
from hvd_sparse.lab.report.chrome_trace import chrome_trace, read_timeline
from hvd_sparse.lab.report.log import chosen_run, read_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recording_arguments(parser)
    parser.add_argument(
        "--timeline", type=Path, help="merge with this timeline of Horovod (HOROVOD_TIMELINE)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="the trace (default: the recording's name with .trace.json)",
    )


def run(options: argparse.Namespace) -> Output:
    output = output_of(options, ".trace.json")
    timeline = None if options.timeline is None else read_timeline(options.timeline)
    recording = chosen_run(read_runs(options.recording), options.run_number)
    trace = chrome_trace(recording, timeline)
    write_text(output, json.dumps(trace, separators=(",", ":"), allow_nan=False))
    events = len(trace["traceEvents"])
    text = f"{output}: {events} events; open it in chrome://tracing or ui.perfetto.dev"
    return Output({"trace": str(output), "events": events}, text)


TRACE = Command(
    name="trace",
    summary="turn a recording into a Chrome trace, merged with Horovod's timeline",
    examples=(
        "hvd-sparse trace run.jsonl",
        "hvd-sparse trace run.jsonl --timeline timeline.json -o merged.json",
    ),
    add_arguments=add_arguments,
    run=run,
)
