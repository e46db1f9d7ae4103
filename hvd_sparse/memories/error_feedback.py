"""Error feedback: what is not sent now is kept and sent later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.accumulator import Accumulator, Scope
from hvd_sparse.streams import SparseStream, Sum
from hvd_sparse.transports import Transport


@dataclass(frozen=True)
class Fading:
    """What a residual loses with time, beside what is sent.

    Attributes:
        low_pass: β, in (0, 1]; 1: nothing is filtered.
        decay: In (0, 1]; 1: nothing decays.
    """

    low_pass: float = 1.0
    decay: float = 1.0


class ErrorFeedback:
    """The residual ε of one bucket (Ok-Topk, Algorithm 2, lines 4 and 6).

    The law that it keeps together with a collective, in exact arithmetic and summed over the ranks:
    residual before + gradient = what was applied + residual after.

    One step is `accumulate`, whose accumulator a selector takes entries out of; `take_at` where the
    collective wants more; then `give_back` of what had no part. Until the next one begins,
    `roll_back` takes the whole step back, wherever it has failed: a step reads what there was
    before, and writes to a second set of tensors, with which it then changes places. That costs
    no pass, and as much memory again.

    `fading` departs from that law by intent, and counts by how much. With ε the residual before the
    step and ε' what plain error feedback would keep of it,

      ε = decay ((1 - β) ε + β ε').

    β below 1 is ScaleCom's low-pass filter (Chen et al., NeurIPS 2020, algorithm 1), against noise
    of large learning rates; a decay below 1 is SparseLoCo's, against residuals that are stale.

    Args:
        numel: n.
        device: Where the gradients are.
        fading: β and the decay.

    Attributes:
        let_go_l1: Σ ‖ε' - what was kept‖₁ over the steps, as far as each counted.
        residual: float32 `(n,)`, on the gradients' device; always finite between steps. Another
            tensor in every step: ask for it anew.
    """

    def __init__(self, numel: int, device: torch.device, fading: Fading | None = None) -> None:
        self.residual = ops.zero_vector(numel, torch.float32, device)
        self.fading = fading or Fading()
        self.let_go_l1 = self._let_go_before = 0.0
        self._spare: tuple[Tensor, ...] | None = None
        self._taken_elsewhere: list[SparseStream] = []
        self._may_roll_back = False
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
        self._may_roll_back = False
        self._let_go_before = self.let_go_l1
        self._begin(k)
        self._forget()
        before = ops.Before(*self._state())
        self._change_places()
        self._may_roll_back = True
        return Accumulator(self._accumulation(gradients, before), scope)

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
        self.let_go_l1 += self._fade()

    def applied(self, reduced: Sum) -> Sum:
        """Learn the sum that the exchange came to; returns what the optimizer is to see of it.

        Args:
            reduced: Sum over the ranks, the same on all of them.
        """
        return reduced

    def roll_back(self) -> None:
        """Go back to what was before the step, bit for bit: nothing was applied."""
        if self._may_roll_back:  # else nothing has changed
            self._change_places()
            self._may_roll_back = False
            self.let_go_l1 = self._let_go_before
        self._forget()

    def undo(self, start: int, stop: int) -> None:
        """Go back to what was before the step in the elements `[start, stop)` alone."""
        if not self._may_roll_back:
            return
        assert self._spare is not None  # has what was before the step
        for tensor, before in zip(self._state(), self._spare, strict=True):
            tensor[start:stop].copy_(before[start:stop])
        self._taken = self._taken.where(~within(self._taken, start, stop))
        self._returned = self._returned.where(~within(self._returned, start, stop))
        elsewhere = self._taken_elsewhere
        self._taken_elsewhere = [each.where(~within(each, start, stop)) for each in elsewhere]

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

    def take_out(self, start: int, stop: int) -> dict[str, Tensor]:
        """Take the elements `[start, stop)` of the state out of it, between steps: by name."""
        parts = {}
        for name, tensor in self.tensors().items():
            parts[name] = tensor[start:stop].clone()
            tensor[start:stop].zero_()
        return parts

    def put_in(self, start: int, parts: Mapping[str, Tensor]) -> None:
        """Add what `take_out` returned, from an element on, between steps."""
        for name, tensor in self.tensors().items():
            tensor[start : start + parts[name].numel()] += parts[name]

    def agree(self, transport: Transport) -> None:
        """Learn from the other ranks what a loaded state does not tell; all ranks call this."""

    def _fade(self) -> float:
        """Let go of a part of what stays; its L1 norm."""
        low_pass, decay, let_go = self.fading.low_pass, self.fading.decay, 0.0
        if low_pass < 1.0:
            assert self._spare is not None  # has what was before the step
            before = self._spare[0]
            let_go += (1.0 - low_pass) * float(torch.dist(self.residual, before, p=1))
            torch.lerp(before, self.residual, low_pass, out=self.residual)
        if decay < 1.0:
            let_go += (1.0 - decay) * float(torch.linalg.vector_norm(self.residual, ord=1))
            self.residual.mul_(decay)
        return let_go

    def _forget(self) -> None:
        """Let go of what the last step took: nothing will be put back, or masked."""
        self._taken = self._returned = SparseStream.empty(self.residual.numel())
        self._taken_elsewhere = []

    # -- what other memories do in another way -----------------------------------------------------

    def _begin(self, k: int) -> None:
        """What comes before the pass over the gradients; where it fails, nothing has changed."""

    def _accumulation(self, gradients: Sequence[Tensor], before: ops.Before) -> ops.Accumulation:
        return ops.Accumulation(self.residual, gradients, before=before)

    def _state(self) -> tuple[Tensor, ...]:
        """All that a step changes."""
        return (self.residual,)

    def _set_state(self, *tensors: Tensor) -> None:
        """Take other tensors in their place."""
        (self.residual,) = tensors

    def _change_places(self) -> None:
        """Swap the state and the spare tensors: a step is about to write those, or is undone."""
        state, spare = self._state(), self._spare
        if spare is None:
            spare = tuple(ops.new_vector(x.numel(), x.dtype, x.device) for x in state)
        self._set_state(*spare)
        self._spare = state

    def _add(self, stream: SparseStream) -> None:
        if stream.nnz:
            stream = stream.to(self.residual.device)
            ops.scatter_add(self.residual, stream.indices, stream.values)


def within(stream: SparseStream, start: int, stop: int) -> Tensor:
    """Which entries have an index in `[start, stop)`: bool `(nnz,)`."""
    return (stream.indices >= start) & (stream.indices < stop)
