"""Following a recording while it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_sparse.lab.report.follow import Follower, present
from tests.recordings import PLAN, RUN, append, of_run, ranks, steps, text_of


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
    append(path, of_run("y", RUN, PLAN, steps(1, 1)))
    assert [len(each.steps) for each in follower.poll()] == [3, 1]
    path.write_text(of_run("z", RUN, PLAN))
    assert [each.run["id"] for each in follower.poll()] == ["z"]  # begun anew
