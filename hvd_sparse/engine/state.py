"""What an engine keeps over a restart, how it is put back, and how it is checked when read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hvd_sparse._version import __version__
from hvd_sparse.checks import check_above_zero, check_count
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.errors import ConfigError
from hvd_sparse.transports import Transport
from hvd_sparse.transports.transport import gather_json

WHERE = "state of the compression"
VERSION = 2


@dataclass
class EngineState:
    """One rank's state.

    Attributes:
        residual: By parameter, float32 in the parameter's shape; each rank has its own.
        momentum: The same of momentum correction; empty without it.
        step: Steps done, for the warm-up.
        buckets: Names, selector and collective of each bucket. A collective's state is the same on
            all ranks.
        rank: The rank whose state it is; None before the ranks have met.
        world_size: P of that time, or None.
        unit: The loss scale that residuals are multiplied by, or None where there is none.
        scale: What the optimizer saw of a sum over the ranks: 1/P of an average. None: not known.
        package: Version of the package that wrote it; empty where that is not known.
        planner: The planner's own state, or None. The engine only carries it.
    """

    residual: dict[str, Tensor] = field(default_factory=dict)
    momentum: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    buckets: list[dict[str, Any]] = field(default_factory=list)
    rank: int | None = None
    world_size: int | None = None
    unit: float | None = None
    scale: float | None = None
    package: str = __version__
    planner: Mapping[str, Any] | None = None

    @staticmethod
    def of(
        buckets: Sequence[Bucket], outside: EngineState, transport: Transport | None
    ) -> EngineState:
        """A copy of the buckets' state, and of residuals and momenta that are outside of them."""
        state = EngineState(
            step=max(bucket.step for bucket in buckets),
            buckets=[bucket.state_dict() for bucket in buckets],
        )
        if transport is not None:
            state.rank, state.world_size = transport.rank, transport.world_size
        mine = state.by_kind()
        for bucket in buckets:
            for spec, tensors in bucket.split(bucket.tensors()):
                for kind, tensor in tensors.items():
                    if spec.name not in mine[kind]:
                        mine[kind][spec.name] = tensor.new_empty(spec.tensor.shape)
                    spec.of(mine[kind][spec.name]).copy_(tensor)
        state.add(outside.copy())
        return state

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        return {"residual": self.residual, "momentum": self.momentum}

    def add(self, other: EngineState) -> None:
        """Add another state's residuals and momenta, whose tensors may then be this one's."""
        theirs = other.by_kind()
        for kind, mine in self.by_kind().items():
            for name, tensor in theirs[kind].items():
                mine[name] = mine[name] + tensor if name in mine else tensor

    def copy(self) -> EngineState:
        residual, momentum = (
            {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for tensors in (self.residual, self.momentum)
        )
        return replace(self, residual=residual, momentum=momentum)

    def drop(self, names: Collection[str]) -> float:
        """Let go of tensors, and of their buckets' states; returns the residuals' L1 norm."""
        lost = l1_of(self.residual.pop(name) for name in names if name in self.residual)
        gone = set(names)
        for name in gone & self.momentum.keys():
            del self.momentum[name]
        self.buckets = [
            b for b in self.buckets if not any(_is_of(name, gone) for name in b["names"])
        ]
        return lost

    def as_dict(self) -> dict[str, Any]:
        """As plain containers and tensors, for `torch.save`."""
        kinds = {kind: dict(tensors) for kind, tensors in self.by_kind().items()}
        return {"version": VERSION, **vars(self), **kinds, "buckets": list(self.buckets)}

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> EngineState:
        """A copy of what `as_dict` made; ConfigError names what is wrong otherwise."""
        if not isinstance(state, Mapping):
            raise _refuse(f"it must be a mapping, got {type(state).__name__}")
        version = state.get("version")
        if type(version) is not int or version != VERSION:
            raise _refuse(f"version must be {VERSION}, got {version!r}")
        _check_keys(state, KEYS, "it")
        _check_origin(state)
        _check_tensors(state)
        _check_buckets(state)
        fields = {key: value for key, value in state.items() if key != "version"}
        fields |= {"step": int(state["step"]), "buckets": list(state["buckets"])}
        return EngineState(**fields).copy()

    def strangers(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """The tensors that do not belong to these shapes: by name, what is wrong with each.

        Those that hold nothing, as after `forget`, are dropped.
        """
        wrong = {}
        for name, tensor in sorted(self.residual.items()):
            if name not in shapes:
                wrong[name] = "there is no such parameter"
            elif tuple(tensor.shape) != tuple(shapes[name]):
                wrong[name] = f"shape must be {tuple(shapes[name])}, got {tuple(tensor.shape)}"
        empty = [n for n in wrong if not any(t[n].any() for t in self.by_kind().values() if n in t)]
        self.drop(empty)
        return {name: why for name, why in wrong.items() if name not in empty}

    def restore(
        self, buckets: Sequence[Bucket], transport: Transport, strict: bool = False
    ) -> EngineState:
        """Put the state into new buckets; all ranks do so together.

        Residuals and momenta go by parameter, selectors to buckets of the same tensors and method.
        A collective goes on only if every rank brings the same state for it: after a change of the
        world, a new rank has none, and ranks at different steps would wait for each other. The same
        holds for a selector that must be in one state on all ranks. The warm-up goes on from the
        rank that is furthest. `strict`: it was loaded as that of this rank, and so on all ranks.

        Returns:
            What tensors have that are in no bucket: they are dense now, or frozen.

        Raises:
            ConfigError: On every rank, if a state does not fit, or loaded ones are not of one step.
        """
        matching = [next(filter(bucket.fits, self.buckets), None) for bucket in buckets]
        misfit = self._misfit(buckets, matching, transport if strict else None)
        mine = {"misfit": misfit, "step": self.step, "strict": strict}
        theirs = gather_json(transport, mine, "state")
        _check_together(theirs)
        left = self._restore_memories(buckets)
        for bucket in buckets:
            bucket.memory.agree(bucket.collective.transport)
            bucket.step = max(their["step"] for their in theirs)
        digests = [_digest(*both) for both in zip(buckets, matching, strict=True)]
        peers = buckets[0].collective.transport  # those that exchange with this rank
        everywhere = zip(*gather_json(peers, digests, "state"), strict=True)
        for bucket, state, on_ranks in zip(buckets, matching, everywhere, strict=True):
            if state is None:
                continue
            is_alike = len(set(on_ranks)) == 1
            if is_alike or not bucket.selector.is_common:
                bucket.selector.load_state_dict(state["selector"])
            if is_alike:
                bucket.collective.load_state_dict(state["collective"])
        return left

    def _misfit(
        self,
        buckets: Sequence[Bucket],
        matching: Sequence[Mapping[str, Any] | None],
        transport: Transport | None,
    ) -> str:
        """What does not fit, or nothing; with a transport, the rank must fit as well."""
        shapes = {spec.name: spec.tensor.shape for bucket in buckets for spec in bucket.specs}
        strangers = self.strangers({**{n: t.shape for n, t in self.residual.items()}, **shapes})
        for name, why in strangers.items():
            return f"residual of {name!r}: {why}"
        try:
            for bucket, state in zip(buckets, matching, strict=True):
                if state is not None:
                    where = f"bucket of {', '.join(bucket.stats.names)}"
                    new = bucket.state_dict()
                    for part in ("selector", "collective"):
                        _check_like(state[part], new[part], f"{where}: {part}")
            if transport is not None:
                self.check_rank(transport)
        except ConfigError as error:
            return str(error)
        return ""

    def check_rank(self, transport: Transport) -> None:
        """Raise ConfigError unless this is, as far as it says, that of this rank in this world."""
        mine, its = (transport.rank, transport.world_size), (self.rank, self.world_size)
        if its[0] is not None and its != mine:
            raise _refuse(
                f"it must be that of rank {mine[0]} of {mine[1]}, got that of rank {its[0]} of "
                f"{its[1]}: save_checkpoint and load_checkpoint change the world size"
            )

    def _restore_memories(self, buckets: Sequence[Bucket]) -> EngineState:
        saved, names = self.by_kind(), set()
        for bucket in buckets:
            flat = bucket.tensors()
            for spec, tensors in bucket.split(flat):
                names.add(spec.name)
                for kind, tensor in tensors.items():
                    if spec.name in saved[kind]:
                        tensor.copy_(spec.of(saved[kind][spec.name]))
            bucket.load(flat)
        # Of a frozen tensor there may be a momentum alone.
        held = {n for kind in saved.values() for n, t in kind.items() if n not in names and t.any()}
        residual, momentum = ({n: kind[n] for n in kind if n in held} for kind in saved.values())
        return EngineState(residual, momentum)


KEYS = frozenset(EngineState().as_dict())


def _check_together(states: Sequence[Mapping[str, Any]]) -> None:
    """Check what all ranks told; they see the same, and so raise alike."""
    for rank, state in enumerate(states):
        if state["misfit"]:
            raise ConfigError(f"rank {rank}: {state['misfit']}")
    loaded = {rank: state["step"] for rank, state in enumerate(states) if state["strict"]}
    if not loaded:
        return
    absent = [rank for rank in range(len(states)) if rank not in loaded]
    if absent:
        raise _refuse(f"all ranks must load one, but rank {absent[0]} has not")
    if len(set(loaded.values())) > 1:
        steps = ", ".join(f"rank {rank} {step}" for rank, step in loaded.items())
        raise _refuse(f"step must be the same on all ranks, got {steps}")


def _digest(bucket: Bucket, state: Mapping[str, Any] | None) -> str:
    selected = state["selector"] if state and bucket.selector.is_common else None
    common = state and [bucket.collective.common(state["collective"]), selected]
    text = json.dumps(common, default=lambda tensor: tensor.tolist())
    return hashlib.sha256(text.encode()).hexdigest()


def l1_of(tensors: Iterable[Tensor]) -> float:
    """L1 norm of tensors together."""
    return sum(float(tensor.norm(1, dtype=torch.float64)) for tensor in tensors)


# -- checks of a state that was read from somewhere: nothing of it is believed ---------------------


def _refuse(what: str) -> ConfigError:
    return ConfigError(f"{WHERE}: {what}")


def _check_type(value: Any, kind: Any, what: str) -> None:
    if not isinstance(value, kind):
        raise _refuse(f"{what}, got {type(value).__name__}")


def _check_keys(state: Any, expected: Collection[str], where: str) -> None:
    _check_type(state, Mapping, f"{where} must be a mapping")
    wrong = state.keys() ^ set(expected)
    if wrong:
        raise _refuse(f"{where}: missing or unknown keys {sorted(map(str, wrong))}")


def _check_origin(state: Mapping[str, Any]) -> None:
    """Rank and world size are both known, or both unknown; step and unit are in their ranges."""
    rank, world_size = state["rank"], state["world_size"]
    if (rank is None) != (world_size is None):
        raise _refuse(f"rank and world_size must both be known, got {rank!r} and {world_size!r}")
    if world_size is not None:
        check_count(f"{WHERE}: world_size", world_size, 1)
        check_count(f"{WHERE}: rank", rank, 0)
        if rank >= world_size:
            raise _refuse(f"rank must be in [0, {world_size}), got {rank}")
    check_count(f"{WHERE}: step", state["step"], 0)
    for key in ("unit", "scale"):
        if state[key] is not None:
            check_above_zero(f"{WHERE}: {key}", state[key])
    if not isinstance(state["planner"], Mapping | None):
        raise _refuse(f"planner must be a mapping or None, got {state['planner']!r}")
    if not isinstance(state["package"], str):
        raise _refuse(f"package must be a version as text, got {state['package']!r}")


def _check_tensors(state: Mapping[str, Any]) -> None:
    """Residuals and momenta are finite float32 tensors by name; a momentum has a residual."""
    for kind in ("residual", "momentum"):
        _check_type(state[kind], Mapping, f"{kind} must be tensors by name")
        for name, tensor in state[kind].items():
            if not isinstance(name, str):
                raise _refuse(f"{kind}: names must be text, got {name!r}")
            what = f"{kind} of {name!r}"
            _check_type(tensor, Tensor, f"{what} must be a tensor")
            if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
                raise _refuse(
                    f"{what} must be a dense torch.float32, got {tensor.dtype} in {tensor.layout}"
                )
            wrong = int((~tensor.isfinite()).sum())
            if wrong:
                raise _refuse(f"{what} must be finite, got {wrong} values that are not")
    for name, tensor in state["momentum"].items():
        if name not in state["residual"]:
            raise _refuse(f"momentum of {name!r} has no residual beside it")
        shape = tuple(state["residual"][name].shape)
        if tensor.shape != shape:
            raise _refuse(
                f"momentum of {name!r}: shape must be its residual's {shape}, "
                f"got {tuple(tensor.shape)}"
            )


def _check_buckets(state: Mapping[str, Any]) -> None:
    """Each bucket names its tensors, its kind and two mappings."""
    _check_type(state["buckets"], list, "buckets must be a list")
    for place, bucket in enumerate(state["buckets"]):
        where = f"bucket {place}"
        _check_keys(bucket, ("names", "kind", "selector", "collective"), where)
        if not isinstance(bucket["kind"], str):
            raise _refuse(f"{where}: kind must be text, got {bucket['kind']!r}")
        _check_type(bucket["names"], list, f"{where}: names must be a list")
        for name in bucket["names"]:
            if not isinstance(name, str) or not _is_of(name, state["residual"].keys()):
                raise _refuse(f"{where}: names must have residuals, got {name!r}")
        for part in ("selector", "collective"):
            _check_type(bucket[part], Mapping, f"{where}: {part} must be a mapping")


def _is_of(label: str, names: Set[str]) -> bool:
    """Whether a bucket's label (`TensorSpec.label`) is one of these tensors, or a part of one."""
    return not names.isdisjoint({label, label.rpartition("[")[0]})


def _check_like(value: Any, model: Any, where: str) -> None:
    """A selector's or collective's value is of the kind that a new one has in its place.

    Lists and tensors may be of other lengths: another world may have written them.
    """
    if isinstance(model, Mapping):
        _check_keys(value, model.keys(), where)
        for key in model:
            _check_like(value[key], model[key], f"{where}: {key}")
    elif isinstance(model, Tensor):
        expected = (model.dtype, model.dim())
        if not isinstance(value, Tensor) or (value.dtype, value.dim()) != expected:
            raise _refuse(f"{where} must be {model.dtype} of {model.dim()} dimensions")
        if bool(value.isnan().any()):
            raise _refuse(f"{where} must have no NaN")
    elif isinstance(model, list):
        _check_type(value, list, f"{where} must be a list")
        for each in value:
            _check_like(each, model[0] if model else each, where)
    elif isinstance(model, bool):
        if not isinstance(value, bool):
            raise _refuse(f"{where} must be True or False, got {value!r}")
    elif isinstance(model, int):
        check_count(f"{WHERE}: {where}", value, 0)
    elif isinstance(model, float):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise _refuse(f"{where} must be a number of at least 0, got {value!r}")
    elif type(value) is not type(model):
        raise _refuse(f"{where} must be {type(model).__name__}, got {type(value).__name__}")
