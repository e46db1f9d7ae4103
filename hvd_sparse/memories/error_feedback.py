"""Error feedback: what is not sent in this step is kept, and sent later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.accumulator import Accumulator, Scope
from hvd_sparse.streams import SparseStream, Sum
from hvd_sparse.transports import Transport


class ErrorFeedback:
    """The residual ε of one bucket (Ok-Topk, Algorithm 2, lines 4 and 6).

    The law that it keeps together with a collective, in exact arithmetic and summed over the ranks:
    residual before + gradient = what was applied + residual after.

    Until the next step begins, `roll_back` undoes the step, wherever it has failed: a step reads
    the old tensors and writes to a second set, and the two sets then change places. That costs no
    pass, and as much memory again.

    Low-pass filter and decay depart from the law by intent, and count by how much. With ε the
    residual before the step and ε' what plain error feedback would keep of it,

      ε = decay ((1 - β) ε + β ε').

    β below 1 is ScaleCom's low-pass filter (Chen et al., NeurIPS 2020, algorithm 1), against noise
    of large learning rates; a decay below 1 is SparseLoCo's, against residuals that are stale. Both
    are in (0, 1].

    Attributes:
        let_go_l1: L1 norms of what the filter and the decay changed, each by itself, over the
            steps. A step that counts for some tensors counts with the whole bucket's.
        residual: float32 `(n,)`, on the gradients' device; always finite between steps. Another
            tensor in every step: ask for it anew.
    """

    HELD: tuple[str, ...] = ("residual",)
    """The attributes that a step changes: tensors."""

    def __init__(
        self, numel: int, device: torch.device, low_pass: float = 1.0, decay: float = 1.0
    ) -> None:
        self.residual = ops.zero_vector(numel, torch.float32, device)
        self.low_pass, self.decay = low_pass, decay
        self.let_go_l1 = self._let_go_before = 0.0
        self._spare: tuple[Tensor, ...] | None = None
        self._taken_elsewhere: list[SparseStream] = []
        self._may_roll_back = False
        self._forget()

    def accumulate(
        self, gradients: Sequence[Tensor], k: int, scope: Scope | None = None
    ) -> Accumulator:
        """Begin a step: residual plus gradients, out of which a selector takes entries.

        The gradients are contiguous, and lie side by side over the residual. k entries are wanted
        from all ranks' scopes together; n: everything is sent. No scope: everywhere, all of k.
        """
        self._may_roll_back = False
        self._let_go_before = self.let_go_l1
        self._begin(k)
        self._forget()
        before = ops.Before(*self._tensors())
        self._change_places()
        self._may_roll_back = True
        return Accumulator(self._accumulation(gradients, before), scope)

    def take_at(self, indices: Tensor) -> Tensor:
        """Take the entries at more indices, int32 `(m,)` ascending, on the residual's device."""
        values = ops.on(self.residual.device).take_at(self.residual, indices)
        self._taken_elsewhere.append(SparseStream(indices, values, self.residual.numel()))
        return values

    def give_back(self, taken: SparseStream, returned: SparseStream) -> None:
        """End a step: keep what was taken, but had no part in what was applied.

        The selector has `taken` entries out of the step's accumulator. What is `returned` of them,
        and of what was taken elsewhere, had no part; it is finite.
        """
        self._taken, self._returned = taken, returned
        self._add(returned)
        self.let_go_l1 += self._fade()

    def applied(self, reduced: Sum) -> Sum:
        """Learn the sum over the ranks; returns what the optimizer sees of it."""
        return reduced

    def roll_back(self) -> None:
        """Undo the step, bit for bit."""
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
        for tensor, before in zip(self._tensors(), self._spare, strict=True):
            tensor[start:stop].copy_(before[start:stop])
        self._taken = self._taken.where(~within(self._taken, start, stop))
        self._returned = self._returned.where(~within(self._returned, start, stop))
        elsewhere = self._taken_elsewhere
        self._taken_elsewhere = [each.where(~within(each, start, stop)) for each in elsewhere]

    def rescale(self, factor: float) -> None:
        """Multiply the state by a factor, between steps: the gradients' unit has changed."""
        for tensor in self.tensors().values():
            tensor.mul_(factor).nan_to_num_()  # finite always, as the gradients will be

    def tensors(self) -> dict[str, Tensor]:
        """The state between steps, by name: float32 tensors `(n,)`.

        `momentum` is this rank's part: of any kind of momentum, only the sum over ranks counts.
        """
        return {"residual": self.residual}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state, between steps, by tensors like those of `tensors`, or by them."""
        for name, mine in self.tensors().items():
            mine.copy_(tensors[name])

    def take_out(self, start: int, stop: int) -> dict[str, Tensor]:
        """Take the elements `[start, stop)` out of the state, between steps: by name."""
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
        """Filter and decay the residual; returns the L1 norm of the changes."""
        low_pass, let_go = self.low_pass, 0.0
        if low_pass < 1.0:
            assert self._spare is not None  # has what was before the step
            before = self._spare[0]
            let_go += (1.0 - low_pass) * self._l1(self.residual - before)
            torch.lerp(before, self.residual, low_pass, out=self.residual)
        if self.decay < 1.0:
            let_go += (1.0 - self.decay) * self._l1(self.residual)
            self.residual.mul_(self.decay)
        return let_go

    def _forget(self) -> None:
        """Forget what the last step took: it will not be put back or masked."""
        self._taken = self._returned = SparseStream.empty(self.residual.numel())
        self._taken_elsewhere = []

    # -- for subclasses ----------------------------------------------------------------------------

    def _begin(self, k: int) -> None:
        """Prepare the pass over the gradients; if this fails, nothing has changed."""

    def _accumulation(self, gradients: Sequence[Tensor], before: ops.Before) -> ops.Accumulation:
        return ops.Accumulation(self.residual, gradients, before=before)

    def _l1(self, tensor: Tensor) -> float:
        """L1 norm of a part of the residual, in units of the gradients."""
        return float(torch.linalg.vector_norm(tensor, ord=1))

    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.HELD)

    def _change_places(self) -> None:
        """Swap the state and the spare tensors: a step is about to write those, or is undone."""
        state, spare = self._tensors(), self._spare
        if spare is None:
            spare = tuple(ops.new_vector(x.numel(), x.dtype, x.device) for x in state)
        for name, tensor in zip(self.HELD, spare, strict=True):
            setattr(self, name, tensor)
        self._spare = state

    def _add(self, stream: SparseStream) -> None:
        if stream.nnz:
            stream.to(self.residual.device).add_to(self.residual)


def within(stream: SparseStream, start: int, stop: int) -> Tensor:
    """Which entries have an index in `[start, stop)`: bool `(nnz,)`."""
    return (stream.indices >= start) & (stream.indices < stop)
