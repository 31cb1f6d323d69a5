"""A strategy that loses a shard, or leaves files without digests, fails the save on every rank, and by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests import backends
from tests.faults import careless
from tests.faults.careless import Drops, DropsWork, new_folder, one

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

_LOST = (("object", DropsWork), ("whole", DropsWork), ("split", Drops), ("split", DropsWork))


@backends.both_in_proof
@pytest.mark.parametrize(
    ("way", "cases"),
    [
        ("thread", _LOST),
        ("process", _LOST[:1]),  # a process takes seconds to start
        pytest.param("process", _LOST[1:], marks=pytest.mark.proof),
    ],
    ids=["thread", "process", "process, more"],
)
def test_a_shard_that_is_not_stored_behind_the_training_is_named(
    ranks: Ranks, tmp_path: Path, way: str, cases: tuple[tuple[str, Any], ...]
) -> None:
    """In the background, too, what another thread or process did not write is an error on all ranks."""
    for number, (key, make) in enumerate(cases):
        kind, message = one(ranks.run(2, careless.refusal, way, new_folder(tmp_path, number), make, key))
        assert kind in ("PluginError", "ShardingError")
        assert f"{key!r}" in message
