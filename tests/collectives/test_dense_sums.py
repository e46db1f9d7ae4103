"""Sums that fill up: written once, as they came."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.collectives.registry import BY_NAME
from hvd_sparse.lab.simulator import SyntheticStreams
from hvd_sparse.streams import DenseSum, Part, SparseStream
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.wire import WIRES

NUMEL, K = 4001, 1200


@pytest.mark.parametrize("wire", ["float32", "float16+gap", "qsgd4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather"]
)
def test_no_dense_part_becomes_a_stream(
    name: str, dtype: torch.dtype, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[int] = []
    to_sparse = Part.to_sparse

    def counted(part: Part, *rest: object) -> Part:
        if part.indices is None:
            scanned.append(part.numel)
        return to_sparse(part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Part, "to_sparse", counted)

    def reduce(transport: Transport) -> tuple[torch.Tensor, DenseSum]:
        collective = BY_NAME[name].collective(transport, NUMEL, K, wire=WIRES[wire])
        stream = SyntheticStreams().stream(transport.rank, 0, NUMEL, K)
        total = collective.reduce(stream).reduced
        assert isinstance(total, DenseSum)
        out = torch.full((NUMEL,), 7.0, dtype=dtype)
        total.write(out, 0.25)
        return out, total

    ranks = run_ranks(4, reduce)
    if WIRES[wire].is_lossless:
        assert scanned == []
    expected = torch.empty(NUMEL, dtype=dtype)
    total = ranks[0][1]
    SparseStream(total.indices, total.values, NUMEL).write(expected, 0.25)
    for out, _ in ranks:
        assert torch.equal(out, expected)


def test_a_sparse_part_beside_dense_ones_is_written_at_its_place() -> None:
    parts = (
        Part(None, torch.arange(4.0), 0, 4),
        Part(torch.tensor([5, 7], dtype=torch.int32), torch.tensor([2.0, 3.0]), 4, 8),
    )
    out = torch.full((8,), 9.0)
    total = DenseSum(parts, 8)
    total.write(out, 2.0)
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0, 0.0, 4.0, 0.0, 6.0]
    assert total.nnz == 6
    assert total.indices.tolist() == [1, 2, 3, 5, 7]
