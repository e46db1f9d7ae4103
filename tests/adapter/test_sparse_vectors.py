"""Sparse vectors and embedding gradients under horovodrun."""

from __future__ import annotations

from tests.ranks import Ranks, World, with_ranks
from tests.workers.sparse_vectors import check_embeddings, check_functions


@with_ranks(World(2), World(3))
def test_functions(ranks: Ranks) -> None:
    ranks.run(check_functions)


@with_ranks(World(2), World(3))
def test_embeddings(ranks: Ranks) -> None:
    ranks.run(check_embeddings)
