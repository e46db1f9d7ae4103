"""Recordings from anywhere: whatever they hold becomes an escaped page or one line of error."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hvd_sparse.cli.main import FAILED, main
from hvd_sparse.engine.account import COMPARED_PHASES
from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.lab.report.page import table
from tests.recordings import LINES, text_of

pytestmark = pytest.mark.timeout(300)

SCRIPT = "<script>alert('1')</script>\"'><img src=x onerror=alert(2)>&amp;"
VALUES = [
    SCRIPT,
    "",
    "\ud800 \0 \u202e ]]> -->",
    float("nan"),
    float("inf"),
    -1,
    0,
    0.5,
    1e50,
    2**53,
    10**400,
    True,
    None,
    [],
    {},
    [SCRIPT],
    {SCRIPT: SCRIPT},
    [[]],
    [float("nan")],
    [1e49],
    [0],
]


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a tree, down to its leaves."""
    if path:
        yield path
    items = node.items() if isinstance(node, dict) else enumerate(node)
    if isinstance(node, dict | list):
        for key, child in items:
            yield from (
                places(child, (*path, key)) if isinstance(child, dict | list) else [(*path, key)]
            )


def with_value(place: tuple[Any, ...], value: Any) -> list[dict[str, Any]]:
    lines = copy.deepcopy(LINES)
    node: Any = lines
    for key in place[:-1]:
        node = node[key]
    if value is Ellipsis:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    return lines


PLACES = [place for place in places(LINES) if place[0] not in (2, 3)]


class Page(HTMLParser):
    """Notes what a browser would run or fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check_page(page: str) -> Page:
    shown = Page(page)
    assert not shown.tags & {"script", "img", "iframe", "object", "embed", "link", "base", "form"}
    assert not {name for name in shown.attributes if name.startswith("on")}
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', page)
    return shown


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures, which are slow; the numbers that pass the reader are drawn further below."""
    monkeypatch.setattr("hvd_sparse.lab.report.figures.svg", lambda *_: "<svg></svg>")


@pytest.mark.usefixtures("quick_figures")
@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_every_value_in_every_place(tmp_path: Path, place: Any, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    for value in (*VALUES, ...):
        path.write_text(text_of(*with_value(place, value)))
        for command in ("report", "trace"):
            status = main([command, str(path)])
            error = capsys.readouterr().err
            if status == FAILED:
                assert error.startswith(f"hvd-sparse {command}: ")
                assert error.count("\n") == 1
                assert len(error) < 1000
                assert error[:-1].isprintable()
                continue
            assert status == 0
            if command == "report":
                check_page(path.with_suffix(".html").read_text(encoding="utf-8"))
            else:
                text = (tmp_path / "run.trace.json").read_text()
                json.loads(text, parse_constant=pytest.fail)


def test_every_text_is_shown_escaped(tmp_path: Path) -> None:
    lines = copy.deepcopy(LINES)
    for key in ("host", "transport", "torch", "hvd_sparse"):
        lines[0][key] = f"{key}{SCRIPT}"
    bucket = lines[1]["buckets"][0]
    bucket["names"] = [f"first{SCRIPT}", f"last{SCRIPT}"]
    for key in ("compressor", "wire", "dtype"):
        bucket[key] = f"{key}{SCRIPT}"
    for line in lines[2:5]:
        line["collective"] = [f"collective{SCRIPT}"]
    path = tmp_path / "run.jsonl"
    path.write_text(text_of(*lines))
    assert main(["report", str(path)]) == 0
    shown = check_page(path.with_suffix(".html").read_text())
    text = "".join(shown.text)
    for key in (
        "host",
        "transport",
        "torch",
        "hvd_sparse",
        "first",
        "last",
        "compressor",
        "wire",
        "collective",
    ):
        assert f"{key}{SCRIPT}" in text, key


def test_cells_are_escaped_whatever_is_in_them() -> None:
    """A second line of defence, behind the reader."""
    for cell in (SCRIPT, [SCRIPT], {SCRIPT: 1}):
        shown = check_page(table({"column": ""}, [(cell,)]))
        assert str(cell) in "".join(shown.text)


EXTREMES: list[dict[str, Any]] = [
    {"seconds": 1e50, **{name: [1e50] for name in FIGURES}, "threshold": [1e50]},
    {"seconds": 0, **{name: [0] for name in FIGURES}, "threshold": [0]},
    {"seconds": 1e-300, **{name: [1e-300] for name in FIGURES}, "threshold": [1e-300]},
    {"step": 2**53, "steps": 2**53, "at_s": 1e50, "spans": [{SCRIPT: [1e50, 1e50]}]},
    {"threshold": [None], "spans": [{}]},
]
BUCKETS = [{}, {"numel": 0, "k": 0}, {"numel": 2**53, "k": 2**53}]


@pytest.mark.parametrize(
    ("changes", "bucket"), [(e, BUCKETS[i % 3]) for i, e in enumerate([*EXTREMES, *EXTREMES[:1]])]
)
def test_extreme_numbers_are_drawn(tmp_path: Path, changes: Any, bucket: Any) -> None:
    lines = copy.deepcopy(LINES)
    for line in lines[2:5]:
        line.update(changes)
    lines[1]["buckets"][0].update(bucket)
    lines[0]["world_size"] = 2
    lines[5]["norm"] = 1e50
    path = tmp_path / "run.jsonl"
    path.write_text(text_of(*lines))
    assert main(["report", str(path)]) == 0
    check_page(path.with_suffix(".html").read_text())
    assert main(["trace", str(path)]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.jsonl:1: an empty file"),
        ("\n\n", "run.jsonl:1: an empty file"),
        ("hello\n", "run.jsonl:1: not a line of a recording"),
        ("[" * 100_000, "run.jsonl:1: not a line of a recording"),
        ("1" * 10_000, "run.jsonl:1: not a line of a recording"),
        ("[]\n", "run.jsonl:1: kind must be one of run, plan"),
        ("PLAN\n", "run.jsonl:1: a 'plan' line before the 'run' line"),
        ('{"kind":"run"}\n', "run.jsonl:1: a 'run' line without id, version, "),
        ("RUN\n", "holds no step yet$"),
        ("RUN\nRUN\n", "run.jsonl:2: a second run of one id"),
        ("RUN\n{}\n", "run.jsonl:2: kind must be one of"),
        ('RUN\n{"kind":["run"]}\n', "run.jsonl:2: kind must be one of"),
        ("RUN\nRESIDUAL\n", "run.jsonl:2: a 'residual' line before any plan"),
        ("RUN\nPLAN\nBUCKET7\n", "run.jsonl:3: bucket 7 is not in the plan"),
        ("RUN\nRANKS\n", "run.jsonl:2: .* must have 2 entries, got 1"),
        ("OUTSIDE\n", "run.jsonl:1: .*a rank outside its world"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str, capsys: Any
) -> None:
    path = tmp_path / "run.jsonl"
    lines = {
        "RUN": LINES[0],
        "PLAN": LINES[1],
        "RESIDUAL": LINES[5],
        "BUCKET7": {**LINES[5], "bucket": 7},
        "RANKS": {**LINES[6], COMPARED_PHASES[0]: [1]},
        "OUTSIDE": {**LINES[0], "rank": 2},
    }
    path.write_text("\n".join(json.dumps(lines[t]) if t in lines else t for t in text.split("\n")))
    assert main(["report", str(path)]) == FAILED
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


@pytest.mark.parametrize("value", [SCRIPT, -1, 1e60, None, [], {}, True])
@pytest.mark.parametrize("key", ["ts", "start_time_since_epoch_in_micros", "args"])
def test_a_timeline_of_wrong_types(tmp_path: Path, key: str, value: Any, capsys: Any) -> None:
    path, timeline = tmp_path / "run.jsonl", tmp_path / "timeline.json"
    path.write_text(text_of(*LINES))
    start = {"start_time_since_epoch_in_micros": 1e15}
    event = {"ph": "B", "name": SCRIPT, "ts": 1, "args": start}
    event.update({key: value} if key in event else {"args": {key: value}})
    timeline.write_text(json.dumps([event]))
    assert main(["trace", str(path), "--timeline", str(timeline)]) == FAILED
    assert capsys.readouterr().err.count("\n") == 1
