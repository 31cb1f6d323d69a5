"""Everyone who saves by everyone who loads: the sample at 4 ranks, loaded at 1, 2 and 4, every value compared.

Then checkpoints from which keys were removed here, and code that was ported. All that needs a release of Megatron-Core
is in this file: one worker of pytest runs it, and starts each release once.

No release of megatron-core is left out for a dtype: all save and load native float8, bool and complex as they are.
What releases cannot do is in ``writers.py``: shards of unequal size, which they then replicate.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt import mapping
from shardckpt.engine.integrity import verify_integrity_manifest
from tests.compat.rewritten import SCRIPT, run
from tests.interop import here, plain_dcp, sample
from tests.interop.matrix import NEWEST, WORLDS, each_writer
from tests.interop.writers import WRITERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.interop.runner import Megatron
    from tests.ranks import Ranks

    Releases = Callable[[str], Megatron]
    Saved = Callable[[str], str]

#: Releases that today's torch does not let read their own ``common.pt`` if a class of Megatron's is in it.
CANNOT_READ_ITSELF = ("0.9.0", "0.15.3")


@pytest.mark.parametrize("release", [name for name in WRITERS if name not in ("shardckpt", NEWEST)])
def test_older_megatron_loads_what_is_saved_here(megatron: Releases, saved: Saved, release: str) -> None:
    """What is saved here is loaded by every older Megatron."""
    for world in WORLDS:
        megatron(release).run(world, "load", saved("shardckpt"), "shardckpt")


@pytest.mark.parametrize("writer", each_writer(own_classes=True))
def test_plain_dcp_needs_megatron_for_its_classes(
    ranks: Ranks, megatron: Releases, saved: Saved, tmp_path: Path, writer: str
) -> None:
    """The pickled plans of 0.11 to 0.15 stop plain DCP where there is no Megatron; rewritten here it loads them."""
    for world in WORLDS:
        for refusal in ranks.run(world, plain_dcp.refusal, saved(writer)):
            assert "No module named 'megatron'" in refusal
        megatron(NEWEST).run(world, "plain_dcp_load", saved(writer))
    here.rewrite(saved(writer), str(tmp_path / "rewritten"))
    for world in WORLDS:
        ranks.run(world, plain_dcp.load, str(tmp_path / "rewritten"))


# Checkpoints from which keys were removed here, read by Megatron and by plain DCP.


def _save_with_more(path: str) -> None:
    """The sample, and what is to be removed again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    more: dict[str, Any] = {
        "m": mapping.ShardedTensor.from_rank_offsets("gone.m", torch.arange(4.0), (0, rank, world)),
        "state": mapping.ShardedObject("gone.state", [rank], (world,), (rank,)),
    }
    state = sample.state(mapping, rank, world, filled=True)
    dc.save({**state, "more": more}, path, content_metadata=sample.CONTENT_METADATA, verify_integrity=True)


@pytest.fixture
def left_of_ours(ranks: Ranks, tmp_path: Path) -> str:
    """The sample as it is left when more was saved with it here and removed."""
    path = str(tmp_path / "ours")
    ranks.run(4, _save_with_more, path)
    ranks.run(4, dc.remove_sharded_tensors, path, "gone.")
    return path


def test_what_is_left_of_ours(ranks: Ranks, megatron: Releases, left_of_ours: str) -> None:
    """It is the sample and nothing more, for us, for plain DCP and for Megatron, and every digest holds."""
    verify_integrity_manifest(left_of_ours)
    here.check_queries(left_of_ours, "shardckpt")
    ranks.run(2, here.load, left_of_ours)
    plain_dcp.load(left_of_ours)
    for world in (4, 2):
        megatron(NEWEST).run(world, "load", left_of_ours, "shardckpt")


@pytest.mark.parametrize("release", [name for name, writer in WRITERS.items() if writer.flattened])
def test_older_megatron_loads_what_is_left_of_ours(megatron: Releases, left_of_ours: str, release: str) -> None:
    """The same for older releases."""
    megatron(release).run(4, "load", left_of_ours, "shardckpt")


def test_what_is_left_of_megatrons(ranks: Ranks, megatron: Releases, saved: Saved, tmp_path: Path) -> None:
    """Megatron finds all tensors and common values in its own checkpoint without the objects that were removed."""
    path = shutil.copytree(saved(NEWEST), tmp_path / "theirs")
    ranks.run(2, dc.remove_sharded_tensors, str(path), "rng")
    stored = dc.load_sharded_metadata(path)
    assert {key for key in stored if key.startswith("rng")} == set()
    assert len(stored) == len(dc.load_sharded_metadata(saved(NEWEST))) - 4
    megatron(NEWEST).run(4, "query", str(path), NEWEST)


@pytest.mark.parametrize("release", [name for name, writer in WRITERS.items() if writer.flattened])
def test_what_is_left_of_older_megatrons(
    ranks: Ranks, megatron: Releases, saved: Saved, tmp_path: Path, release: str
) -> None:
    """A dialect without its flattened shards is the sample for the newest Megatron and, now, for plain DCP as well."""
    path = str(shutil.copytree(saved(release), tmp_path / "theirs"))
    ranks.run(2, dc.remove_sharded_tensors, path, "flattened")
    assert "flattened" not in dc.load_sharded_metadata(path)
    plain_dcp.load(path)
    megatron(NEWEST).run(4, "load", path, release)
    if release not in CANNOT_READ_ITSELF:
        megatron(release).run(4, "load", path, release)


# Code that was ported from Megatron, and Megatron.


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.proof), 2, pytest.param(4, marks=pytest.mark.proof)]
)
def test_the_ported_script_is_code_for_megatron(megatron: Releases, tmp_path: Path, world: int) -> None:
    """The script that tests/compat ports runs as it is under Megatron, at every number of ranks."""
    megatron(NEWEST).run(world, "call", str(SCRIPT), "train", str(tmp_path))


def test_one_job_goes_on_in_both(ranks: Ranks, megatron: Releases, tmp_path: Path) -> None:
    """What the job saved here, Megatron resumes; what it saved there, the ported job resumes; the format is one."""
    ranks.run(2, run, "train", str(tmp_path / "here"))
    megatron(NEWEST).run(2, "call", str(SCRIPT), "train", str(tmp_path / "there"))
    for world in (1, 4):
        for name, steps in (("first", "4"), ("second", "3")):
            megatron(NEWEST).run(world, "call", str(SCRIPT), "resume", str(tmp_path / "here"), name, steps)
            ranks.run(world, run, "resume", str(tmp_path / "there"), name, steps)
