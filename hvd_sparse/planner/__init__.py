"""The planner: compress a tensor only where that is faster, by costs measured in this world."""

from hvd_sparse.planner.costs import Profile
from hvd_sparse.planner.planner import Planner, World, planner_of
from hvd_sparse.planner.remembered import PlanCache, default_path

__all__ = ["PlanCache", "Planner", "Profile", "World", "default_path", "planner_of"]
