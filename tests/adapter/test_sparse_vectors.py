"""Sparse vectors and embedding gradients under the unmodified horovodrun."""

from __future__ import annotations

import pytest

from tests.launch import horovodrun


@pytest.mark.parametrize("world_size", [2, 3])
def test_functions_and_embeddings(world_size: int) -> None:
    done = horovodrun(world_size, "sparse_vectors.py", timeout=150)
    assert done.stdout.count("FUNCTIONS") == world_size
    assert done.stdout.count("EMBEDDINGS") == world_size
