"""A compression tells Horovod's elastic state of itself, where there is a Horovod."""

from __future__ import annotations

import sys

import pytest

from hvd_sparse import Compression


def test_without_horovod_a_compression_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch.elastic", None)
    Compression.topk()


def test_an_import_error_of_our_own_is_not_taken_for_horovods_absence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hvd_sparse.adapter.elastic", None)
    with pytest.raises(ImportError, match=r"hvd_sparse\.adapter\.elastic"):
        Compression.topk()
