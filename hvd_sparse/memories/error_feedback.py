"""Error feedback: what is not sent now is kept and sent later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.accumulator import Accumulator, Scope
from hvd_sparse.memories.clipping import Clipping
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport


class ErrorFeedback:
    """The residual ε of one bucket (Ok-Topk, Algorithm 2, lines 4 and 6).

    The law that it keeps together with a collective, in exact arithmetic and summed over the ranks:
    residual before + gradient = what was applied + residual after.

    One step is `accumulate`, whose accumulator a selector takes entries out of; `take_at` where the
    collective wants more; then `give_back` of what had no part. Until the next one begins,
    `roll_back` takes the whole step back, wherever it has failed: the operation that adds the
    gradients keeps what the step changes beside it, which takes as much memory again.

    Args:
        numel: n.
        device: Where the gradients are.
        clipping: Limits the gradients before they are added, in place; None: as they are.

    Attributes:
        residual: float32 `(n,)`, on the gradients' device; always finite.
    """

    def __init__(self, numel: int, device: torch.device, clipping: Clipping | None = None) -> None:
        self.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self.clipping = clipping
        self._kept: ops.Kept | None = None
        self._forget()

    def accumulate(
        self, gradients: Sequence[Tensor], k: int, scope: Scope | None = None
    ) -> Accumulator:
        """Begin a step: residual plus gradients, for a selector to take entries out of.

        Args:
            gradients: Contiguous tensors that lie side by side over the residual.
            k: Entries wanted from all ranks' scopes together; n: everything is sent, of which a
                memory may take account.
            scope: Where this rank selects, and its share of k; None: everywhere, all of it.
        """
        del k
        kept = self._place_to_keep()
        if self.clipping is not None:
            self.clipping.apply(gradients)
        self._forget()
        return Accumulator(self._accumulation(gradients, kept), scope)

    def take_at(self, indices: Tensor) -> Tensor:
        """Take out the entries at more indices, int32 `(m,)` ascending; their values `(m,)`.

        Indices may be on any device; the values are on the same.
        """
        places = indices.to(self.residual.device)
        values = ops.take_at(self.residual, places)
        self._taken_elsewhere.append(SparseStream(places, values, self.residual.numel()))
        return values.to(indices.device)

    def give_back(self, taken: SparseStream, returned: SparseStream) -> None:
        """End a step: keep what was taken, but had no part in what was applied.

        Args:
            taken: What the selector took out of the step's accumulator.
            returned: What of it, and of what was taken elsewhere, had no part; all finite.
        """
        self._taken, self._returned = taken, returned
        self._add(returned)

    def applied(self, reduced: SparseStream) -> SparseStream:
        """Learn the sum that the exchange came to; returns what the optimizer is to see of it.

        Args:
            reduced: Sum over the ranks, the same on all of them.
        """
        return reduced

    def roll_back(self) -> None:
        """Go back to what was before the step, bit for bit: nothing was applied."""
        if self._kept is not None and self._kept.complete:  # else nothing has changed
            for tensor, kept in zip(self._state(), self._kept.tensors(), strict=True):
                tensor.copy_(kept)
            self._kept.complete = False
        self._forget()

    def rescale(self, factor: float) -> None:
        """Multiply what is held by a factor, between steps: the gradients' unit has changed."""
        for tensor in self.tensors().values():
            tensor.mul_(factor)

    def tensors(self) -> dict[str, Tensor]:
        """The state by name: float32 tensors `(n,)`, to be read between steps.

        Beside the residual, `momentum` is this rank's part of the momentum: the ranks' sum is what
        counts, for any kind of momentum.
        """
        return {"residual": self.residual}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a state in the place of this one, between steps.

        Args:
            tensors: What `tensors` returned, changed in place or not, or tensors like them.
        """
        for name, mine in self.tensors().items():
            mine.copy_(tensors[name])

    def agree(self, transport: Transport) -> None:
        """Learn from the other ranks what a loaded state does not tell; all ranks call this."""

    def _forget(self) -> None:
        """Let go of what the last step took: nothing will be put back, or masked."""
        self._taken = self._returned = SparseStream.empty(self.residual.numel())
        self._taken_elsewhere: list[SparseStream] = []

    # -- what other memories do in another way -----------------------------------------------------

    def _accumulation(self, gradients: Sequence[Tensor], kept: ops.Kept) -> ops.Accumulation:
        return ops.Accumulation(self.residual, gradients, kept=kept)

    def _state(self) -> list[Tensor]:
        """All that a step changes."""
        return [self.residual]

    def _place_to_keep(self) -> ops.Kept:
        """Where the step that begins keeps what it changes; what the last one kept is let go."""
        if self._kept is None:
            self._kept = ops.Kept(*(torch.empty_like(tensor) for tensor in self._state()))
        self._kept.complete = False
        return self._kept

    def _add(self, stream: SparseStream) -> None:
        if stream.nnz:
            stream = stream.to(self.residual.device)
            ops.scatter_add(self.residual, stream.indices, stream.values)
