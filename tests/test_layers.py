"""Imports point downward: what docs/architecture.md promises, held against the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hvd_sparse"
FLOORS = (
    {"__main__"},
    {"cli"},
    {"lab"},
    {"__init__"},
    {"compression"},
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
    {"errors", "files", "tables", "_version"},
)
"""From the top of the house to the ground; a room imports rooms of lower floors, and itself."""
ROOMS = {room: len(FLOORS) - number for number, rooms in enumerate(FLOORS) for room in rooms}


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
    assert {room_of(path) for path in PACKAGE.rglob("*.py")} == ROOMS.keys()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_imports_point_downward(room: str) -> None:
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {other}"
        for path in PACKAGE.rglob("*.py")
        if room_of(path) == room
        for line, other in imported(path)
        if other != room and ROOMS[other] >= ROOMS[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_files_import_each_other() -> None:
    """Within a room, too, there is no circle."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    below = {
        name: {
            f"{node.module}{suffix}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            for suffix in ("", *(f".{alias.name}" for alias in node.names))
        }
        & files.keys()
        for name, path in files.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " imports ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in below[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in files:
        visit(name, ())
