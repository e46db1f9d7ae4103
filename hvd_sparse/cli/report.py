"""`hvd-sparse report`: a recording as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_sparse.cli.command import Command, Output
from hvd_sparse.recording.log import read_recording
from hvd_sparse.recording.page import last_plan, report_page
from hvd_sparse.recording.summary import bucket_means, slowest_rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, and where the page goes."""
    parser.add_argument("recording", type=Path, help="what record= or a Recorder has written")
    parser.add_argument(
        "-o", "--output", type=Path, help="the page (default: the recording's name with .html)"
    )


def run(options: argparse.Namespace) -> Output:
    """Read, draw, write."""
    recording = read_recording(options.recording)
    output = options.output or options.recording.with_suffix(".html")
    page = report_page(recording)
    output.write_text(page, encoding="utf-8")
    lines, plan = recording.steps, last_plan(recording)
    report = {
        "page": str(output),
        "steps": lines[-1]["step"],
        "truncated": recording.truncated,
        "plans": len(recording.plans),
        "buckets": len(plan.buckets),
        "means_per_step": {name: float(v.sum()) for name, v in bucket_means(plan).items()},
        "slowest_rank": slowest_rank(recording) if recording.ranks else None,
    }
    note = " (the recording is cut off)" if recording.truncated else ""
    return Output(report, f"{output}: {report['steps']} steps{note}")


REPORT = Command(
    name="report",
    summary="turn a recording into one HTML page",
    examples=("hvd-sparse report run.jsonl", "hvd-sparse report run.jsonl -o page.html --json"),
    add_arguments=add_arguments,
    run=run,
)
