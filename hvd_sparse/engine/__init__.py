"""The engine: from gradients as they become ready to reduced gradients.

One step of a bucket (`exchange.py`; `worker.py` runs it on background threads):

```text
gradient ─► accumulate into the residual ─► select ─► SparseStream ─► collective over a transport
                       ▲                                                       │
                       └──────────── returned: what had no part in the sum ────┤
                                                                               ▼
                               p.grad ◄─ decode ◄────────────────────── reduced stream
```

* A plan. The first step is collected whole. `bucketing.py` groups its tensors in the order of
  arrival on rank 0; all ranks agree on that plan or raise `PlanError`. From then on every rank
  exchanges the buckets in the plan's order, each as soon as its last gradient is there.
* Threads. One thread exchanges; a second one selects ahead from the buckets that follow. Selecting
  sends nothing and touches only its own bucket, so threads change when things happen, and never
  what comes out.
* Commit. A step keeps its changes only once it is settled. `settle` takes it back bit for bit
  (memories, selectors, collectives and warm-ups) where nothing of it was applied, and else the
  residuals and momenta of the tensors in `undone` alone.
* Residuals. They stay with their tensors when the assignment changes. `residuals.py` is the one
  home of what waits outside the buckets: a tensor that has become dense releases its residual over
  several steps, of which each counts only if its result was applied; a frozen tensor keeps its own.
* Stages. At densities at which a collective would send more than a dense ring, another one stands
  in for it (`staging.py`).
* States. `state.py` is one rank's state by parameter, so that it fits any plan and, through
  `checkpoint.py`, any number of ranks.

The engine knows neither Horovod nor what is on a device; `lane.py` alone names CUDA.
"""

from hvd_sparse.engine.account import Observer
from hvd_sparse.engine.bucketing import Assignment, Choice, Method, TensorSpec
from hvd_sparse.engine.clipping import WithDense, with_dense
from hvd_sparse.engine.engine import Engine
from hvd_sparse.engine.stats import BucketStats, Stats, StepStats

__all__ = [
    "Assignment",
    "BucketStats",
    "Choice",
    "Engine",
    "Method",
    "Observer",
    "Stats",
    "StepStats",
    "TensorSpec",
    "WithDense",
    "with_dense",
]
