"""Policy files: which tensors are compressed, and how, as YAML beside the training script."""

from hvd_sparse.policy.load import assign, load_policy
