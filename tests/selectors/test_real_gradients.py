"""Compressors on gradients of real trainings: benchmarks.gradients."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gradients import MODELS, RANKS, measured, recorded

SAMPLED = ("dgc", "dragonn", "mstopk", "sidco")
HELD = (*SAMPLED, "topk", "oktopk", "exdyna", "clt_k")


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("compressor", HELD)
def test_counts_hold_and_nothing_is_lost(compressor: str, density: float) -> None:
    again, lost, few = list[bool](), list[float](), 0
    for model in MODELS:
        gradients = recorded(model)
        steps = measured(compressor, gradients, density)
        again += [step.passes > 1 for step in steps]
        lost += [step.lost for step in steps]
        few += sum(step.nnz_share < 0.9 for step in steps)
        assert all(step.nnz_share <= 1.1 for step in steps), model
        drift = torch.tensor([step.drift for step in steps]).view(RANKS, -1).sum(0)
        assert float(drift.abs().max()) < 1e-3 * float(gradients.norm()), model
    # ExDyna has no candidates for a threshold that falls by more than a tenth in one step.
    assert few <= (0.1 * len(again) if compressor == "exdyna" else 0)
    if compressor in SAMPLED:
        assert sum(again) <= 0.02 * len(again)
    if compressor == "dragonn":
        assert sum(lost) <= 0.002 * len(lost)


@pytest.mark.xfail(reason="regions are cut at the mean of the ranks' quantiles", strict=False)
@pytest.mark.parametrize("model", MODELS)
def test_ok_topk_stays_in_its_bound(model: str) -> None:
    """6k (P-1)/P words, and the heads of its messages."""
    steps = measured("oktopk", recorded(model), 0.01)
    assert max(step.words for step in steps) <= 6.0


def test_real_gradients_have_structure() -> None:
    """Unlike shuffled ones: rows without any gradient, and neighbours of one scale."""
    for model in ("recommender", "experts", "lstm"):
        gradients = recorded(model)
        rows = gradients[..., : gradients.shape[-1] // 32 * 32].unflatten(-1, (-1, 32)).norm(dim=-1)
        assert float((rows == 0).float().mean()) > 0.3
    first, last = recorded("cnn")[0], recorded("cnn")[-1]
    assert float(first.norm()) > 3 * float(last.norm())
