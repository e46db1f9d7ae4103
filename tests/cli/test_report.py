"""`hvd-sparse report` and `trace`: the files that they read and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_sparse.cli.main import FAILED, main
from tests.recordings import LINES, PLAN, RUN, page_of, steps, text_of


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_missing_file_and_a_folder_are_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, why in (
        (tmp_path / "none.jsonl", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (".", "Is a directory"),
    ):
        assert main([command, str(path)]) == FAILED
        assert capsys.readouterr().err == f"hvd-sparse {command}: {path}: {why}\n"


MEND = "Start the job by `hvd-sparse tuned`, or with MALLOC_MMAP_THRESHOLD_="


def test_page_faults_are_told_and_what_ends_them_where_they_are_many(
    tmp_path: Path, capsys: Any
) -> None:
    """The first steps touch everything for the first time: they do not count."""
    path = tmp_path / "run.jsonl"
    for faults, shown in ((45_786, f"45,786 per step: memory {MEND}"), (5_000, "5,000 per step")):
        lines = [steps(1, 1, faults=10**7), *(steps(n, 1, faults=faults) for n in (2, 3, 4))]
        path.write_text(text_of(RUN, PLAN, *lines))
        page = page_of(path)
        told = capsys.readouterr().out
        for text in (told, page):
            assert f"age faults: {shown.split(' memory')[0]}" in text
            assert (MEND in text) == (MEND in shown)
        assert ('<p class="warn">Page faults' in page) == (MEND in shown)
        assert main(["top", str(path)]) == 0
        words = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert f"page faults {shown.split(' memory')[0]}" in words
        assert (MEND in words) == (MEND in shown)
        assert main(["report", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["faults_per_step"] == faults


@pytest.mark.parametrize(("command", "name"), [("report", "run.html"), ("trace", "run.trace.json")])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_at_the_output_is_replaced(
    tmp_path: Path, command: str, name: str, there: bool
) -> None:
    path, victim = tmp_path / "run.jsonl", tmp_path / "victim"
    path.write_text(text_of(*LINES))
    if there:
        victim.write_text("precious")
    (tmp_path / name).symlink_to(victim)
    assert main([command, str(path)]) == 0
    assert not (tmp_path / name).is_symlink()
    assert victim.exists() == there
    assert not there or victim.read_text() == "precious"


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text_of(*LINES))
    assert main(["report", str(path), "-o", str(tmp_path / "none" / "page.html")]) == FAILED
    assert "No such file or directory" in capsys.readouterr().err
    assert main(["report", str(path), "-o", "/dev/full"]) == FAILED
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("command", ["report", "trace"])
@pytest.mark.parametrize("name", ["run.html", "symbolic", "hard"])
def test_the_recording_itself_is_not_written_over(
    tmp_path: Path, command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "run.html"
    path.write_text(text_of(*LINES))
    (tmp_path / "symbolic").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    before = path.read_text()
    monkeypatch.chdir(tmp_path)
    assert main([command, str(tmp_path / name), "-o", "run.html"]) == FAILED
    assert "run.html: this is the recording itself" in capsys.readouterr().err
    assert path.read_text() == before
