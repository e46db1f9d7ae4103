"""Global momentum: every rank adds its part of what all of them applied last.

Source: Shi et al., "Global Momentum Compression for Sparse Communication in Distributed Learning"
(GMC, arXiv 1905.12948).

Symbols: P ranks, ε residual, g gradient, m the momentum's factor, Δ the sum over the ranks that the
last step applied, s = Δ/P a rank's share of it.

Steps:
  1. ε = ε + m s, at the entries of Δ only; acc = ε + g.
  2. A selector takes entries out of acc, and a collective sums them: the new Δ.
  3. s = Δ/P. The optimizer sees Δ; with Nesterov's momentum it sees Δ + m (Δ - Δ of last step).

Summed over the ranks, what enters is Σ g + m Δ. At density 1 Δ therefore is the momentum of
heavy-ball SGD, and the Nesterov form is that of `torch.optim.SGD`. Momentum is a
multiple of what moved the weights, so it cannot grow in entries that are never sent: at low
densities that is where DGC's local momentum runs away.

Cost: that of plain error feedback, and O(k) more. No buffer of n elements.

A share is kept instead of Δ: where momentum comes from elsewhere (local momentum, another number of
ranks), the ranks' shares may differ. Only their sum matters, and the law of `ErrorFeedback` holds
for it, with g + m s in the place of the gradient.

Departure: the paper has Δ as a difference of weights. Here learning rate and weight decay stay with
the optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.memories.error_feedback import ErrorFeedback, within
from hvd_sparse.streams import SparseStream, Sum, sum_of
from hvd_sparse.transports import Transport
from hvd_sparse.transports.transport import gather_json


class GlobalMomentum(ErrorFeedback):
    """ε, which is the `residual`, and s of one bucket: `share`, on its device and always finite.

    `momentum` is m, in (0, 1). Where ε fades (`ErrorFeedback`), m s counts as the gradient does.
    """

    def __init__(
        self,
        numel: int,
        device: torch.device,
        world_size: int,
        momentum: float,
        nesterov: bool = False,
        **fading: float,
    ) -> None:
        super().__init__(numel, device, **fading)
        self.world_size = world_size
        self.momentum = momentum
        self.nesterov = nesterov
        self.share = SparseStream.empty(numel).to(device)
        self._last_sum = SparseStream.empty(numel)
        self._before = self.share, self._last_sum
        self._entered: SparseStream | None = None
        self._sums_out: dict[tuple[int, int], SparseStream] = {}  # Δ of what is out, by its place

    @override
    def applied(self, reduced: Sum) -> Sum:
        m, P, entries = self.momentum, self.world_size, reduced.as_stream()
        last, share = self._last_sum, entries.finite().times(1.0 / P)
        self.share = share.to(self.residual.device)
        self._last_sum = self.share.times(P)
        if not self.nesterov:
            return reduced
        last = last.to(entries.indices.device)
        return sum_of([entries.times(1.0 + m), last.times(-m)], self.residual.numel())

    @override
    def roll_back(self) -> None:
        super().roll_back()
        if self._entered is not None:
            self.residual[self._entered.indices.long()] = self._entered.values
            self.share, self._last_sum = self._before
        self._entered = None

    @override
    def undo(self, start: int, stop: int) -> None:
        if not self._may_roll_back:
            return
        super().undo(start, stop)
        if self._entered is not None:
            entered = self._entered.where(within(self._entered, start, stop))
            self.residual[entered.indices.long()] = entered.values

        def undone(now: SparseStream, then: SparseStream) -> SparseStream:
            parts = now.where(~within(now, start, stop)), then.where(within(then, start, stop))
            return sum_of(parts, now.numel)

        pairs = zip((self.share, self._last_sum), self._before, strict=True)
        self.share, self._last_sum = (undone(*pair) for pair in pairs)

    @override
    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        held = self.share, self._last_sum
        self.share, self._last_sum = (each.times(factor).finite() for each in held)
        out = self._sums_out.items()
        self._sums_out = {place: each.times(factor).finite() for place, each in out}

    @override
    def tensors(self) -> dict[str, Tensor]:
        # The momentum is a copy of the share: whoever changes it changes nothing here.
        momentum = torch.zeros_like(self.residual)
        self.share.write(momentum, 1.0)
        return {"residual": self.residual, "momentum": momentum}

    @override
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        # Until `agree` the other ranks' shares are taken to be like this one.
        super().load(tensors)
        momentum = tensors["momentum"].to(self.residual.device)
        indices = momentum.nonzero().view(-1)
        self.share = SparseStream(indices.int(), momentum[indices], momentum.numel())
        self._last_sum = self.share.times(self.world_size)

    @override
    def take_out(self, start: int, stop: int) -> dict[str, Tensor]:
        # Δ itself waits here, for Nesterov's step.
        parts = super().take_out(start, stop)  # of the momentum, which is a copy
        last, is_out = self._last_sum, within(self._last_sum, start, stop)
        self._sums_out[start, stop], self._last_sum = last.where(is_out), last.where(~is_out)
        self.share = self.share.where(~within(self.share, start, stop))
        return parts

    @override
    def put_in(self, start: int, parts: Mapping[str, Tensor]) -> None:
        super().put_in(start, parts)
        momentum, n = parts["momentum"], self.residual.numel()
        indices = momentum.nonzero().view(-1)
        part = SparseStream((indices + start).int(), momentum[indices], n)
        self.share = sum_of([self.share, part], n)
        place = start, start + momentum.numel()
        last = self._sums_out.pop(place, SparseStream.empty(n))
        self._last_sum = sum_of([self._last_sum, last], n)

    @override
    def agree(self, transport: Transport) -> None:
        # Nesterov's step needs Δ itself, not only this rank's share of it.
        if not self.nesterov:
            return
        share = self.share.to("cpu")
        digest = hashlib.sha256(share.indices.numpy().tobytes() + share.values.numpy().tobytes())
        if len(set(gather_json(transport, digest.hexdigest(), "momentum"))) == 1:
            return
        total = torch.zeros(share.numel, dtype=torch.float32, device="cpu")
        share.write(total, 1.0)
        total = transport.allreduce_sum(total, channel="momentum")
        indices = total.nonzero().view(-1)
        last = SparseStream(indices.int(), total[indices], share.numel)
        self._last_sum = last.to(self.residual.device)

    @override
    def _begin(self, k: int) -> None:
        """Step 1, for entries that stay finite; what was there is kept, to go back to."""
        self._before, self._entered = (self.share, self._last_sum), None
        indices = self.share.indices
        before = ops.on(self.residual.device).take_at(self.residual, indices)
        self._entered = SparseStream(indices, before, self.residual.numel())
        after = before + self.momentum * self.share.values
        entered = torch.where(after.isfinite(), after, before)
        SparseStream(indices, entered, self.residual.numel()).add_to(self.residual)

    @override
    def _fade(self) -> float:
        if self.low_pass < 1.0 and self._entered is not None:
            assert self._spare is not None  # of m s, which was applied, nothing may stay
            self._spare[0][self._entered.indices.long()] = self._entered.values
        return super()._fade()
