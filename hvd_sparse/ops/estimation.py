"""What a threshold is estimated from; nothing here changes its arguments.

TypeError is raised for a number of another type, and ValueError where one is out of its range.
"""

from __future__ import annotations

from torch import Tensor

from hvd_sparse.ops import _arguments as checks
from hvd_sparse.ops._arguments import MAX_NUMEL, MAX_SEED
from hvd_sparse.ops._dispatch import on
from hvd_sparse.ops.accumulation import Accumulation


def sample_accumulator(accumulation: Accumulation, runs: int, run_numel: int, seed: int) -> Tensor:
    """Magnitudes at random places of what `accumulate_select` would make of the residual.

    Run r is one of the stretches from multiple to multiple of `run_numel` with numbers from
    r·m // runs up to (r + 1)·m // runs, where m = n // run_numel: every part of the vector has its
    share, and no order within it, such as a layer's width, meets that of the sample. Memory is read
    by the cache line: 16 consecutive elements cost little more than one does.

    There are `runs` in `[0, m]`, each of at least one element; the seed is in [0, 2**64). Returns
    float32 `(runs · run_numel,)`, in the order of the elements.
    """
    checks.integer("run_numel", run_numel, 1, MAX_NUMEL)
    checks.integer("runs", runs, 0, accumulation.numel // run_numel)
    checks.integer("seed", seed, 0, MAX_SEED)
    return on(accumulation.device).sample_accumulator(accumulation, runs, run_numel, seed)
