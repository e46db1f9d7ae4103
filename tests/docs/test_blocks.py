"""Every fenced block of the documentation runs.

| block | what is done with it |
|---|---|
| python | runs, page by page, on two ranks in one launch (tests/docs/pages_on_ranks.py) |
| yaml | `hvd-sparse validate` |
| sh: hvd-sparse check, plan, report, trace, validate | runs, beside the files of its page |
| sh: hvd-sparse simulate, profile | its arguments are parsed: they take minutes, or need ranks |
| sh: python -m | the module's own parser reads the arguments: these take minutes |
| sh: horovodrun, torchrun | its options exist, and what it starts is checked by the rules here |
| sh: python FILE | the file is here, or is `train.py`, which stands for the reader's |
| sh: make | the targets and variables stand in the Makefile |
| sh: pip, apt-get | each package is one that pyproject.toml, the set-up or CI names |
| sh: git clone, cd | the address is pyproject.toml's |
| sh: printf | it writes the compiler wrapper of tools/bootstrap.py |
| text | a diagram |

A block or a command for which there is no rule fails.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hvd_sparse.cli.main import main as hvd_sparse_command
from tests.docs.pages import BLOCKS, ROOT, Block, commands_of
from tests.launch import horovodrun

RUN_LIMIT_S = 240
RUNNABLE = ("check", "plan", "report", "top", "trace", "validate")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
MAKE_VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
PACKAGE_SOURCES = ("pyproject.toml", "tools/bootstrap.py", ".ci/run")


class Parsed(Exception):
    """The arguments were read; nothing else is to be done."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder that has one for each page, in which its blocks ran, and what they printed."""
    folder = tmp_path_factory.mktemp("pages")
    pages: dict[str, list[dict[str, Any]]] = {}
    for block in BLOCKS:
        (folder / block.page).mkdir(parents=True, exist_ok=True)
        if block.language in ("python", "yaml"):
            pages.setdefault(block.page, []).append({**asdict(block), "place": str(block)})
    (folder / "pages.json").write_text(json.dumps(pages))
    done = horovodrun(2, "docs/pages_on_ranks.py", folder / "pages.json", timeout=RUN_LIMIT_S)
    return folder, done.stdout


@pytest.fixture
def parsing_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers read their arguments, and then stop the program."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(self, *arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def blocks_in(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def test_there_is_a_rule_for_every_block() -> None:
    assert BLOCKS
    strangers = [str(b) for b in BLOCKS if b.language not in ("python", "yaml", "sh", "text")]
    assert not strangers


@pytest.mark.slow
@pytest.mark.timeout(RUN_LIMIT_S + 60)
@pytest.mark.parametrize("block", blocks_in("python"), ids=str)
def test_python_runs(block: Block, ran: tuple[Path, str]) -> None:
    assert f"RAN {block}\n" in ran[1]


@pytest.mark.parametrize("block", blocks_in("yaml"), ids=str)
def test_policies_are_valid(block: Block, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(block.text)
    assert hvd_sparse_command(["validate", str(path)]) == 0, capsys.readouterr().err


# -- shell ----------------------------------------------------------------------------------------


def run_in(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A subcommand of `hvd-sparse`, for real; `check` may find this machine wanting."""
    monkeypatch.chdir(folder)
    status = hvd_sparse_command(words[1:])
    assert status == 0 or (words[1] == "check" and status == 1)


def parse_module(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-m", *words[3:]])
    monkeypatch.chdir(ROOT)
    with pytest.raises(Parsed):
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)


def check_make(words: list[str]) -> None:
    for word in words[1:]:
        name, is_variable, _ = word.partition("=")
        assert name in (MAKE_VARIABLES if is_variable else TARGETS), word


def check_packages(words: list[str]) -> None:
    named = "".join((ROOT / source).read_text() for source in PACKAGE_SOURCES)
    for word in words[2:]:
        extra = re.fullmatch(r"\.\[(.+)\]", word)
        for package in extra[1].split(",") if extra else [word.partition("==")[0]]:
            if not package.startswith("-") and package != ".":
                assert re.search(rf"(?<!\w){re.escape(package)}(?!\w)", named), package


def check_file(words: list[str]) -> None:
    assert words[1] == "train.py" or (ROOT / words[1]).is_file(), words[1]


def check_launch(words: list[str], check: Callable[[list[str]], None]) -> None:
    assert words[1] == "-np"
    assert words[2].isdigit()
    check(words[3:])


@pytest.mark.slow
@pytest.mark.timeout(RUN_LIMIT_S + 60)
@pytest.mark.parametrize(
    ("page", "words"),
    [
        pytest.param(block.page, words, id=f"{block} {shlex.join(words)}")
        for block in blocks_in("sh")
        for words in commands_of(block)
    ],
)
def test_commands(
    page: str, words: list[str], request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(words: list[str]) -> None:
        while "=" in words[0]:  # a variable for this command
            name = words.pop(0).partition("=")[0]
            places = (ROOT / place for place in ("tools/bootstrap.py", "CONTRIBUTING.md"))
            known = name.startswith("HVD_SPARSE_") or any(name in p.read_text() for p in places)
            assert known, name
        match words:
            case ["make", *_]:
                check_make(words)
            case ["hvd-sparse", command, *_] if command in RUNNABLE:
                run_in(request.getfixturevalue("ran")[0] / page, words, monkeypatch)
            case ["hvd-sparse", "simulate" | "profile", *_]:
                request.getfixturevalue("parsing_only")
                with pytest.raises(Parsed):
                    hvd_sparse_command(words[1:])
            case ["python", "-m", *_]:
                request.getfixturevalue("parsing_only")
                parse_module(words, monkeypatch)
            case ["python", *_]:
                check_file(words)
            case ["torchrun", "--nproc-per-node", count, file, *_]:
                assert count.isdigit()
                check_file(["python", file])
            case ["hvd-sparse", "tuned", *launch]:
                check_launch(launch, check)
            case ["horovodrun", *_]:
                check_launch(words, check)
            case ["pip" | "apt-get", "install", *_]:
                check_packages(words)
            case ["git", "clone", address]:
                assert f'Repository = "{address}"' in (ROOT / "pyproject.toml").read_text()
            case ["cd", "hvd-sparse"]:
                pass
            case ["printf", script, ">", wrapper, "&&", "chmod", "+x", executable]:
                assert wrapper == executable
                assert "-std=c++20" in script
                assert "-std=c++20" in (ROOT / "tools/bootstrap.py").read_text()
            case _:
                pytest.fail(f"no rule for {shlex.join(words)}")

    check(list(words))
