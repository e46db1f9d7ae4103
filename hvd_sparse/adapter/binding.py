"""Parameters: known by object, named for people and agreement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.weak import TensorWeakRef

from hvd_sparse.engine import TensorSpec
from hvd_sparse.errors import ConfigError
from hvd_sparse.ops import moved
from hvd_sparse.streams import CPU

SPARSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types that are exchanged sparsely; the residual is float32, so float64 would lose precision."""

SEARCHED_FRAMES = 8

SAMPLED_TENSORS, SAMPLED_ENTRIES = 4, 64
"""What is looked at to see whether a script changes gradients, or an optimizer goes back."""

LOOKED_AT = 4096
"""Elements that are looked at first to see whether a gradient is not all zeros."""


class Caller(NamedTuple):
    """Who hands a tensor to a compression.

    Attributes:
        optimizer: Horovod's, whose compression it is; None: somebody else.
        parameter: Whose gradient the tensor is.
        synchronizes: Whether its `synchronize` does so, and no hook of the gradient.
        groups: Whether a group's gradients are handed over together.
    """

    optimizer: Any = None
    parameter: Parameter | None = None
    synchronizes: bool = False
    groups: bool = False


def caller_of(compressor: object) -> Caller:
    """Look among the callers; a compression does so once, for an optimizer's first gradient.

    Horovod hands over a tensor, and says neither whose it is nor for whom.
    """
    parameter: Parameter | None = None
    for frame in callers(SEARCHED_FRAMES):
        own = frame.f_locals
        if parameter is None and isinstance(own.get("p"), Tensor):
            parameter = own["p"]
        it: Any = own.get("self")
        if hasattr(it, "_allreduce_grad_async") and it._compression is compressor:
            names = [f.f_code.co_name for f in (frame, frame.f_back) if f is not None]
            groups = "_grouped_allreduce_grad_async" in names
            return Caller(it, parameter, "synchronize" in names, groups)
    return Caller()


def callers(most: int) -> list[FrameType]:
    """The frames of who called the function that asks, of who called that, and so on."""
    frames: list[FrameType] = []
    frame = sys._getframe(1).f_back
    while frame is not None and len(frames) < most:
        frames.append(frame)
        frame = frame.f_back
    return frames


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """A parameter or its gradient, as the engine knows it."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype))


def named_pairs(named_parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    """Names and parameters, as `model.named_parameters()` gives them.

    Raises:
        ConfigError: They are something else.
    """
    if isinstance(named_parameters, Module | Tensor) or not isinstance(named_parameters, Iterable):
        _refuse(f"a {type(named_parameters).__name__}")
    pairs = list(named_parameters)
    if not pairs:
        _refuse("none: an iterator is used up after one reading")
    for pair in pairs:
        match pair:
            case (str(), Parameter()) | (str(), Tensor(requires_grad=True, is_leaf=True)):
                continue
            case (str(name), Tensor()):
                _refuse(f"{name!r}, which is no parameter: a buffer, or of a state_dict()")
        _refuse(f"a {type(pair).__name__} among them")
    return pairs


def _refuse(found: str) -> NoReturn:
    raise ConfigError(
        "named_parameters must be pairs of name and parameter, as model.named_parameters(), "
        f"got {found}"
    )


class Entry:
    """One parameter of an optimizer: how its gradient travels, and what became of the last one.

    Attributes:
        parameter: The object.
        label: What Horovod calls it.
        name: What the compression calls it; None: it is none of the compression's.
        gradient: What was handed in for the step under way, or None.
        is_made: Whether it is zeros that the door made, where the script had none.
        is_by_hand: Whether it came without a hook: set by the script, or by a CUDA graph.
        version: Torch's count of its changes, as of then; of `given`, as of when it was given back.
        reduced: Brings the reduced gradient; None: the engine does.
        is_followed: Whether the reduced gradient has something of the residual in it.
        has_alias: Whether the engine has another tensor of the gradient's memory.
        given: The object in `p.grad` that was given back, while nobody knows what became of it.
        view: The same object, weakly.
        lent: The last object, weakly, that has taken a result's memory for its own.
        held: Whether it was not all zeros, bool (); None: no script has had it yet.
        idle_steps: How often it was given back since an optimizer, or the script, applied it.
        weights: A digest of the parameter's, as of then, after too many idle steps; else None.
        handle: What Horovod keeps of it while it is on its way.
        is_watched: Whether a hook looks at what was given before a backward pass adds to it.
    """

    __slots__ = (
        *("parameter", "label", "name", "gradient", "version", "reduced", "is_followed"),
        *("has_alias", "is_made", "given", "held", "weights", "is_watched", "handle", "_spec"),
        *("idle_steps", "view", "lent", "is_by_hand"),
    )

    def __init__(self, parameter: Parameter, label: str, name: str | None) -> None:
        self.parameter, self.label, self.name = parameter, label, name
        self.gradient: Tensor | None = None
        self.reduced: Callable[[], Tensor] | None = None
        self.given: Tensor | None = None
        self.held: Tensor | None = None
        self.version = self.idle_steps = 0
        self.weights: Tensor | None = None
        self.view: TensorWeakRef | None = None
        self.lent: TensorWeakRef | None = None
        self.is_followed = self.is_watched = self.has_alias = False
        self.is_made = self.is_by_hand = False
        self.handle: tuple[Callable[[], Tensor], None]
        self._spec: tuple[torch.Size, torch.dtype, TensorSpec] | None = None

    def lend(self, result: Tensor) -> None:
        """Make a reduced gradient, the engine's own memory, that of the parameter's gradient."""
        gradient = self.parameter.grad
        assert gradient is not None
        gradient.set_(result)  # type: ignore[call-overload]
        self.lent = TensorWeakRef(gradient)

    def spec_of(self, gradient: Tensor) -> TensorSpec:
        """A gradient as the engine knows it: one object, as long as it looks the same."""
        known = self._spec
        if known is None or known[1] is not gradient.dtype or known[0] != gradient.shape:
            assert self.name is not None
            spec = spec_of(self.name, gradient)
            known = self._spec = (gradient.shape, gradient.dtype, spec)
        return known[2]

    @property
    def was_zero(self) -> bool:
        """Whether what was given back was all zeros, as where nothing of the tensor was sent."""
        return self.held is not None and not self.held


def any_of(gradient: Tensor) -> Tensor:
    """What is true, (), if a gradient is not all zeros; torch does not count changes by `.data`."""
    values = gradient._values() if gradient.is_sparse else gradient
    if values.device.type != "cpu" or values.is_complex() or not values.numel():
        return values.any()
    stride = values.numel() // LOOKED_AT
    if stride > 1 and values.is_contiguous():
        some = values.view(-1)[::stride].any()
        if some:  # as a rule
            return some
    largest = values.max()  # 15 million take 4 ms; any() takes 18
    return largest if largest else values.min()


def any_of_each(gradients: list[Tensor]) -> list[Tensor]:
    """For each, what is true where `any_of` it is: on a device by one launch, not one for each."""
    devices = {g.device for g in gradients}
    is_plain = all(g.is_floating_point() and not g.is_sparse and g.numel() for g in gradients)
    if len(devices) == 1 and devices.pop().type == "cuda" and is_plain:
        return list(torch._foreach_norm(gradients, float("inf")))
    return list(map(any_of, gradients))


def told(flags: Sequence[Tensor]) -> list[bool]:
    """The flags on the host; a device is waited for once.

    Through pinned memory: another copy that waits for backward holds up all streams' copies.
    """
    if flags and flags[0].device.type == "cuda" and len({flag.device for flag in flags}) == 1:
        flags = list(moved((torch.stack(list(flags)),), CPU)[0])
    return list(map(bool, flags))


class Parameters:
    """Those whose gradients a compression may get, in the order of their names.

    A parameter with several names is called by the last of them, as Horovod calls it.
    """

    def __init__(self, pairs: Iterable[tuple[str, Parameter]]) -> None:
        pairs = list(pairs)
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"named_parameters: names must be unique, got {', '.join(twice)} twice"
            )
        self._by_name = dict(sorted(pairs, key=lambda pair: pair[0]))
        self._names = {p: name for name, p in self._by_name.items()}

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        return iter(sorted((name, p) for p, name in self._names.items()))

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._names

    def name_of(self, parameter: Parameter) -> str | None:
        """Its name; None where it is not one of these."""
        return self._names.get(parameter)

    def known_as(self, names: Iterable[str]) -> list[str]:
        """What the parameters of these names are called, of which each has one or more.

        Raises:
            ConfigError: There is no such parameter.
        """
        unknown = sorted(set(names := list(names)) - self._by_name.keys())
        if unknown:
            raise ConfigError(f"names must be those of parameters, got {', '.join(unknown)}")
        return [self._names[self._by_name[name]] for name in names]

    def sparse(self) -> list[tuple[str, Parameter]]:
        """Those of types that can be exchanged sparsely."""
        return [(name, p) for name, p in self if p.dtype in SPARSE_DTYPES]

    def sparse_specs(self) -> list[TensorSpec]:
        """The same, as the engine knows them."""
        return [spec_of(name, p) for name, p in self.sparse()]
