"""An overwrite on a store that ends at any of its requests; stores in memory, so that every request is tried."""

from __future__ import annotations

import itertools

import pytest

from shardckpt.commit.removal import delete_checkpoint
from shardckpt.engine.pruning import prune_leftovers
from shardckpt.storage import RemotePath
from tests.commit.replacement import LATER, NEW, OLD, Place, generations, place, versions
from tests.remote import jobs

__all__ = ["place"]  # fixtures

_PAIRS = {("obstore", True, 2), ("fsspec", False, 1)}


@pytest.mark.parametrize(
    ("place", "is_answer_lost", "saves"),
    [  # each kind of store with other values of both; the rest of the product is long
        pytest.param(*each, marks=pytest.mark.ci if each in _PAIRS else pytest.mark.proof)
        for each in itertools.product(("obstore", "fsspec"), (False, True), (1, 2))
    ],
    indirect=["place"],
)
def test_an_overwrite_that_is_killed_anywhere_is_old_or_new(place: Place, saves: int, is_answer_lost: bool) -> None:
    """At each request: a load gives one whole save, a prune removes all else, and so does the next overwrite."""
    found, number, ended = [], 0, False
    while not ended:
        number += 1
        for _ in range(saves):
            jobs.save(place.url, OLD, overwrite=True)
        place.stopping.stop(number, is_answer_lost=is_answer_lost)
        error = jobs.error_of(jobs.save, place.url, NEW, overwrite=True)
        ended = place.stopping.count < number
        place.die()
        found.append(versions(place.url))
        assert found[-1] in ([OLD], [NEW])
        assert error == ("", "") or "killed" in error[1]
        if number % 2:
            prune_leftovers(place.url)
        else:
            jobs.save(place.url, LATER, overwrite=True)
        assert versions(place.url) == (found[-1] if number % 2 else [LATER])
        names = place.folder().tree()
        assert not [name for name in names if ".shardckpt-uploading" in name]
        assert len([name for name in names if name.endswith("shardckpt.json")]) == 1
        assert len(generations(place)) <= 2
        delete_checkpoint(RemotePath(place.folder()))
        assert place.folder().tree() == {}
    assert [OLD] in found
    assert found[-1] == [NEW]
    assert found[-2] == [NEW]
    assert number > 25
