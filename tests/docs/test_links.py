"""Links and names in the documentation lead to something."""

from __future__ import annotations

import importlib
import re
from ast import literal_eval
from functools import reduce
from inspect import signature
from pathlib import Path

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


def test_usage_lists_every_constructor_and_argument() -> None:
    """The table of constructors has them all, with their own arguments and defaults."""
    text = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    for name in METHODS:
        row = re.search(rf"^\| `{name}` \|.*$", text, re.MULTILINE)
        assert row is not None, name
        for argument, parameter in signature(getattr(Compression, name)).parameters.items():
            if argument != "named_parameters":
                told = re.search(rf"`{argument}(?:=([^`]+))?`", row[0])
                shared = re.search(rf"^\|.*`{argument}`.*\|.*\|", text, re.MULTILINE)
                assert told or shared, f"{name}: {argument}"
                if told and told[1]:
                    assert literal_eval(told[1]) == parameter.default, f"{name}: {argument}"
