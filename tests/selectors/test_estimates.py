"""Thresholds: nnz stays near k, whatever the gradients do."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gradients import Counted
from hvd_sparse.accumulator import Accumulator, Scope
from hvd_sparse.methods.catalogue import GaussiankOptions
from hvd_sparse.ops import Accumulation
from hvd_sparse.selectors import (
    BisectionTopK,
    ExactTopK,
    GaussianThreshold,
    GroupedTopK,
    HardThreshold,
    HashedExtraction,
    RandomK,
    ReusedThreshold,
    SampledThreshold,
    Selector,
    SidcoThreshold,
    ThresholdSelector,
)
from hvd_sparse.selectors.sampled import SAMPLE_SHARE, runs_of
from tests.devices import on_every_device

SELECTORS: dict[str, Callable[[], Selector]] = {
    "exact": ExactTopK,
    "reused": partial(ReusedThreshold, 32),
    "sampled": lambda: ThresholdSelector(SampledThreshold()),
    "sidco": lambda: ThresholdSelector(SidcoThreshold()),
    "bisection": BisectionTopK,
    "hashed": lambda: ThresholdSelector(SampledThreshold(), HashedExtraction()),
    "hashed single": lambda: ThresholdSelector(SampledThreshold(), HashedExtraction(4.0, 1)),
    "random": RandomK,
    "grouped": GroupedTopK,
}
NUMEL = 50_000


def recorded() -> list[Tensor]:
    """The gradients of a small network while it learns: layers of very different scale."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 96), nn.Tanh())
    head = nn.Linear(96, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    teacher = torch.randn(64)
    gradients = []
    for _ in range(12):
        x = torch.randn(32, 64)
        optimizer.zero_grad()
        nn.functional.mse_loss(head(model(x)).squeeze(1), (x @ teacher).tanh()).backward()
        gradients.append(torch.cat([p.grad.view(-1) for p in model.parameters()]))
        optimizer.step()
    return gradients


def sequences() -> dict[str, list[Tensor]]:
    g = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(NUMEL, generator=g)

    return {
        "recorded": recorded(),
        "normal": [normal() for _ in range(12)],
        "jump up": [normal() * (1.0 if step < 6 else 1000.0) for step in range(12)],
        "jump down": [normal() * (1.0 if step < 6 else 1e-3) for step in range(12)],
        "heavy tail": [normal() ** 5 for _ in range(12)],
        "all equal": [torch.full((NUMEL,), -3.0) for _ in range(12)],
        "all zero": [torch.zeros(NUMEL) for _ in range(12)],
        "ties": [torch.randint(-2, 3, (NUMEL,), generator=g).float() for _ in range(12)],
        "layers": [normal() * 10.0 ** (torch.arange(NUMEL) * 8 // NUMEL) for _ in range(12)],
        "few nonzeros": [normal() * (torch.arange(NUMEL) % 500 == 7) for _ in range(12)],
    }


SEQUENCES = sequences()


@on_every_device
@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("selector", SELECTORS)
def test_density_is_held_in_every_step(
    selector: str, name: str, density: float, device: torch.device
) -> None:
    gradients = [gradient.to(device) for gradient in SEQUENCES[name]]
    numel = gradients[0].numel()
    k = round(density * numel)
    chooser, residual = SELECTORS[selector](), torch.zeros(numel, device=device)
    for step, gradient in enumerate(gradients):
        total = residual + gradient
        stream = chooser.select(Accumulator(Accumulation(residual, [gradient])), k)
        least = 0.9 * min(k, int(total.count_nonzero()))
        if selector == "grouped" and name == "few nonzeros":
            least = 0  # it takes no more from one group than from another
        assert least <= stream.nnz <= 1.1 * k, step
        assert bool((stream.indices[1:] > stream.indices[:-1]).all())
        residual[stream.indices.long()] += stream.values
        assert torch.equal(residual, total)
        residual[stream.indices.long()] = 0.0


def test_gaussiank_is_what_it_is() -> None:
    """Close on normal values; on heavy tails its three adjustments bring it within a third of k."""
    generator = torch.Generator().manual_seed(5)
    for power, low, high in ((1, 0.8, 1.2), (5, 2 / 3, 4 / 3)):
        selector = ThresholdSelector(GaussianThreshold(1.0), tolerance=math.inf)
        gradient = torch.randn(NUMEL, generator=generator) ** power
        stream = selector.select(
            Accumulator(Accumulation(torch.zeros(NUMEL), [gradient])), NUMEL // 20
        )
        assert low <= stream.nnz / (NUMEL // 20) <= high
    accumulator = Accumulator(
        Accumulation(torch.zeros(NUMEL), [torch.randn(NUMEL, generator=generator)])
    )
    for k, quantile in ((NUMEL // 20, 1.960), (NUMEL // 1000, 3.291)):  # two-sided, standard normal
        threshold, _ = GaussianThreshold(1.0).estimate(accumulator, k)
        assert threshold == pytest.approx(quantile, rel=0.05)


def test_gaussiank_is_scaled_until_it_is_fair() -> None:
    """Ok-Topk, section 5.4: the published adjustments end far below k for a heavy tail."""
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(5)) ** 21
    counts = []
    for least_share in (0.0, 0.75):
        selector = GaussiankOptions(sample_share=1.0, least_share=least_share).selector()
        accumulator = Accumulator(Accumulation(torch.zeros(NUMEL), [gradient]))
        counts.append(selector.select(accumulator, NUMEL // 20).nnz * 20 / NUMEL)
    assert counts[0] < 2 / 3
    assert counts[1] == 0.75


def test_sidco_fits_exponential_tails_exactly() -> None:
    """Of exponential magnitudes, a share d exceeds μ ln(1/d), whatever the number of stages."""
    generator = torch.Generator().manual_seed(6)
    magnitudes = torch.empty(200_000).exponential_(generator=generator)
    accumulator = Accumulator(Accumulation(torch.zeros(200_000), [magnitudes]))
    for density in (0.5, 0.1, 0.01):
        threshold, _ = SidcoThreshold(1.0).estimate(accumulator, round(density * 200_000))
        assert threshold == pytest.approx(math.log(1 / density), rel=0.05)


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("width", [64, 512])
def test_rows_of_different_scale_seldom_cost_a_second_pass(width: int, density: float) -> None:
    """Neighbours resemble each other: a sample of runs has less to tell than its elements."""
    numel, vectors, samples = 1_000_000, 10, 20
    k, generator = round(density * numel), torch.Generator().manual_seed(8)
    estimator, passes, room = SampledThreshold(), 0, 0
    for _ in range(vectors):
        scales = torch.randn(numel // width, 1, generator=generator).mul_(1.5).exp_()
        x = (torch.randn(numel // width, width, generator=generator) * scales).flatten()
        ranked = x.abs().sort().values
        for _ in range(samples):
            threshold, most = estimator.estimate(Accumulator(Accumulation(x)), k)
            passing = numel - int(torch.searchsorted(ranked, threshold))
            passes += passing < 0.9 * k
            room += passing <= most
            assert passing < 12 * k
    assert passes <= 0.02 * vectors * samples
    assert room >= 0.85 * vectors * samples


def test_a_sample_reads_few_lines() -> None:
    """At most as many elements and cache lines as 32 neighbours at a stride, of 1 % in all."""
    for numel in (100_000, 1_000_000, 8_000_000, 25_000_000):
        runs, run_numel = runs_of(numel, SAMPLE_SHARE)
        strided = min(max(numel // 100, 1 << 13), 1 << 17)
        assert runs * run_numel <= strided
        assert runs * -(-run_numel // 16) <= strided // 32 * 3


def test_what_is_not_finite_does_not_spoil_an_estimate() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(4))
    expected = SampledThreshold().estimate(Accumulator(Accumulation(x)), 1000)[0]
    x[::11] = math.nan
    x[5::13] = math.inf
    threshold, _ = SampledThreshold().estimate(Accumulator(Accumulation(x)), 1000)
    assert threshold == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("swing", "most_exact"), [(0.0, 5), (0.3, 30)])
def test_a_threshold_is_reused_while_it_stays(swing: float, most_exact: int) -> None:
    """One that moved is evaluated anew, in one pass; one that is reused seldom takes a second."""
    generator, selector, exact, again = torch.Generator().manual_seed(1), ReusedThreshold(32), 0, 0
    for step in range(30):
        scale = math.exp(swing if step % 2 else -swing)
        gradient = torch.randn(NUMEL, generator=generator) * scale
        accumulator = Counted(Accumulation(torch.zeros(NUMEL), [gradient]))
        exact += selector.step % selector.interval == 0
        stream = selector.select(accumulator, NUMEL // 20)
        again += accumulator.passes > 1
        assert 0.9 <= stream.nnz / (NUMEL // 20) <= 1.1
    assert exact <= most_exact
    assert again <= 1


def test_hard_threshold_takes_all_that_reaches_it() -> None:
    residual, gradient = torch.zeros(6), torch.tensor([0.5, -0.5, 0.49, 0.0, 3.0, -9.0])
    stream = HardThreshold(0.5).select(Accumulator(Accumulation(residual, [gradient])), 1)
    assert stream.indices.tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("selector", ["sampled", "hashed", "bisection", "sidco", "random"])
def test_no_part_of_the_tensor_is_favoured(selector: str) -> None:
    """Of gradients that are alike everywhere, each decile of the indices sends a tenth."""
    chooser, residual = SELECTORS[selector](), torch.zeros(NUMEL)
    generator = torch.Generator().manual_seed(1)
    deciles = torch.zeros(10)
    for _ in range(60):
        gradient = torch.randn(NUMEL, generator=generator)
        stream = chooser.select(Accumulator(Accumulation(residual, [gradient])), NUMEL // 100)
        deciles += torch.bincount(stream.indices.long() * 10 // NUMEL, minlength=10)
    expected = deciles.sum() / 10
    chi_squared = float(((deciles - expected) ** 2 / expected).sum())
    assert chi_squared < 27.9  # 9 degrees of freedom: exceeded once in 1,000 uniform draws


@on_every_device
@pytest.mark.parametrize("selector", SELECTORS)
def test_states_continue_bit_for_bit(selector: str, device: torch.device) -> None:
    gradients = [gradient.to(device) for gradient in SEQUENCES["heavy tail"]]
    first, residual = SELECTORS[selector](), torch.zeros(NUMEL, device=device)
    for gradient in gradients[:5]:
        first.select(Accumulator(Accumulation(residual, [gradient])), 500)
    second, copy = SELECTORS[selector](), residual.clone()
    second.load_state_dict(first.state_dict())
    for gradient in gradients[5:]:
        ours = first.select(Accumulator(Accumulation(residual, [gradient])), 500)
        theirs = second.select(Accumulator(Accumulation(copy, [gradient])), 500)
        assert torch.equal(ours.indices, theirs.indices)
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(residual, copy)


@on_every_device
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_scope_is_kept_to(selector: str, device: torch.device) -> None:
    """Gradients are added everywhere; entries are taken in the scope, its share of k."""
    chooser, residual = SELECTORS[selector](), torch.zeros(NUMEL, device=device)
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(2))
    gradient[7] = math.nan
    gradient = gradient.to(device)
    scope = Scope(10_000, 30_000, share=0.25)
    stream = chooser.select(Accumulator(Accumulation(residual, [gradient]), scope), 400)
    inside = stream.indices[1:]
    assert stream.indices[0] == 7  # what is not finite is taken wherever it is
    assert math.isnan(stream.values[0])
    assert 10_000 <= int(inside.min()) <= int(inside.max()) < 30_000
    assert 90 <= inside.numel() <= 110
    residual[stream.indices.long()] += stream.values
    assert torch.equal(residual[8:], gradient[8:])


def test_single_slots_lose_what_the_lemma_says() -> None:
    """DRAGONN, lemma A.10: a share p = (1 - 1/m)^n of m slots stays empty, give or take ε."""
    numel, m, entries = 1 << 20, 1 << 14, 1 << 14
    p = (1 - 1 / m) ** entries
    epsilon = 0.01
    outside = 0
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        x = torch.zeros(numel)
        x[torch.randperm(numel, generator=generator)[:entries]] = 1.0
        extraction = HashedExtraction(1.0, 1)
        extraction.step = step
        stream = extraction.extract(Accumulator(Accumulation(x)), 0.5, entries)
        assert stream.nnz + int(x.count_nonzero()) == entries  # who lost its slot is still there
        outside += abs((m - stream.nnz) / m - p) >= epsilon
    assert outside == 0  # the lemma's bound is 2 exp(-m ε² / 3p) / √m, 0.4 % of the runs
