from __future__ import annotations

from typing import TYPE_CHECKING

from tests import backends
from tests.background import jobs

if TYPE_CHECKING:
    from tests.ranks import Ranks


@backends.both_in_proof
def test_a_writer_may_take_longer_than_the_process_groups_timeout(ranks: Ranks) -> None:
    """Waiting for a slow writer is no collective that lasts: the group's timeout, 4 s here, does not end it."""
    assert ranks.run(2, jobs.slower_than_the_group, True) == [[1], [1]]
