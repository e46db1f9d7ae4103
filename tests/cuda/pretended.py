"""A CUDA device that is not there: what is on it, what crosses, and how often the host waits.

Tensors on it are tensors in the CPU's memory that say otherwise. An operation that mixes the two
places fails, as it would on a device, and so does a copy through memory that is not pinned. Kernels
run by the shim. Each thread that computes there enters `Pretended` of its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hvd_sparse.ops.cuda import CudaOps
from tests.cuda.shim_launcher import ShimLauncher

CUDA = torch.device("cuda", 0)
COPIES = ("to", "cpu", "copy_")
"""By which tensors cross."""
NUMBERS = ("__int__", "__float__", "__bool__", "__index__", "item", "tolist", "nonzero", "unique")
"""What needs a value, or a number of elements: the host waits for it."""


class OnDevice(torch.Tensor):
    """A tensor on the device."""

    device = CUDA
    is_cpu = False

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a CUDA tensor to numpy")


class Pretended(TorchFunctionMode):
    """The device, as one thread uses it.

    Attributes:
        counts: Waits of the host, copies each way and their bytes, pageable copies, and launches.
    """

    _here = threading.local()

    def __init__(self, launcher: ShimLauncher) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.ops = CudaOps(self)
        self._launcher = launcher
        self._pinned: list[Tensor] = []  # they stay, so that no other memory has their addresses

    @staticmethod
    def of_thread() -> Pretended:
        """That of this thread."""
        found: Pretended = Pretended._here.device
        return found

    def launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        self.counts["launches"] += blocks > 0
        with torch._C.DisableTorchFunction():
            self._launcher.launch(kernel, blocks, *arguments)

    def __enter__(self) -> Pretended:  # type: ignore[override]
        self._here.device = self
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return self._pin(args[0].clone())
        if name in COPIES and (name != "to" or _device_of(args, kwargs) is not None):
            return self._copy(name, args, kwargs)
        tensors = [x for x in _flat((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in tensors if isinstance(x, OnDevice)]
        if there and name not in ("__get__", "__set__"):
            host = [x for x in tensors if not isinstance(x, OnDevice) and x.dim() > 0]
            assert not host, f"{name} has a tensor on the device, and one of {host[0].shape} here"
            self.counts["waits"] += name in NUMBERS or any(
                x.dtype == torch.bool for x in there if name in ("__getitem__", "__setitem__")
            )
        is_there = _type(kwargs.get("device")) == "cuda"
        if is_there:
            del kwargs["device"]
        pins = kwargs.pop("pin_memory", False)
        if "device" in kwargs and there:  # as torch.empty_like(there, device="cpu")
            args = [x.as_subclass(Tensor) if isinstance(x, OnDevice) else x for x in args]
        result = func(*args, **kwargs)
        return result.as_subclass(OnDevice) if is_there else self._pin(result) if pins else result

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(tensor)
        return tensor

    def _copy(self, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`x.to(device)`, `x.cpu()`, and `x.copy_(y)`."""
        x = args[0]
        target = args[1] if name == "copy_" else None
        source = target if target is not None else x
        goes_to = x.device.type if target is not None else _type(_device_of(args, kwargs)) or "cpu"
        if source.device.type != goes_to and source.numel():
            way = "to host" if goes_to == "cpu" else "to device"
            self.counts[f"copies {way}"] += 1
            self.counts[f"bytes {way}"] += source.nbytes
            here = x if target is not None and goes_to == "cpu" else source
            is_pinned = any(
                each.untyped_storage().data_ptr() == here.untyped_storage().data_ptr()
                for each in self._pinned
            )
            if not (kwargs.get("non_blocking") and is_pinned):
                self.counts["pageable"] += 1
                self.counts["waits"] += 1
        with torch._C.DisableTorchFunction():
            if target is not None:
                Tensor.copy_(x.as_subclass(Tensor), target.as_subclass(Tensor))
                return x
            if source.device.type == goes_to:
                return x
            copy = x.as_subclass(Tensor).clone()
            return copy.as_subclass(OnDevice) if goes_to == "cuda" else copy


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for each in value.values() for x in _flat(each)]
    if isinstance(value, list | tuple):
        return [x for each in value for x in _flat(each)]
    return [value]


def _type(device: Any) -> str | None:
    return None if device is None else torch.device(device).type


def _device_of(args: Any, kwargs: dict[str, Any]) -> Any:
    found = [x for x in args[1:] if isinstance(x, torch.device | str)]
    return kwargs.get("device", found[0] if found else None)


class Present(AbstractContextManager["Present"]):
    """The device that there is; nothing is counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """CUDA's, as far as the host's waits show."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert blocking, "a wait that spins takes a core"

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        Pretended.of_thread().counts["waits"] += 1

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    """CUDA's, whose work is done when it is issued."""

    device, cuda_stream = CUDA, 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self, event: Event) -> Event:
        return event
