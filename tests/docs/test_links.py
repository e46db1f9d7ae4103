"""Links and names in the documentation lead to something."""

from __future__ import annotations

import importlib
import re
from ast import literal_eval
from functools import reduce
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import hvd_sparse
from hvd_sparse.compression import Compression
from hvd_sparse.methods import METHODS
from tests.docs.pages import CODE, LINK, PAGES, ROOT, anchors_of, prose_of

ROOTS = (ROOT, ROOT / "hvd_sparse", ROOT / "docs", ROOT / "csrc" / "cpu", ROOT / "tests")
"""A path in a text is relative to one of these, or to its page."""
PATH = re.compile(r"[\w.-]+(?:/[\w.*-]+)*(?:/|\.(?:py|md|yaml|json|cpp|cu|cuh|h|sh|png|log))")
OF_THE_READER = {"train.py", "policy.yaml", "profile.json", "run.jsonl", "timeline.json"}
"""Files that a reader has or makes."""
MADE = ("build/", "demo-output/", "dist/", ".venv/", "~/")
"""Folders that commands make."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(prose_of(page)):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append(f"{target}#{anchor}")
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths(page: Path) -> None:
    named = {name for name in CODE.findall(prose_of(page)) if PATH.fullmatch(name)}
    roots = (page.parent, *ROOTS)
    missing = [
        name
        for name in sorted(named - OF_THE_READER)
        if not name.startswith(MADE) and not any(next(r.glob(name), None) for r in roots)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names(page: Path) -> None:
    """`hvd_sparse.a.b` and `Compression.c` exist, as they are called in texts."""
    missing = []
    for code in CODE.findall(prose_of(page)):
        name = re.match(r"(?:hvd_sparse|Compression)(?:\.\w+)+", code)
        if name and not code.endswith((".py", ".md")) and not exists(name[0]):
            missing.append(code)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests(page: Path) -> None:
    """A test that a page names is there."""
    named = {code for code in CODE.findall(prose_of(page)) if re.fullmatch(r"test_\w+", code)}
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name in sorted(named) if f"def {name}(" not in sources]


def exists(name: str) -> bool:
    first, *rest = name.split(".")
    if first == "Compression":
        return hasattr(Compression, rest[0])
    try:
        reduce(getattr, rest, hvd_sparse)
    except AttributeError:
        try:
            importlib.import_module(name)
        except ImportError:
            return False
    return True


def shared_arguments() -> dict[str, str]:
    """The arguments of all constructors with their defaults, as usage.md has them; "" for many."""
    page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    section = page.split("\n## Shared arguments\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", section, re.MULTILINE)
    named = [(CODE.findall(first), default) for first, default in rows]
    return {name: default if len(names) == 1 else "" for names, default in named for name in names}


def value_of(default: str) -> Any:
    """A default as a page writes it."""
    words = {"none": None, "2²³": 2**23}
    return words[default] if default in words else literal_eval(default.strip("`"))


@pytest.mark.parametrize("name", METHODS)
def test_usage_lists_every_argument_with_its_default(name: str) -> None:
    page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
    assert row is not None
    own = dict(re.findall(r"`(\w+)(?:=([^`]+))?`", row[0].split(" | ", 3)[3]))
    parameters = signature(getattr(Compression, name)).parameters
    assert own.keys() <= parameters.keys()
    told = shared_arguments() | own
    for argument, parameter in parameters.items():
        if argument != "named_parameters":
            default = told[argument]
            assert not default or value_of(default) == parameter.default, argument


def test_usage_lists_no_argument_that_is_gone() -> None:
    every = {each for name in METHODS for each in signature(getattr(Compression, name)).parameters}
    assert shared_arguments().keys() <= every
