"""`hvd-sparse top`: it shows how a run is doing, from its recording."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_sparse.cli.main import FAILED, main
from hvd_sparse.cli.top import watch
from hvd_sparse.lab.report.follow import Follower
from tests.recordings import PLAN, RUN, append, ranks, steps, text_of


def test_each_look_is_drawn(tmp_path: Path) -> None:
    from rich.console import Console

    path, out = tmp_path / "run.jsonl", io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    screens = []

    def looks() -> Iterator[None]:
        additions = [
            text_of(RUN, PLAN),
            text_of(steps(10, 10), ranks(6.4, 1.28)),
            text_of({**PLAN, "buckets": [], "step": 10}, empty(12)),
        ]
        for addition in ["", *additions]:
            append(path, addition)
            yield
            screens.append(out.getvalue())
            out.truncate(out.seek(0))

    watch(Follower(path), console, looks())
    nothing, begun, running, dense = screens
    assert "no step yet" in nothing
    assert "no step yet" in begun
    for word in (
        *("topk at density 0.01, wire float32, exchanged by oktopk", "200.0 ms, 25 % of it"),
        *("100 B per step, 40 × less than dense", "0.02 applied, 0.01 wanted, target 0.01"),
        *("rank 1", "20.0 ms in exchanges", "the others wait for it", "█" * 30),
    ):
        assert word in running, word
    assert "all dense" in dense
    assert "density" not in dense


@pytest.mark.parametrize("meanwhile", ["time.sleep", "hvd_sparse.lab.report.follow.Follower.poll"])
def test_it_ends_in_order_whenever_ctrl_c_comes(
    meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(meanwhile, interrupted)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    (tmp_path / "run.jsonl").touch()
    assert main(["top", str(tmp_path / "run.jsonl")]) == 0
    assert capsys.readouterr().err == ""


def empty(last: int) -> dict[str, Any]:
    line = steps(last, 2)
    return {key: [] if isinstance(value, list) else value for key, value in line.items()}


def test_without_a_terminal_it_shows_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text_of(RUN, PLAN, steps(10, 10)))
    assert main(["top", str(path)]) == 0
    assert main(["top", str(tmp_path / "none.jsonl")]) == 1
    text, _, told = capsys.readouterr().out.partition(f"{tmp_path / 'none.jsonl'}: no such file")
    assert told == "; a training with record= writes it\n"
    assert "40 × less than dense" in text
    assert "\x1b" not in text
    assert main(["top", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sent_bytes"] == 100
    assert main(["top", str(path), "--run", "2"]) == FAILED
    assert "run must be from 1 to 1, got 2" in capsys.readouterr().err
    assert main(["top", str(path), "--interval", "0"]) == FAILED
    assert "interval must be a finite number above 0, got 0.0" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)  # `>&-`
        assert main(["top", str(path)]) == 0


def test_a_missing_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real = builtins.__import__

    def without_rich(name: str, *arguments: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    (tmp_path / "run.jsonl").touch()
    assert main(["top", str(tmp_path / "run.jsonl"), "--once"]) == FAILED
    assert capsys.readouterr().err == (
        "hvd-sparse top: top needs rich: pip install 'hvd-sparse[top]'\n"
    )


def test_what_is_no_recording_is_refused(tmp_path: Path, capsys: Any) -> None:
    """And not waited for, as an empty file is."""
    path = tmp_path / "run.jsonl"
    for text in ("# a page\n", '{"kind":"run","version":1,"rank":0}\n'):
        path.write_text(text)
        assert main(["top", str(path), "--once"]) == FAILED
        assert "run.jsonl:1: " in capsys.readouterr().err
