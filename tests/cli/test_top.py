"""`hvd-sparse top`: it follows a file that grows, and shows how the run is doing."""

from __future__ import annotations

import builtins
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_sparse.cli.main import FAILED, main
from hvd_sparse.cli.top import watch
from hvd_sparse.engine.account import COMPARED_PHASES
from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.lab.report.follow import Follower, present
from hvd_sparse.recording.recorder import VERSION

NAMES: dict[str, Any] = {"hvd_sparse": "0", "torch": "2", "host": "h", "transport": "gloo"}
NAMES |= {"pid": 1, "start_unix_s": 1.7e9}
RUN = {
    "kind": "run",
    "version": VERSION,
    "rank": 0,
    "world_size": 2,
    "start_unix_s": 1.7e9,
    **NAMES,
}
BUCKET = {"names": ["a"], "numel": 1000, "k": 10, "density": 0.01, "dtype": "float32"}
PLAN = {"kind": "plan", "step": 0, "buckets": [{**BUCKET, "compressor": "topk", "wire": "float32"}]}


def steps(last: int, count: int, step_s: float = 0.2, nbytes: int = 100) -> dict[str, Any]:
    figures = {name: [0] for name in FIGURES} | {"bytes_sent": [count * nbytes]}
    figures |= {"wait_s": [count * step_s / 4], "nnz_applied": [20 * count]}
    figures |= {"nnz_wanted": [10 * count]}
    more = {"collective": ["oktopk"], "threshold": [0.5], "imbalance": [0.0], "spans": [{}]}
    at = {"at_s": last * step_s, "seconds": count * step_s}
    return {"kind": "steps", "step": last, "steps": count, **at, **figures, **more}


def ranks(*exchange_s: float) -> dict[str, Any]:
    phases = {name: list(exchange_s) for name in COMPARED_PHASES}
    return {"kind": "ranks", "step": 64, "steps": 64, **phases}


def text_of(*lines: dict[str, Any], run: str = "x") -> str:
    return "".join(json.dumps({**line, "id": run}) + "\n" for line in lines)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_it_follows_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    follower = Follower(path)
    assert follower.poll() == []  # the job has not begun
    append(path, text_of(RUN, PLAN))
    (recording,) = follower.poll()
    assert present(recording) is None
    line = text_of(steps(1, 1))
    append(path, line[:40])
    assert follower.poll()[0].steps == []  # half a line is no line yet
    append(path, line[40:] + text_of(steps(50, 49)))
    shown = present(follower.poll()[0])
    assert shown is not None
    assert (shown.steps, shown.sent_bytes, shown.dense_bytes) == (50, 100, 4000)
    assert (shown.density, shown.wanted, shown.target) == (0.02, 0.01, 0.01)
    assert (shown.step_ms, shown.wait_ms) == pytest.approx((200, 50))
    append(path, text_of(steps(150, 100, step_s=0.1, nbytes=10), ranks(6.4, 1.28)))
    shown = present(follower.poll()[0])
    assert shown is not None  # the present is the last 100 steps
    assert (shown.steps, shown.sent_bytes, shown.exchange_ms) == (150, 10, (100, 20))
    assert shown.slowest_rank == 1
    append(path, text_of(RUN, PLAN, steps(1, 1), run="y"))
    assert [len(each.steps) for each in follower.poll()] == [3, 1]
    path.write_text(text_of(RUN, PLAN, run="z"))
    assert [each.run["id"] for each in follower.poll()] == ["z"]  # begun anew


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
    assert main(["top", str(tmp_path / "run.jsonl")]) == 0
    assert capsys.readouterr().err == ""


def empty(last: int) -> dict[str, Any]:
    line = steps(last, 2)
    return {key: [] if isinstance(value, list) else value for key, value in line.items()}


def test_without_a_terminal_it_shows_once(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text_of(RUN, PLAN, steps(10, 10)))
    assert main(["top", str(path)]) == 0
    text = capsys.readouterr().out
    assert "40 × less than dense" in text
    assert "\x1b" not in text
    assert main(["top", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sent_bytes"] == 100
    assert main(["top", str(path), "--run", "2"]) == FAILED
    assert "run must be from 1 to 1, got 2" in capsys.readouterr().err
    assert main(["top", str(path), "--interval", "0"]) == FAILED
    assert "interval must be a finite number above 0, got 0.0" in capsys.readouterr().err


def test_a_missing_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real = builtins.__import__

    def without_rich(name: str, *arguments: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_rich)
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
