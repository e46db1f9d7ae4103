"""How a bucket is exchanged at a stage of its warm-up: no stage sends more than a dense ring.

A collective that is cheap at the final density is expensive at density 1, where entries are pairs
of index and value: an allgather then sends P times what a dense ring allreduce does. So each number
of entries k has its own choice: the bucket's collective if it sends no more than a dense ring,
2n (P-1)/P values; otherwise the one that sends least, among the dense allreduce and the collectives
that apply all selected entries. A collective that sums all ranks' accumulators at common indices is
then replaced by the sum of the whole accumulators.

The choice depends only on P, n, k and the wire, so all ranks make the same one. Lossless wires make
the same one, too: which of them is taken changes no bit of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.collectives import Collective, IndexUnion
from hvd_sparse.collectives.registry import BY_NAME, LOSSLESS_CANDIDATES, Algorithm, name_of
from hvd_sparse.collectives.sparcml import SsarRecursiveDouble
from hvd_sparse.cost_model import WireBytes
from hvd_sparse.selectors import Selector
from hvd_sparse.selectors.correction import MOST_TIMES_K
from hvd_sparse.streams import INDEX_BYTES, SparseStream
from hvd_sparse.wire import PLAIN


@dataclass(frozen=True)
class Stage:
    """How k entries are selected and exchanged; the name is empty for an unregistered collective.

    Where it takes all, the whole accumulator is summed, nothing is selected, and k is n.
    """

    collective: Collective
    name: str
    k: int
    takes_all: bool = False

    def select(self, selector: Selector, accumulator: Accumulator) -> SparseStream:
        return accumulator.select(0.0) if self.takes_all else selector.select(accumulator, self.k)


class Stages:
    """The choices of one bucket; `current` is that of the last call of `at`.

    The selector says how many more than k entries may have to be sent. `takes_all`: everything is
    applied at any k, since there is nobody to send it to.
    """

    def __init__(
        self, collective: Collective, selector: Selector, *, takes_all: bool = False
    ) -> None:
        self._own = collective
        self._takes_all = takes_all
        self._most_times_k = min(float(MOST_TIMES_K), 1.0 + selector.tolerance)
        self._others: dict[str, Collective] = {}
        self.current: Stage | None = None
        self._current_k = -1

    def at(self, k: int, step: int) -> Stage:
        """How `k` entries, in `[0, n]`, are exchanged in a step; prepares the collective for it."""
        if self.current is None or k != self._current_k:
            self.current, self._current_k = self._choose(k), k
        stage = self.current
        if stage.collective is self._own:
            stage.collective.aim(stage.k)
        else:  # it has no state: what it does depends on these two, and nothing else
            stage.collective.step = step
            stage.collective.aim(self._most(stage.k))
        return stage

    def _choose(self, k: int) -> Stage:
        own, P, n = self._own, self._own.transport.world_size, self._own.numel
        own_name = name_of(own)
        algorithm = BY_NAME.get(own_name)
        if P == 1 or algorithm is None:
            return Stage(own, own_name, k, self._takes_all)
        wire = self._wire(k)
        most = self._most(k)
        if bytes_of(algorithm, P, n, most, wire) <= 2 * n * (P - 1) / P * wire.dense_value_bytes:
            return Stage(own, own_name, k)
        takes_all = isinstance(own, IndexUnion)
        name = self._cheapest(n if takes_all else most)
        return Stage(self._other(name), name, n if takes_all else k, takes_all)

    def _most(self, k: int) -> int:
        """Entries that a rank may have to send where k are wanted."""
        return min(self._own.numel, round(k * self._most_times_k))

    def _cheapest(self, k: int) -> str:
        """The collective that sends the fewest bytes, and among equals the fewest messages."""
        own, P, n = self._own, self._own.transport.world_size, self._own.numel
        wire = self._wire(k)

        def cost(name: str) -> tuple[float, float]:
            expected = BY_NAME[name].cost(P, n, k, wire).expected
            return expected.nbytes(wire), expected.messages

        names = (("dense",) if own.wire.is_lossless else ()) + LOSSLESS_CANDIDATES
        return min(names, key=cost)

    def _other(self, name: str) -> Collective:
        if name not in self._others:
            own = self._own
            self._others[name] = BY_NAME[name].collective(
                *(own.transport, own.numel, own.k), wire=PLAIN if name == "dense" else own.wire
            )
        return self._others[name]

    def _wire(self, k: int) -> WireBytes:
        """What is expected of the wire; of a lossless one, with whole indices."""
        wire = self._own.wire
        expected = wire.expected_bytes(self._own.numel, k)
        return replace(expected, index_bytes=INDEX_BYTES) if wire.is_lossless else expected


def bytes_of(algorithm: Algorithm, P: int, n: int, k: int, wire: WireBytes) -> float:
    """Bytes that a rank is expected to send; at most, where indices or sums of all ranks decide."""
    cost = algorithm.cost(P, n, k, wire)
    uneven = (IndexUnion, SsarRecursiveDouble)
    is_even = algorithm.is_lossless and not issubclass(algorithm.collective, uneven)
    return (cost.expected if is_even else cost.most).nbytes(wire)
