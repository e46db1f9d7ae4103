"""`hvd-sparse simulate`: its table, JSON and plot, and the arguments that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from hvd_sparse.cli.main import FAILED, main
from hvd_sparse.collectives.registry import STREAMED
from hvd_sparse.lab.plots import CURVES


def test_the_command_writes_a_table_json_and_a_plot(tmp_path: Path, capsys: Any) -> None:
    files = ["--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.svg")]
    work = ["--ranks", "2,5", "--numel", "5000", "--compute", "0.001", "--slow-rank", "1"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        status = main(["simulate", *work, *files])
    shown, progress = capsys.readouterr()
    assert status == 0
    cases = 2 * len(STREAMED)
    assert progress.startswith(f"1 of {cases}: simulated ")
    assert f"\n{cases} of {cases}: simulated " in progress
    assert "words sent, worst" in shown
    drawn = (tmp_path / "s.svg").read_text()
    assert all(f">{label}</text>" in drawn for label, *_ in CURVES)
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [(r["world_size"], r["algorithm"]) for r in rows] == [
        (p, name) for p in (2, 5) for name in STREAMED
    ]
    assert all(f"{row['exchange_s'] * 1e3:.4g} ms" in shown for row in rows)
    assert all(row["received_words"]["worst"] >= row["received_words"]["mean"] > 0 for row in rows)
    same = ["--bandwidth", "1gbit", "--latency", "100us", "--algorithms", "oktopk"]
    assert main(["simulate", *work, *same]) == 0  # the defaults of --beta and --alpha
    assert f"{rows[list(STREAMED).index('oktopk')]['exchange_s'] * 1e3:.4g} ms" in (
        capsys.readouterr().out
    )


def test_the_command_shows_both_forms(tmp_path: Path, capsys: Any) -> None:
    work = ["--ranks", "8", "--local", "4", "--hierarchical", "--numel", "20000"]
    report = tmp_path / "s.json"
    assert main(["simulate", *work, "--algorithms", "oktopk", "--json", str(report)]) == 0
    flat, levels = json.loads(report.read_text())["rows"]
    assert (flat["is_hierarchical"], levels["is_hierarchical"]) == (False, True)
    assert levels["card_words"]["worst"] < 0.55 * flat["card_words"]["worst"]
    assert "oktopk, two levels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2,x"], "--ranks must be whole numbers"),
        (["--ranks", "2,1025"], "--ranks must be at most 1024, got 1025"),
        (["--ranks", "0"], "--ranks must be a whole number of at least 1, got 0"),
        (["--algorithms", "magic"], "--algorithms must be one of"),
        (["--numel", "3000000000"], "--numel must be below 2**31, got 3000000000"),
        (["--density", "2"], "density must be in (0, 1], got 2"),
        (["--local", "0"], "--local must be a whole number of at least 1, got 0"),
        (["--local", "4", "--hierarchical"], "world_size must be a multiple of 4, got 2"),
        (["--beta", "nan"], "beta_s_per_byte must be a finite number of at least 0, got nan"),
        (["--slow-rank", "7"], "slow_rank must be below 2, got 7"),
        (["--stretch", "101"], "stretch must be at most 100 elements, got 101"),
        (["--overlap", "1.5"], "overlap must be in [0, 1], got 1.5"),
        (["--plot", "missing/figure.png"], "missing/figure.png: there is no folder missing"),
        (["--plot", "figure.xyz"], "figure.xyz: a plot ends in one of .avif, .eps"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["simulate", "--ranks", "2", "--numel", "100", *arguments]) == FAILED
    assert message in capsys.readouterr().err
