"""Checkpoints at ``msc://profile/path``, through multi-storage-client's own fsspec filesystem."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.remote import jobs

if TYPE_CHECKING:
    from tests.ranks import Ranks
pytest.importorskip("multistorageclient")
from tests.remote.msc import Profile, configured, profile

__all__ = ["profile"]  # fixtures


@backends.both_in_proof
def test_background_saves_go_through_msc(ranks: Ranks, profile: Profile) -> None:
    """A worker process opens ``msc://`` by itself, with the configuration of its environment."""
    ranks.run(2, configured, profile.config, jobs.save_in_background, profile.url, 4.0, True)
    jobs.check(profile.url, 4.0)
