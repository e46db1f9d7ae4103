"""A Chrome trace of a recording, alone or merged into Horovod's timeline.

Horovod's timeline (HOROVOD_TIMELINE) names the moment of its start in its first event, in
microseconds since 1970; a recording does so in its first line. That puts both on one axis, which
starts with the earlier of the two.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from reprlib import repr
from typing import Any

from hvd_sparse.errors import ConfigError
from hvd_sparse.recording.log import Recording, spans_of
from hvd_sparse.recording.schema import is_number

START_KEY = "start_time_since_epoch_in_micros"
FIRST_PID = 1 << 20
"""Above the numbers that Horovod's timeline gives to tensors."""
THREADS = {"background": 0, "training": 1}


def chrome_trace(recording: Recording, timeline: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The trace as Chrome, Perfetto and Horovod's users read it: one row per phase's thread.

    Args:
        recording: What to draw.
        timeline: Events of Horovod's timeline, or None.
    """
    start_us = ours_us = recording.run["start_unix_s"] * 1e6
    events: list[dict[str, Any]] = []
    if timeline is not None:
        horovods_us = timeline_start_us(timeline)
        start_us = min(ours_us, horovods_us)
        events += [
            {**e, "ts": e["ts"] + horovods_us - start_us} if "ts" in e else e for e in timeline
        ]
    pid = FIRST_PID + recording.run["rank"]
    events.append(_named("process_name", pid, 0, f"hvd_sparse rank {recording.run['rank']}"))
    for name, tid in THREADS.items():
        events.append(_named("thread_name", pid, tid, name))
    for plan, line, bucket, name, start_s, seconds in spans_of(recording):
        names = plan.buckets[bucket]["names"]
        events.append(
            {
                "ph": "X",
                "name": f"{name.removesuffix('_s').upper()} bucket {bucket}",
                "pid": pid,
                "tid": THREADS["training" if name == "wait_s" else "background"],
                "ts": round(start_s * 1e6 + ours_us - start_us, 1),
                "dur": round(seconds * 1e6, 1),
                "args": {"step": line["step"], "tensors": f"{names[0]} … {names[-1]}"},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def read_timeline(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Horovod's timeline, whose end is missing where the job was killed.

    Raises:
        ConfigError: The file holds no list of events.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace").strip()
    try:
        events = json.loads(text)
    except (ValueError, RecursionError):
        try:
            events = json.loads(text[: text.rfind("}") + 1] + "]")
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{os.fspath(path)}: no timeline of Horovod's: {error}") from None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ConfigError(f"{os.fspath(path)}: no timeline of Horovod's: not a list of events")
    for event in events:
        if "ts" in event and not is_number(event["ts"]):
            raise ConfigError(
                f"{os.fspath(path)}: no timeline of Horovod's: ts cannot be {repr(event['ts'])}"
            )
    return events


def timeline_start_us(timeline: list[dict[str, Any]]) -> float:
    """When a timeline of Horovod's began, in microseconds since 1970.

    Raises:
        ConfigError: It does not say so.
    """
    for event in timeline:
        arguments = event.get("args")
        started = arguments.get(START_KEY) if isinstance(arguments, dict) else None
        if started is None:
            continue
        if not is_number(started):
            raise ConfigError(f"the timeline's {START_KEY} cannot be {repr(started)}")
        return float(started)
    raise ConfigError(f"the timeline has no {START_KEY}: Horovod must be 0.22 or later")
