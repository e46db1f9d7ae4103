"""Checks of a state that was read from somewhere: nothing of it is believed."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from hvd_sparse.checks import check_above, check_count
from hvd_sparse.errors import ConfigError

WHERE = "state of the compression"
BUCKET_KEYS = frozenset({"names", "kind", "selector", "collective"})


def refuse(what: str) -> ConfigError:
    """An error that says where the fault is."""
    return ConfigError(f"{WHERE}: {what}")


def check_keys(state: Mapping[str, Any], expected: frozenset[str], where: str) -> None:
    """A mapping has these keys and no others."""
    if not isinstance(state, Mapping):
        raise refuse(f"{where} must be a mapping, got {type(state).__name__}")
    wrong = state.keys() ^ expected
    if wrong:
        raise refuse(f"{where}: missing or unknown keys {sorted(map(str, wrong))}")


def check_origin(state: Mapping[str, Any]) -> None:
    """Rank and world size are both known, or both unknown; step and unit are in their ranges."""
    rank, world_size = state["rank"], state["world_size"]
    if (rank is None) != (world_size is None):
        raise refuse(f"rank and world_size must both be known, got {rank!r} and {world_size!r}")
    if world_size is not None:
        check_count(f"{WHERE}: world_size", world_size, 1)
        check_count(f"{WHERE}: rank", rank, 0)
        if rank >= world_size:
            raise refuse(f"rank must be in [0, {world_size}), got {rank}")
    check_count(f"{WHERE}: step", state["step"], 0)
    if state["unit"] is not None:
        check_above(f"{WHERE}: unit", state["unit"], 0.0)
    if not isinstance(state["planner"], Mapping | None):
        raise refuse(f"planner must be a mapping or None, got {state['planner']!r}")
    if not isinstance(state["package"], str):
        raise refuse(f"package must be a version as text, got {state['package']!r}")


def check_tensors(state: Mapping[str, Any]) -> None:
    """Residuals and momenta are finite float32 tensors by name; a momentum has a residual."""
    for kind in ("residual", "momentum"):
        if not isinstance(state[kind], Mapping):
            raise refuse(f"{kind} must be tensors by name, got {type(state[kind]).__name__}")
        for name, tensor in state[kind].items():
            if not isinstance(name, str):
                raise refuse(f"{kind}: names must be text, got {name!r}")
            what = f"{kind} of {name!r}"
            if not isinstance(tensor, Tensor):
                raise refuse(f"{what} must be a tensor, got {type(tensor).__name__}")
            if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
                raise refuse(
                    f"{what} must be a dense torch.float32, got {tensor.dtype} in {tensor.layout}"
                )
            wrong = int((~tensor.isfinite()).sum())
            if wrong:
                raise refuse(f"{what} must be finite, got {wrong} values that are not")
    for name, tensor in state["momentum"].items():
        if name not in state["residual"]:
            raise refuse(f"momentum of {name!r} has no residual beside it")
        if tensor.shape != state["residual"][name].shape:
            raise refuse(
                f"momentum of {name!r}: shape must be its residual's "
                f"{tuple(state['residual'][name].shape)}, got {tuple(tensor.shape)}"
            )


def named(label: str) -> str:
    """The tensor of which a bucket has a part, by what `TensorSpec.label` calls the part."""
    return label.rpartition("[")[0]


def is_of(label: str, names: Set[str]) -> bool:
    """Whether a bucket's label is that of one of these tensors, or of a part of it."""
    return not names.isdisjoint({label, named(label)})


def check_buckets(state: Mapping[str, Any]) -> None:
    """Each bucket names its tensors, its kind and two mappings."""
    if not isinstance(state["buckets"], list):
        raise refuse(f"buckets must be a list, got {type(state['buckets']).__name__}")
    for place, bucket in enumerate(state["buckets"]):
        where = f"bucket {place}"
        check_keys(bucket, BUCKET_KEYS, where)
        if not isinstance(bucket["kind"], str):
            raise refuse(f"{where}: kind must be text, got {bucket['kind']!r}")
        if not isinstance(bucket["names"], list):
            raise refuse(f"{where}: names must be a list, got {type(bucket['names']).__name__}")
        strange = [
            name
            for name in bucket["names"]
            if not isinstance(name, str) or not is_of(name, state["residual"].keys())
        ]
        if strange:
            raise refuse(f"{where}: names must have residuals, got {strange[0]!r}")
        for part in ("selector", "collective"):
            if not isinstance(bucket[part], Mapping):
                raise refuse(
                    f"{where}: {part} must be a mapping, got {type(bucket[part]).__name__}"
                )


def check_like(value: Any, model: Any, where: str) -> None:
    """A selector's or collective's value is of the kind that a new one has in its place.

    Lists and tensors may be of other lengths: another world may have written them.
    """
    if isinstance(model, Mapping):
        check_keys(value, frozenset(model), where)
        for key in model:
            check_like(value[key], model[key], f"{where}: {key}")
    elif isinstance(model, Tensor):
        if not isinstance(value, Tensor) or (value.dtype, value.dim()) != (
            model.dtype,
            model.dim(),
        ):
            raise refuse(f"{where} must be {model.dtype} of {model.dim()} dimensions")
        if bool(value.isnan().any()):
            raise refuse(f"{where} must have no NaN")
    elif isinstance(model, list):
        if not isinstance(value, list):
            raise refuse(f"{where} must be a list, got {type(value).__name__}")
        for each in value:
            check_like(each, model[0] if model else each, where)
    elif isinstance(model, bool):
        if not isinstance(value, bool):
            raise refuse(f"{where} must be True or False, got {value!r}")
    elif isinstance(model, int):
        check_count(f"{WHERE}: {where}", value, 0)
    elif isinstance(model, float):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise refuse(f"{where} must be a number of at least 0, got {value!r}")
    elif type(value) is not type(model):
        raise refuse(f"{where} must be {type(model).__name__}, got {type(value).__name__}")
