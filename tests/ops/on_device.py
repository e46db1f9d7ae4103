"""The operations on another device, called with tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hvd_sparse.ops import Accumulation, Before, Momentum
from hvd_sparse.ops._dispatch import on


class OnDevice:
    """Each call copies its arguments to the device, and results and changes back.

    A view goes there with its whole storage, so that its alignment stays.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ops = on(device)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._ops, name)

        def call(*arguments: Any, **named: Any) -> Any:
            storages: dict[int, tuple[Tensor, Tensor]] = {}
            there = self._moved(arguments, storages)
            named_there = {key: self._moved(value, storages) for key, value in named.items()}
            result = self._moved_back(op(*there, **named_there))
            for here, copy in storages.values():
                here.copy_(copy)
            return result

        return call

    def _moved(self, value: Any, storages: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.nbytes() == 0:
                return value.to(self._device)
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            _, copy = storages.setdefault(storage.data_ptr(), (here, here.to(self._device)))
            return (
                torch.empty(0, dtype=value.dtype, device=self._device)
                .set_(copy.untyped_storage())
                .as_strided(value.shape, value.stride(), value.storage_offset())
            )
        if isinstance(value, Accumulation):
            residual, gradients = self._moved((value.residual, value.gradients), storages)
            momentum, before = self._moved((value.momentum, value.before), storages)
            return Accumulation(residual, gradients, momentum, before)
        if isinstance(value, Before):
            return Before(*self._moved((value.residual, value.buffer), storages))
        if isinstance(value, Momentum):
            return replace(value, buffer=self._moved(value.buffer, storages))
        if isinstance(value, (list, tuple)):
            return type(value)(self._moved(item, storages) for item in value)
        return value

    def _moved_back(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.cpu()
        if isinstance(value, (list, tuple)):
            return type(value)(self._moved_back(item) for item in value)
        return value
