from __future__ import annotations

from typing import TYPE_CHECKING

from tests import backends
from tests.remote import jobs

if TYPE_CHECKING:
    from tests.ranks import Ranks
    from tests.remote.store import Store


@backends.both_in_proof
def test_a_process_without_the_protocol_is_an_error(ranks: Ranks, store: Store) -> None:
    """A worker process that has no plugin for the URL says so on all ranks, and nothing is left."""
    errors = ranks.run(2, jobs.error_of, jobs.save_in_background, store.url, 1.0, True)
    assert len(set(errors)) == 1
    assert "no installed plugin serves faulty://" in errors[0][1]
    assert not store.names()
