"""What an engine keeps over a restart, and how it is put back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.errors import ConfigError
from hvd_sparse.transports import Transport

VERSION = 1


@dataclass
class EngineState:
    """One rank's state.

    Attributes:
        residual: By parameter, float32 in the parameter's shape; each rank has its own.
        momentum: The same of momentum correction; empty without it.
        step: Steps done, for the warm-up.
        buckets: Names, selector and collective of each bucket. A collective's state is the same on
            all ranks.
    """

    residual: dict[str, Tensor] = field(default_factory=dict)
    momentum: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    buckets: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def of(buckets: Sequence[Bucket], leftover: Mapping[str, Tensor]) -> EngineState:
        """A copy of the buckets' state, and of residuals that are in none of them."""
        memories: dict[str, dict[str, Tensor]] = {"residual": {}, "momentum": {}}
        memories["residual"] = {name: tensor.clone() for name, tensor in leftover.items()}
        for bucket in buckets:
            for place, spec in enumerate(bucket.specs):
                for kind, tensor in bucket.memory_of(place).items():
                    memories[kind][spec.name] = tensor.clone()
        step = max((bucket.step for bucket in buckets), default=0)
        return EngineState(**memories, step=step, buckets=[b.state_dict() for b in buckets])

    def as_dict(self) -> dict[str, Any]:
        """As plain containers and tensors, for `torch.save`."""
        return {
            "version": VERSION,
            "residual": dict(self.residual),
            "momentum": dict(self.momentum),
            "step": self.step,
            "buckets": list(self.buckets),
        }

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> EngineState:
        """Read what `as_dict` made."""
        if state.get("version") != VERSION:
            raise ConfigError(
                f"state of the compression: version must be {VERSION}, got {state.get('version')!r}"
            )
        unknown = state.keys() ^ EngineState().as_dict().keys()
        if unknown:
            raise ConfigError(
                f"state of the compression: missing or unknown keys {sorted(unknown)}"
            )
        memories = {
            kind: {name: tensor.clone() for name, tensor in state[kind].items()}
            for kind in ("residual", "momentum")
        }
        return EngineState(**memories, step=int(state["step"]), buckets=list(state["buckets"]))

    def restore(self, buckets: Sequence[Bucket], transport: Transport) -> dict[str, Tensor]:
        """Put the state into new buckets; all ranks do so together.

        Residuals and momenta go by parameter, selectors to buckets of the same tensors and method.
        A collective goes on only where every rank brings the same state for it: after a change of
        the world, a new rank has none, and ranks that are at different steps would wait for each
        other. The warm-up goes on from the rank that is furthest.

        Returns:
            Residuals of tensors that are in no bucket: they wait for the next dense reduction.

        Raises:
            ConfigError: A residual's shape is not its parameter's.
        """
        left = self._restore_memories(buckets)
        steps = transport.allgather((torch.tensor([self.step]),), channel="state")
        for bucket in buckets:
            bucket.step = max(int(message.view(torch.int64)) for message in steps)
        matching = [self._state_for(bucket) for bucket in buckets]
        digests = torch.stack([_digest(state) for state in matching])
        everywhere = [
            message.view(digests.shape)
            for message in transport.allgather((digests,), channel="state")
        ]
        for place, (bucket, state) in enumerate(zip(buckets, matching, strict=True)):
            if state is None:
                continue
            bucket.selector.load_state_dict(state["selector"])
            if all(torch.equal(theirs[place], digests[place]) for theirs in everywhere):
                bucket.collective.load_state_dict(state["collective"])
        return left

    def _restore_memories(self, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
        left = {"residual": dict(self.residual), "momentum": dict(self.momentum)}
        for bucket in buckets:
            for place, spec in enumerate(bucket.specs):
                for kind, tensor in bucket.memory_of(place).items():
                    saved = left[kind].pop(spec.name, None)
                    if saved is None:
                        continue
                    if saved.shape != tensor.shape:
                        raise ConfigError(
                            f"{kind} of {spec.name!r}: shape must be {tuple(tensor.shape)}, "
                            f"got {tuple(saved.shape)}"
                        )
                    tensor.copy_(saved)
        return {name: tensor for name, tensor in left["residual"].items() if tensor.any()}

    def _state_for(self, bucket: Bucket) -> dict[str, Any] | None:
        return next((state for state in self.buckets if bucket.fits(state)), None)


def _digest(state: Mapping[str, Any] | None) -> Tensor:
    text = json.dumps(state and state["collective"], default=lambda tensor: tensor.tolist())
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
