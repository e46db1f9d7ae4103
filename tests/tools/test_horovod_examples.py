"""What becomes of Horovod's own examples: one expression and one import differ."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tools.horovod_examples import ExampleError, main, with_compression

SCRIPT = """\
import torch
import horovod.torch as hvd
{before}
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression
)
"""


def test_one_expression_becomes_a_constructor() -> None:
    before = SCRIPT.format(before="")
    after = with_compression(before, "topk density=0.01 wire=float16+gap group_numel=512")
    call = "hvd_sparse.Compression.topk(model.named_parameters(), density=0.01"
    call += ", wire='float16+gap', group_numel=512)"
    assert f"\ncompression = {call}\n" in after
    assert set(after.splitlines()) - set(before.splitlines()) == {
        "import hvd_sparse",
        f"compression = {call}",
    }
    ast.parse(after)


@pytest.mark.parametrize(
    "source", ["import horovod.torch as hvd\n", SCRIPT.format(before="import horovod.torch as hvd")]
)
def test_other_scripts_are_refused(source: str) -> None:
    with pytest.raises(ExampleError, match="must occur once, got"):
        with_compression(source, "topk")


def test_the_difference_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(before=""))
    arguments = [
        str(tmp_path / "script.py"),
        "--show",
        "--compression",
        "oktopk",
        "--",
        "--np",
        "9",
    ]
    monkeypatch.setattr(sys, "argv", ["horovod_examples", *arguments])
    main()
    shown = capsys.readouterr().out
    assert "+import hvd_sparse\n" in shown
    assert "-compression = hvd.Compression.fp16 if" in shown
    assert "+compression = hvd_sparse.Compression.oktopk(model.named_parameters())\n" in shown
