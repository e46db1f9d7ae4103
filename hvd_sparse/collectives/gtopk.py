"""gTopk: a reduction tree that selects the k largest again at every node, then a broadcast.

Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks" (ICDCS 2019), algorithms 2 and 3; Ok-Topk's Table 1.

Symbols: P ranks, k entries per rank, α latency, β time per word.

Steps:
  1. every rank keeps its k largest;
  2. in round t, every second of the ranks that are left sends its stream to the one 2**(t-1) below,
     which adds it to its own and keeps the k largest magnitudes;
  3. rank 0 broadcasts what it has along a tree.

Cost: 2 log P · α + 4k log P · β for rank 0, or half of it for a leaf.

Departure from the paper: there, each rank takes back its own entries that are not in the result. An
entry that one node dropped, but that another path brought into the result, is lost then. Here the
node that dropped it (or that lost a bit of it to rounding) takes that back as well.
"""

from __future__ import annotations

from typing_extensions import override

from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.cost_model import Work
from hvd_sparse.streams import Part, SparseStream, sum_of, unapplied
from hvd_sparse.wire import Packer


class GTopk(Collective):
    """gTopk: k entries are applied, those that win at every node on their way."""

    @override
    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        packer = self.packer(stream)
        total, dropped = self._reduce_to_root(stream, packer)
        u = self._broadcast(total, packer)
        self.step += 1
        return Reduction(u, unapplied(stream, [*dropped, packer.lost(self.numel)], u))

    def _reduce_to_root(
        self, stream: SparseStream, packer: Packer
    ) -> tuple[SparseStream, list[SparseStream]]:
        """The tree; at rank 0, the sum. Returns what this rank dropped, too."""
        P, rank = self.transport.world_size, self.transport.rank
        total, rest = stream.to(packer.device).split_largest(self.k)
        dropped = [rest]
        mask = 1
        while mask < P:
            payload = dst = src = None
            if rank % (2 * mask) == mask:
                dst = rank - mask
                payload, _ = packer.pack(Part.of(total))
            elif rank % (2 * mask) == 0 and rank + mask < P:
                src = rank + mask
            message = self.transport.exchange(payload, dst, src, channel="gtopk.reduce").wait()
            if message is not None:
                theirs = packer.read(message, 0, self.numel).to_stream(self.numel)
                entries = total.nnz + theirs.nnz
                self.transport.worked(Work(entries, selected_entries=entries))
                total, rest = sum_of([total, theirs], self.numel).split_largest(self.k)
                dropped.append(rest)
            mask *= 2
        return total, dropped

    def _broadcast(self, total: SparseStream, packer: Packer) -> SparseStream:
        """Rank 0's stream, as all ranks read it."""
        payload = packer.pack(Part.of(total))[0] if self.transport.rank == 0 else None
        message = self.transport.broadcast(payload, channel="gtopk.broadcast")
        return packer.read(message, 0, self.numel).to_stream(self.numel)
