"""Makes a Chrome trace of a recording, alone or merged into Horovod's timeline.

Horovod's timeline (HOROVOD_TIMELINE) gives the time of its start in its first event, in
microseconds since 1970. A recording gives its own in its first line. Both are therefore put on one
axis, which starts with the earlier of the two.

A viewer stacks the events of a row by their nesting, and cannot show events that overlap without
nesting. Up to two threads select from buckets while another bucket is exchanged. So phases that
overlap get rows of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from reprlib import repr
from typing import Any

from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.report.log import Recording, is_number, spans_of
from hvd_sparse.tables import tensors

START_KEY = "start_time_since_epoch_in_micros"
FIRST_PID = 1 << 20
"""Larger than the process numbers that Horovod's timeline gives to tensors."""
ROWS = {
    "stage_s": "select",
    "accumulate_select_s": "select",
    "exchange_s": "exchange",
    "decode_s": "exchange",
    "wait_s": "training thread waits",
}
"""The row of each phase."""
ROUNDING_US = 2.0
"""A phase may seem to end this long after the start of the next one, because recordings round."""


def chrome_trace(recording: Recording, timeline: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The trace of a run, and of Horovod's timeline, in the Trace Event Format."""
    start_us = ours_us = recording.run["start_unix_s"] * 1e6
    events: list[dict[str, Any]] = []
    if timeline is not None:
        horovods_us = timeline_start_us(timeline)
        start_us = min(ours_us, horovods_us)
        events += [
            {**e, "ts": e["ts"] + horovods_us - start_us} if "ts" in e else e for e in timeline
        ]
    pid = FIRST_PID + recording.run["rank"]
    phases = []
    for plan, line, bucket, name, start_s, seconds in spans_of(recording):
        arguments = {
            "step": line["step"],
            "tensors": tensors(plan.buckets[bucket]["names"]),
            "compressor": plan.buckets[bucket]["compressor"],
            "collective": line["collective"][bucket],
        }
        phases.append(
            {
                "ph": "X",
                "cat": "hvd_sparse",
                "name": f"{name.removesuffix('_s').upper()} bucket {bucket}",
                "pid": pid,
                "tid": ROWS.get(name, "other"),
                "ts": round(start_s * 1e6 + ours_us - start_us, 1),
                "dur": round(seconds * 1e6, 1),
                "args": arguments,
            }
        )
    rows = number_rows(phases)
    events.append(_named("process_name", pid, 0, f"hvd_sparse rank {recording.run['rank']}"))
    events += [_named("thread_name", pid, number, name) for number, name in enumerate(rows)]
    return {"traceEvents": events + phases, "displayTimeUnit": "ms"}


def number_rows(phases: Sequence[dict[str, Any]]) -> list[str]:
    """Replaces each phase's row name by a row number, so that no two overlap on a row.

    Returns the rows' names, in the order of their numbers.
    """
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for phase in sorted(phases, key=lambda event: event["ts"]):
        for copy in count():
            before = last.get((phase["tid"], copy))
            over_us = 0.0 if before is None else before["ts"] + before["dur"] - phase["ts"]
            if over_us <= ROUNDING_US:
                break
        if before is not None and over_us > 0:
            before["dur"] = round(phase["ts"] - before["ts"], 1)
        last[phase["tid"], copy] = phase
        phase["row"] = (phase["tid"], copy)
    names = list(dict.fromkeys([*ROWS.values(), "other"]))
    rows = sorted(last, key=lambda row: (names.index(row[0]), row[1]))
    for phase in phases:
        phase["tid"] = rows.index(phase.pop("row"))
    return [name if copy == 0 else f"{name} ({copy + 1})" for name, copy in rows]


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def read_timeline(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read Horovod's timeline; the end of the file may be missing, as after a kill.

    Raises:
        ConfigError: The file holds no list of events.
    """
    name = os.fspath(path)
    text = Path(path).read_text(encoding="utf-8", errors="replace").strip()
    try:
        events = json.loads(text)
    except (ValueError, RecursionError):
        try:
            events = json.loads(text[: text.rfind("}") + 1] + "]")
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: no timeline of Horovod's: {error}") from None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ConfigError(f"{name}: no timeline of Horovod's: not a list of events")
    for event in events:
        if "ts" in event and not is_number(event["ts"]):
            raise ConfigError(f"{name}: no timeline of Horovod's: ts cannot be {repr(event['ts'])}")
    return events


def timeline_start_us(timeline: list[dict[str, Any]]) -> float:
    """The start of Horovod's timeline, in microseconds since 1970; ConfigError without one."""
    for event in timeline:
        arguments = event.get("args")
        started = arguments.get(START_KEY) if isinstance(arguments, dict) else None
        if started is None:
            continue
        if not is_number(started):
            raise ConfigError(f"the timeline's {START_KEY} cannot be {repr(started)}")
        return float(started)
    raise ConfigError(f"the timeline has no {START_KEY}: Horovod must be 0.22 or later")
