"""Checkpoints under horovodrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import Ranks, World, with_ranks
from tests.workers.adapter_checkpoint import (
    go_on_in_a_process_set,
    load_from,
    refuse_and_drop,
    save_to,
    warn_of_another_unit,
)


@with_ranks(World(3), World(3, "mpi"))
def test_checkpoints_go_on_and_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    books = ranks.run(save_to, folder)[0].result
    for named in (True, False):
        ranks.run(load_from, folder, named, books)
    ranks.run(warn_of_another_unit, folder)
    ranks.run(go_on_in_a_process_set, folder)
    ranks.run(refuse_and_drop, folder)


@pytest.mark.launches
def test_checkpoints_change_the_world(tmp_path: Path) -> None:
    three, two = Ranks(World(3)), Ranks(World(2))
    try:
        books = three.run(save_to, str(tmp_path))[0].result
        three.close()
        two.run(load_from, str(tmp_path), True, books)
        two.close()
    finally:
        three.kill()
        two.kill()
