"""Warm-up of density: more is exchanged in the first steps, while gradients change fast.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887): over the
first epochs density falls exponentially, 0.25, 0.0625, 0.0156, 0.004, down to the target. Dense
first steps are Ok-Topk's (Li and Hoefler, PPoPP '22, section 5: 512 steps for VGG, 128 for LSTM).
"""

from __future__ import annotations

from dataclasses import dataclass

WARMUP_KINDS = ("exponential", "linear", "constant")
STAGES = 4
"""Densities that an exponential warm-up goes through, each for the same number of steps."""


@dataclass(frozen=True)
class Warmup:
    """Densities of the first steps.

    Attributes:
        kind: "exponential": four densities, each the same share of the one before, the first one
            `density`; "linear": from `density` straight to the target; "constant": `density`.
        steps: How many steps it takes.
        density: Where it begins, in (0, 1].
        dense_steps: Steps before it in which everything is exchanged.
    """

    kind: str = "exponential"
    steps: int = 0
    density: float = 0.25
    dense_steps: int = 0

    def density_at(self, step: int, target: float) -> float:
        """The density of step number `step`, from 0; never below the target."""
        if step < self.dense_steps:
            return 1.0
        step -= self.dense_steps
        if step >= self.steps or self.density <= target:
            return target
        if self.kind == "exponential":
            stage = step * STAGES // self.steps
            return float(self.density * (target / self.density) ** (stage / STAGES))
        if self.kind == "linear":
            return self.density + (target - self.density) * step / self.steps
        return self.density
