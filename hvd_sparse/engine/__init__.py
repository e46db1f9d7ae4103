"""The engine: from gradients as they become ready to reduced gradients.

docs/architecture.md has the steps of a bucket (`exchange.py`); `worker.py` runs them on threads.

* The first step is collected whole, and its order of arrival on rank 0 makes the plan
  (`bucketing.py`). From then on every rank exchanges the buckets in the plan's order.
* One thread exchanges; a second one selects ahead from the buckets that follow. So threads change
  when things happen, and never what comes out.
* A step keeps its changes only once it is settled. `settle` takes it back bit for bit (memories,
  selectors, collectives and warm-ups) where nothing of it was applied, and else the residuals and
  momenta of the tensors in `undone` alone.
* Residuals stay with their tensors when the assignment changes; `residuals.py` is the home of what
  waits outside the buckets.
* Where a collective would send more than a dense ring, another one stands in (`staging.py`).
* `state.py` is one rank's state by parameter, so that it fits any plan and, through
  `checkpoint.py`, any number of ranks.

The engine does not know Horovod. `lane.py` orders a bucket's work on a CUDA device; elsewhere a
device decides on sizes, and on where messages land.
"""

from hvd_sparse.engine.account import Observer
from hvd_sparse.engine.bucketing import Assignment, Choice, Method, TensorSpec
from hvd_sparse.engine.clipping import WithDense
from hvd_sparse.engine.engine import Engine
from hvd_sparse.engine.stats import Stats

__all__ = [
    "Assignment",
    "Choice",
    "Engine",
    "Method",
    "Observer",
    "Stats",
    "TensorSpec",
    "WithDense",
]
