"""Residuals as a part of `hvd.elastic.TorchState`."""

from __future__ import annotations

import copy
from typing import Any

from horovod.torch.elastic import state as horovod_state


class CompressionStateHandler(horovod_state.StateHandler):  # type: ignore[misc]
    """Commits and restores a compression that is given to `TorchState(compression=…)`.

    Residuals are each rank's own, so `sync` sends nothing: a rank that is new begins with none.
    """

    def __init__(self, compression: Any) -> None:
        super().__init__(compression)
        self.save()

    def save(self) -> None:
        """Keep a copy of the state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to the last copy."""
        self.value.load_state_dict(self._saved, strict=False)  # its own; ranks may have moved

    def sync(self) -> None:
        """Make this rank's state the one to go back to."""
        self.save()


def register(cls: type) -> None:
    """Tell Horovod that this handler serves `cls`; once is enough."""
    registry = horovod_state.get_handler_registry()
    entry = (cls, CompressionStateHandler)
    if entry not in registry:
        horovod_state.set_handler_registry([*registry, entry])
