"""The planner: compress a tensor only where that is faster, by costs measured in this world.

docs/planner.md has its steps, and each module's first lines the details: `remembered.py` (what an
earlier run found), `measure.py` and `costs.py` (a `Profile`), `choose.py` (contenders), `trial.py`
(their turns), `planner.py` (rank 0 decides, and all ranks follow each `Decision`).

The engine gets a `FixedAssignment`, which does not change when the planner decides anew. Plans
change between two steps as by `reassign`, and momenta change sides with them
(`adapter/session.py`).
"""

from hvd_sparse.planner.planner import Planner, World, planner_of
from hvd_sparse.planner.remembered import PlanCache, default_path
