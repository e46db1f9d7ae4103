"""`hvd-sparse report` and `trace`: turn a recording into an HTML page or a Chrome trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hvd_sparse.cli.command import Command, Output
from hvd_sparse.errors import ConfigError
from hvd_sparse.files import write_text
from hvd_sparse.lab.report.chrome_trace import chrome_trace, read_timeline
from hvd_sparse.lab.report.log import chosen_run, read_runs
from hvd_sparse.lab.report.page import other_compressions, report_page
from hvd_sparse.lab.report.summary import (
    bucket_means,
    faults_in_words,
    faults_of,
    last_plan,
    slowest_rank,
    steps_of,
)


def add_recording_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all commands that read a recording: the file, and one of its runs."""
    parser.add_argument("recording", type=Path, help="the file that record= or a Recorder wrote")
    parser.add_argument(
        "--run",
        type=int,
        dest="run_number",
        metavar="N",
        help="the N-th run of the file; a restart adds one (default: the last)",
    )


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add_recording_arguments(parser)
    parser.add_argument(
        "-o", "--output", type=Path, help="the page (default: the recording's name with .html)"
    )


def output_of(options: argparse.Namespace, suffix: str) -> Path:
    """The output file: that of `-o`, else one beside the recording, which has been read."""
    recording: Path = options.recording
    name = recording.name.removesuffix(".jsonl").removesuffix(".json")
    output: Path = options.output or recording.with_name(name + suffix)
    if output.exists() and output.samefile(recording):
        raise ConfigError(f"{output}: this is the recording itself; name another file by -o")
    return output


def run_report(options: argparse.Namespace) -> Output:
    runs = read_runs(options.recording)
    output = output_of(options, ".html")
    recording = chosen_run(runs, options.run_number)
    write_text(output, report_page(runs, recording))
    plan = last_plan(recording)
    report = {
        "page": str(output),
        "runs": len(runs),
        "steps": steps_of(recording),
        "torn_lines": recording.torn_lines,
        "plans": len(recording.plans),
        "buckets": len(plan.buckets),
        "means_per_step": {name: float(v.sum()) for name, v in bucket_means(plan).items()},
        "slowest_rank": slowest_rank(recording),
        "faults_per_step": faults_of(recording.steps),
    }
    notes = [f"run {runs.index(recording) + 1} of {len(runs)}"] if len(runs) > 1 else []
    if others := other_compressions(runs, recording):
        numbers = ", ".join(map(str, others))
        notes.append(f"another compression at the same time: --run {numbers}")
    if recording.torn_lines:
        notes.append(f"{recording.torn_lines} line(s) are cut off")
    note = f" ({', '.join(notes)})" if notes else ""
    faults = f"page faults: {faults_in_words(faults_of(recording.steps))}"
    return Output(report, f"{output}: {report['steps']} steps{note}\n{faults}")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    add_recording_arguments(parser)
    parser.add_argument(
        "--timeline", type=Path, help="merge with this timeline of Horovod (HOROVOD_TIMELINE)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the trace (default: the recording's name, .trace.json)"
    )


def run_trace(options: argparse.Namespace) -> Output:
    timeline = None if options.timeline is None else read_timeline(options.timeline)
    recording = chosen_run(read_runs(options.recording), options.run_number)
    trace = chrome_trace(recording, timeline)
    output = output_of(options, ".trace.json")
    try:
        text = json.dumps(trace, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ConfigError(f"{options.timeline}: no timeline of Horovod's: {error}") from None
    write_text(output, text)
    events = len(trace["traceEvents"])
    text = f"{output}: {events} events; open it in chrome://tracing or ui.perfetto.dev"
    return Output({"trace": str(output), "events": events}, text)


REPORT = Command(
    name="report",
    summary="turn a recording into one HTML page",
    examples=("hvd-sparse report run.jsonl", "hvd-sparse report run.jsonl -o page.html --json"),
    add_arguments=add_report_arguments,
    run=run_report,
)

TRACE = Command(
    name="trace",
    summary="turn a recording into a Chrome trace, merged with Horovod's timeline",
    examples=(
        "hvd-sparse trace run.jsonl",
        "hvd-sparse trace run.jsonl --timeline timeline.json -o merged.json",
    ),
    add_arguments=add_trace_arguments,
    run=run_trace,
)
