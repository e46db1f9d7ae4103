"""Random numbers that depend on a seed and a step, and on nothing else."""

from __future__ import annotations

MASK = (1 << 64) - 1


def mixed(seed: int, step: int) -> int:
    """64 well-mixed bits (splitmix64: Steele, Lea and Flood, OOPSLA 2014)."""
    x = (seed + (step + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
