"""The planner: compress a tensor only where that is faster, by costs measured in this world."""

from hvd_sparse.planner.planner import Planner, World
from hvd_sparse.planner.profile import Profile

__all__ = ["Planner", "Profile", "World"]
