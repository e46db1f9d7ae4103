"""The trace in a viewer's terms: the Trace Event Format, as Perfetto and Chrome read it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hvd_sparse.cli.main import FAILED, main
from hvd_sparse.lab.report.chrome_trace import chrome_trace, number_rows
from hvd_sparse.lab.report.log import Plan, Recording
from hvd_sparse.recording.recorder import Budget
from tests.recordings import last_run, record

RUN = {"rank": 1, "world_size": 2, "start_unix_s": 1.7e9}
BUCKET = {"names": ["a", "b"], "compressor": "topk"}


def recorded(*spans: dict[str, tuple[float, float]]) -> Recording:
    """One step of so many buckets: start and seconds of each phase."""
    line = {"step": 1, "collective": ["oktopk"] * len(spans), "spans": list(spans)}
    return Recording(RUN, [Plan(0, [BUCKET] * len(spans), [line])])


def rows_of(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The events of each named row, after a look at every event's form."""
    names = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert list(event["args"]) == ["name"]
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            rows.setdefault(names[event["pid"], event["tid"]], []).append(event)
    for events in rows.values():
        in_order = sorted(events, key=lambda event: event["ts"])
        for before, after in pairwise(in_order):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.1, (before, after)
    return rows


def test_what_two_threads_do_at_once_stands_on_rows_of_its_own() -> None:
    first = {"stage_s": (0.0, 1e-6), "accumulate_select_s": (1e-6, 0.1), "exchange_s": (0.1, 0.5)}
    ahead = {"accumulate_select_s": (0.2, 0.1), "exchange_s": (0.6, 0.1), "decode_s": (0.7, 0.1)}
    both = {"accumulate_select_s": (0.25, 0.1), "wait_s": (0.5, 0.3)}
    rows = rows_of(chrome_trace(recorded(first, ahead, both), None))
    assert {name: len(events) for name, events in rows.items()} == {
        "select": 3,
        "select (2)": 1,
        "exchange": 3,
        "training thread waits": 1,
    }
    (waits,) = rows["training thread waits"]
    assert waits["args"] == {
        **{"step": 1, "tensors": "a … b (2)", "compressor": "topk", "collective": "oktopk"},
    }
    assert (waits["ts"], waits["dur"]) == pytest.approx((0.5e6, 0.3e6))


def test_rounding_makes_no_overlap() -> None:
    events = [{"tid": "select", "ts": float(at), "dur": 11.0} for at in range(0, 50, 10)]
    assert number_rows(events) == ["select"]
    assert [event["dur"] for event in events] == [10.0] * 4 + [11.0]


def test_a_timeline_of_horovods_keeps_its_rows() -> None:
    start = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0}
    start["args"] = {"start_time_since_epoch_in_micros": 1_700_000_001_000_000}
    theirs = {"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": 1, "tid": 0}
    trace = chrome_trace(recorded({"wait_s": (2.0, 0.5)}), [start, theirs])
    moved, ours = trace["traceEvents"][1], trace["traceEvents"][-1]
    assert moved["ts"] == 1_000_005
    assert ours["ts"] == 2_000_000
    assert ours["pid"] > 1000


@pytest.mark.parametrize("ending", ["]", "", ',\n{"ph": "B", "na'])
def test_a_trace_merges_with_horovods_timeline(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budget, "covers", lambda self, cost_s: True)
    path, timeline = tmp_path / "run.jsonl", tmp_path / "timeline.json"
    record(path, steps=3)
    ours_us = last_run(path).run["start_unix_s"] * 1e6
    began = f'{{"start_time_since_epoch_in_micros":{int(ours_us) - 5_000_000}}}'
    timeline.write_text(
        f'[\n{{"name": "process_name", "ph": "M", "pid": 0, "args": {began}}},\n'
        f'{{"ph": "B", "name": "ALLREDUCE", "ts": 7966, "pid": 1}}{ending}'
    )
    assert main(["trace", str(path), "--timeline", str(timeline)]) == 0
    events = json.loads((tmp_path / "run.trace.json").read_text())["traceEvents"]
    (theirs,) = [event for event in events if event["name"] == "ALLREDUCE"]
    assert theirs["ts"] == pytest.approx(7966)
    ours = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in ours} >= {"ACCUMULATE_SELECT bucket 0", "EXCHANGE bucket 2"}
    assert all(5_000_000 <= event["ts"] < 65_000_000 for event in ours)


def test_a_timeline_that_is_none_is_refused(tmp_path: Path, capsys: Any) -> None:
    path, timeline = tmp_path / "run.jsonl", tmp_path / "timeline.json"
    record(path, world_size=1, steps=1)
    numbers = '[{"args": {"start_time_since_epoch_in_micros": 1e15}}, {"ts": 1, "dur": 1e999}]'
    for text, message in (
        ("x", "no timeline"),
        ("{}", "list of events"),
        ("[{}]", "start_time"),
        (numbers, "no timeline"),
    ):
        timeline.write_text(text)
        assert main(["trace", str(path), "--timeline", str(timeline)]) == FAILED
        assert message in capsys.readouterr().err
