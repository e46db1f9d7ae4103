"""The order of the house: imports point downward, names are unique, and it does not grow."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import horovodrun

PACKAGE = Path(__file__).resolve().parents[1] / "hvd_sparse"
FLOORS = (
    {"__main__"},
    {"cli"},
    {"lab"},
    {"__init__"},
    {"compression", "ddp"},
    {"adapter"},
    {"planner"},
    {"policy"},
    {"methods", "recording", "functional"},
    {"engine"},
    {"collectives", "hosts", "memories", "selectors"},
    {"wire"},
    {"accumulator", "transports"},
    {"streams", "cost_model"},
    {"ops"},
    {"topology", "optim", "magnitude"},
    {"checks"},
    {"leaving"},
    {"cores", "errors", "files", "tables", "_version"},
)
"""From the top of the house to the ground; a room imports rooms of lower floors, and itself."""
ROOMS = {room: len(FLOORS) - number for number, rooms in enumerate(FLOORS) for room in rooms}
TOOLS = {"__main__", "cli", "lab"}
"""Rooms that a training never loads."""

MOST_FILES, MOST_LINES, MOST_TRAINING_LINES = 166, 29_171, 24_976
"""The limits of the package; the last one is without the tools."""


def files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Rooms of this package that a file imports anywhere, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            module = node.module or ""
            names = [module]
            if module == "hvd_sparse":
                names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "hvd_sparse":
                room = rest.partition(".")[0]
                yield node.lineno, room if room in ROOMS else "__init__"  # a name of the face


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in files()} == ROOMS.keys()


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in files() if path.stem != "__init__")
    assert not [name for name, count in names.items() if count > 1]


def test_the_package_does_not_grow() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in files()}
    of_training = sum(count for path, count in lines.items() if room_of(path) not in TOOLS)
    assert len(lines) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES
    assert of_training <= MOST_TRAINING_LINES


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_imports_point_downward(room: str) -> None:
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {other}"
        for path in files()
        if room_of(path) == room
        for line, other in imported(path)
        if other != room and ROOMS[other] >= ROOMS[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_files_import_each_other() -> None:
    """Within a room, too, there is no circle."""
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in files()
        if path.name != "__init__.py"
    }
    below = {
        name: {
            f"{node.module}{suffix}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            for suffix in ("", *(f".{alias.name}" for alias in node.names))
        }
        & modules.keys()
        for name, path in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " imports ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in below[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in modules:
        visit(name, ())


LOADED = """
import sys
tools = ("hvd_sparse.lab", "hvd_sparse.cli", "hvd_sparse.__main__", "matplotlib")
assert not [name for name in sys.modules if name.startswith(tools)]
"""

TRAINING = """
import sys
import horovod.torch as hvd
import torch
import hvd_sparse

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100))
fixed = {"match": {"name": "0.*"}, "compressor": "topk"}
planned = {"compress": "auto", "compressor": "topk"}
compression = hvd_sparse.Compression.from_policy(
    {"version": 1, "plan_cache": "none", "rules": [fixed, planned]},
    model.named_parameters(),
    record=hvd_sparse.Recorder(sys.argv[1]),
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
assert "hvd_sparse.planner.measure" in sys.modules
assert compression.stats().buckets[0].bytes_sent > 0
compression.close()
hvd.shutdown()
"""


def test_the_package_loads_without_its_tools() -> None:
    program = f"import hvd_sparse\n{LOADED}"
    subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, check=True, timeout=60)


@pytest.mark.launches
def test_a_training_loads_none_of_the_tools(tmp_path: Path) -> None:
    """With a recorder and a planner; and the recorder's file is there."""
    program, recording = tmp_path / "train.py", tmp_path / "run.jsonl"
    program.write_text(TRAINING + LOADED)
    horovodrun(2, program, recording)
    assert {"run", "plan", "steps"} <= {run["kind"] for run in map(json.loads, lines_of(recording))}


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line]
