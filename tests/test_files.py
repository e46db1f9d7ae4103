"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_sparse.files import replacing, write_text


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert partial.suffix == ".html"
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_replaced_and_not_followed(tmp_path: Path, there: bool) -> None:
    victim, path = tmp_path / "victim", tmp_path / "page.html"
    if there:
        victim.write_text("precious")
    path.symlink_to(victim)
    write_text(path, "new")
    assert not path.is_symlink()
    assert path.read_text() == "new"
    assert victim.exists() == there
    assert not there or victim.read_text() == "precious"


def test_rights_are_those_of_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "page.html", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o640


def test_devices_and_pipes_are_written_to(tmp_path: Path) -> None:
    write_text("/dev/null", "away")
    assert not Path("/dev/null").is_file()
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_text(path, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    code = "from hvd_sparse.files import write_text; write_text('/dev/stdout', 'shown')"
    shown = tmp_path / "shown"
    with shown.open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, timeout=60)
    assert shown.read_text() == "shown"
    assert Path("/dev/stdout").is_symlink()


def test_a_missing_folder_is_named_by_the_users_path(tmp_path: Path) -> None:
    path = tmp_path / "none" / "page.html"
    with pytest.raises(FileNotFoundError, match=f"'{path}'"):
        write_text(path, "new")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "new")


def test_a_long_name(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250 + ".html")
    write_text(path, "new")
    assert path.read_text() == "new"
