"""How many messages a step takes: the papers' numbers, whatever other buckets do between them."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.collectives.registry import ALGORITHMS, BY_NAME
from hvd_sparse.lab.simulator import SyntheticStreams
from hvd_sparse.transports import Context, Transport, framing, run_ranks
from hvd_sparse.transports.framing import HEADER_BYTES, Payload
from hvd_sparse.wire import WIRES

P = 4
STEPS, SETTLED = 6, 3
PAPERS = {
    "dense": 2 * 2,  # 2 log P
    "topk_allgather": P - 1,
    "ssar_recursive_double": 2,
    "ssar_split_allgather": 2 * (P - 1),
    "dsar_split_allgather": 2 * (P - 1),
    "gtopk": 2,  # of 2 log P that follow one another a rank sends half
    "oktopk": 2 * (P - 1),
    "index_union": 3 * (P - 1),
    "exdyna": 3 * (P - 1),
    "clt_k": 3 * (P - 1),
    "spardl": 2 + P - 1,  # log P rounds, and an allgather
}
"""Messages of a rank in a step at P = 4, where an allgather is P - 1 of them at once."""
SIZES = {1: (90_000,), 2: (90_000, 400_000), 4: (90_000, 400_000, 60_000, 250_000)}


def test_every_algorithm_has_its_number() -> None:
    assert PAPERS.keys() == {entry.name for entry in ALGORITHMS}


@pytest.mark.parametrize("buckets", SIZES)
@pytest.mark.parametrize(
    ("name", "wire"),
    [(name, "float32") for name in PAPERS] + [(n, "float16+gap") for n in PAPERS if n != "dense"],
)
def test_messages_of_a_step_are_the_papers(name: str, buckets: int, wire: str) -> None:
    """Buckets of different size on one transport cut no message of each other in two."""
    sizes = [(numel, round(0.02 * numel)) for numel in SIZES[buckets]]

    def train(transport: Transport) -> list[list[int]]:
        collectives = [
            BY_NAME[name].collective(transport, *size, wire=WIRES[wire]) for size in sizes
        ]
        sent = []
        for step in range(STEPS):
            counts = []
            for place, collective in enumerate(collectives):
                transport.context = Context(f"bucket {place}", step)
                before = transport.traffic.messages_sent
                collective.scope()
                stream = SyntheticStreams().stream(transport.rank, step, *sizes[place])
                collective.reduce(stream, lambda indices: torch.zeros(indices.numel()))
                counts.append(transport.traffic.messages_sent - before)
            sent.append(counts)
        return sent

    ranks = run_ranks(P, train, timeout_s=60.0)
    for step in range(SETTLED, STEPS):
        for place in range(buckets):
            assert max(rank[step][place] for rank in ranks) == PAPERS[name], (step, place)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_all_others_get_is_framed_once(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    framed: list[int] = []
    frame = framing.frame

    def counted(payload: Payload, payload_bytes: int, *rest: object) -> torch.Tensor:
        framed.append(payload_bytes)
        return frame(payload, payload_bytes, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(framing, "frame", counted)

    def gather(transport: Transport) -> tuple[list[int], int]:
        sizes = []
        for step in range(3):
            block = torch.full((1000 * step + transport.rank,), transport.rank, dtype=torch.int64)
            for source, message in enumerate(transport.allgather((block,), channel="a")):
                assert message.view(torch.int64).tolist() == [source] * (1000 * step + source)
                sizes.append(message.numel())
        return sizes, transport.traffic.bytes_sent

    ranks = run_ranks(world_size, gather)
    assert len(framed) == 3 * world_size
    for rank, (_, sent) in enumerate(ranks):
        payloads = sum(8 * (1000 * step + rank) + HEADER_BYTES for step in range(3))
        assert sent == (world_size - 1) * payloads
