"""The ways that benchmarks compare: their names, and what backward hides of exchanges."""

from __future__ import annotations

import pytest

from benchmarks.ways import check_names, share_before


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], None),
        ([(5.0, 0.0)], None),
        ([(1.0, 2.0)], 1.0),
        ([(12.0, 2.0)], 0.0),
        ([(9.0, 4.0)], 0.25),
        ([(1.0, 2.0), (9.0, 4.0), (13.0, 2.0)], 3 / 8),
    ],
)
def test_what_lies_before_the_end(spans: list[tuple[float, float]], share: float | None) -> None:
    assert share_before(10.0, spans) == (None if share is None else pytest.approx(share))


def test_names_of_ways() -> None:
    good = ["horovod", "powersgd-4", "ddp-fp16", "topk:oktopk@0.01/float16+gap", "planned@1e-3"]
    assert check_names([*good, "topk@0.01/float16,hierarchical"]) == ""
    assert "unknown way 'topq@0.1'" in check_names(["horovod", "topq@0.1"])
    assert "a density must follow 'topk'" in check_names(["topk"])
    assert "'horovod,hierarchical' has no two levels" in check_names(["horovod,hierarchical"])
