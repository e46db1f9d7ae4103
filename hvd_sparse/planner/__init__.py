"""The planner: compress a tensor only where that is faster, by costs measured in this world.

An `Assignment` says how each tensor is reduced: densely by Horovod, or by a `Method` in a named
bucket. A `Method` is the assignment that gives all tensors to itself; its identity is its name and
options. Tensors of one method, type and bucket name share buckets, in the order in which rank 0
first saw their gradients. All ranks gather what they would do and follow rank 0; where any rank has
other tensors or another assignment, all raise `PlanError`.

A `Planner` makes an assignment in the world that trains. The engine gets a `FixedAssignment` from
it, which does not change when the planner decides anew. One module for each step:

1. `remembered.py`: look for an earlier result with the same `Key` (model, rules, package, world),
   in the state or in the `PlanCache`. If there is one, training uses its plan from the first step.
2. `measure.py`: otherwise time Horovod's allreduce, and the encoding, exchange and decoding of each
   candidate. `costs.py` turns the times into lines, `fixed_s + per_element_s * n`: a `Profile`.
3. `choose.py`: search for plans by predicting the whole step, and name the contenders: the best
   plan, plans by other methods, and everything in the fewest buckets. No prediction knows how
   reductions and backward slow each other down, so it only names contenders.
4. `trial.py`: the contenders and the dense plan take turns of a few training steps, until they are
   told apart. The first turn is the dense plan's; it also shows when gradients become ready, and by
   how much the slowest rank's last gradient is later than rank 0's (`lateness`). Residuals of
   tensors that are dense for a turn wait.
5. `planner.py`: keep the fastest plan, remember the result, and review it every few hundred steps.

Only rank 0 decides, from its own costs and all ranks' steps; it broadcasts each `Decision`.
Plans change between two steps as by `reassign`, and momenta change sides with them
(`adapter/session.py`).
"""

from hvd_sparse.planner.planner import Planner, World, planner_of
from hvd_sparse.planner.remembered import PlanCache, default_path
