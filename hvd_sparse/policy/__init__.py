"""Policy files: which tensors are compressed, and how, as YAML beside the training script."""

from hvd_sparse.policy.assignment import PolicyAssignment
from hvd_sparse.policy.load import Policy, assign, load_policy

__all__ = ["Policy", "PolicyAssignment", "assign", "load_policy"]
