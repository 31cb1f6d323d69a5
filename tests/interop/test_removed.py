"""Checkpoints from which keys were removed here, read by Megatron and by plain DCP."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt import mapping
from shardckpt.engine.integrity import verify_integrity_manifest
from tests.interop import here, plain_dcp, sample
from tests.interop.writers import WRITERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.interop.runner import Megatron
    from tests.ranks import RankPool

    Releases = Callable[[str], Megatron]
    Saved = Callable[[str], str]

NEWEST = "0.16.1"
WITH_FLATTENED = [name for name, writer in WRITERS.items() if writer.flattened]
#: Releases that today's torch does not let read their own ``common.pt`` if a class of Megatron's is in it.
CANNOT_READ_ITSELF = ("0.9.0", "0.15.3")


def _save_with_more(path: str) -> None:
    """The sample, and what is to be removed again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    more: dict[str, Any] = {
        "m": mapping.ShardedTensor.from_rank_offsets("gone.m", torch.arange(4.0), (0, rank, world)),
        "state": mapping.ShardedObject("gone.state", [rank], (world,), (rank,)),
    }
    state = sample.state(mapping, rank, world, filled=True)
    dc.save({**state, "more": more}, path, content_metadata=sample.CONTENT_METADATA, verify_integrity=True)


def _remove(path: str, prefix: str) -> None:
    dc.remove_sharded_tensors(path, prefix)


@pytest.fixture
def left_of_ours(ranks: RankPool, tmp_path: Path) -> str:
    """The sample as it is left when more was saved with it here and removed."""
    path = str(tmp_path / "ours")
    ranks.run(4, _save_with_more, path)
    ranks.run(4, _remove, path, "gone.")
    return path


def test_what_is_left_of_ours(ranks: RankPool, megatron: Releases, left_of_ours: str) -> None:
    """It is the sample and nothing more, for us, for plain DCP and for Megatron, and every digest holds."""
    verify_integrity_manifest(left_of_ours)
    here.check_queries(left_of_ours, "shardckpt")
    ranks.run(2, here.load, left_of_ours)
    plain_dcp.load(left_of_ours)
    for world in (4, 2):
        megatron(NEWEST).run(world, "load", left_of_ours, "shardckpt")


@pytest.mark.slow
@pytest.mark.parametrize("release", WITH_FLATTENED)
def test_older_megatron_loads_what_is_left_of_ours(megatron: Releases, left_of_ours: str, release: str) -> None:
    """The same for older releases."""
    megatron(release).run(4, "load", left_of_ours, "shardckpt")


@pytest.mark.slow
def test_what_is_left_of_megatrons(ranks: RankPool, megatron: Releases, saved: Saved, tmp_path: Path) -> None:
    """Megatron finds all tensors and common values in its own checkpoint without the objects that were removed."""
    path = shutil.copytree(saved(NEWEST), tmp_path / "theirs")
    ranks.run(2, _remove, str(path), "rng")
    stored = dc.load_sharded_metadata(path)
    assert {key for key in stored if key.startswith("rng")} == set()
    assert len(stored) == len(dc.load_sharded_metadata(saved(NEWEST))) - 4
    megatron(NEWEST).run(4, "query", str(path), NEWEST)


@pytest.mark.slow
@pytest.mark.parametrize("release", WITH_FLATTENED)
def test_what_is_left_of_older_megatrons(
    ranks: RankPool, megatron: Releases, saved: Saved, tmp_path: Path, release: str
) -> None:
    """A dialect without its flattened shards is the sample for the newest Megatron and, now, for plain DCP as well."""
    path = str(shutil.copytree(saved(release), tmp_path / "theirs"))
    ranks.run(2, _remove, path, "flattened")
    assert "flattened" not in dc.load_sharded_metadata(path)
    plain_dcp.load(path)
    megatron(NEWEST).run(4, "load", path, release)
    if release not in CANNOT_READ_ITSELF:
        megatron(release).run(4, "load", path, release)
