"""What processes measure of the link between them."""

from __future__ import annotations

from tests.ranks import Ranks, World, with_ranks
from tests.transports.test_processes import links_of_transports


@with_ranks(World(2))
def test_a_process_measures_a_world_once(ranks: Ranks) -> None:
    """Three transports of one world choose alike, whatever the noise; and so cost no more pings.

    Before the fourth one a rank remembers something else: they measure anew.
    """
    first, *others = ranks.run(links_of_transports, 3)
    (link, messages), *again, (anew, more_messages) = first.result
    assert messages > 30
    assert more_messages > 30
    assert [each[0] for each in again] == [link] * 2
    assert all(each[1] == 2 for each in again)
    for other in others:
        assert [each[0] for each in other.result] == [link] * 3 + [anew]
