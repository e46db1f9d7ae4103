"""`hvd-sparse report` and `trace`: the files that they read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_sparse.cli.main import FAILED, main
from tests.recordings import LINES, text_of


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(tmp_path / "none.jsonl")]) == FAILED
    assert capsys.readouterr().err.startswith("hvd-sparse report: [Errno 2] No such file")


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
def test_the_recording_itself_is_not_written_over(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "run.html"
    path.write_text(text_of(*LINES))
    before = path.read_text()
    monkeypatch.chdir(tmp_path)
    assert main([command, str(path), "-o", "run.html"]) == FAILED
    assert "run.html: this is the recording itself" in capsys.readouterr().err
    assert path.read_text() == before
