"""An error on one rank is the same error on every rank, nothing is left behind, and the same processes go on."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing, hookimpl, settings
from shardckpt.dist_checkpointing import ShardedTensor
from shardckpt.plugins.manager import get_plugin_manager
from tests import backends
from tests.faults import samples
from tests.faults.attempts import BAD, Attempt, attempt, save_with
from tests.faults.disks import small_disk
from tests.faults.rank_errors import SIZES, one_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.backends import Backend
    from tests.ranks import RankPool, Ranks


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond ``nbytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _save_with_limited_files(directory: str, victim: int) -> Attempt:
    def action(target: Path) -> None:
        with file_size_limit(10_000 if dist.get_rank() == victim else 1 << 30):
            samples.save(target, BAD)

    return attempt(directory, action)


@backends.both
@pytest.mark.parametrize("world", SIZES)
def test_file_too_large_on_one_rank(gloo_ranks: RankPool, tmp_path: Path, backend: Backend, world: int) -> None:
    """A write that the system cuts short on one rank ends the save on all, naming file, offset and reason."""
    victim = world - 1
    found = one_error(gloo_ranks.run(world, _save_with_limited_files, str(tmp_path), victim))
    assert found.kind == "StorageError"
    for text in (f"rank {victim}, in 'writing shards'", backend.data_file(victim), "at offset 10000", "EFBIG"):
        assert text in found.message


def _fill(state: dict[str, Any], rank: int, world: int) -> None:
    state["filler"] = ShardedTensor.from_rank_offsets("filler", torch.ones(2_000_000 // world), (0, rank, world))


def _save_without_forecast(directory: str) -> Attempt:
    with patch.dict(os.environ, {settings.SPACE_CHECK: "0"}):
        return save_with(directory, _fill)


@backends.both_in_proof
@pytest.mark.parametrize("world", SIZES)
def test_full_disk(ranks: Ranks, tmp_path: Path, backend: Backend, world: int) -> None:
    """A disk that fills up in a save is one error on all ranks; its space is free again, and a smaller save fits."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        found = one_error(ranks.run(world, _save_without_forecast, str(disk)))
    assert found.kind == "NotEnoughSpaceError"
    assert any(backend.data_file(rank) in found.message for rank in range(world))
    for text in ("in 'writing shards'", "No space left on device (ENOSPC)"):
        assert text in found.message


def _overwrite_on_full_disk(directory: str) -> tuple[Attempt, list[str]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    target = Path(directory) / "ckpt"
    samples.save(target, 3)
    wrong: list[str] = []

    def action(target: Path) -> None:
        state = samples.state_dict(BAD, rank, world)
        _fill(state, rank, world)
        try:
            dist_checkpointing.save(state, target, overwrite=True)
        finally:
            wrong.extend(samples.find_wrong(target, 3))

    with patch.dict(os.environ, {settings.SPACE_CHECK: "0"}):
        return attempt(directory, action), wrong


@backends.both_in_proof
def test_full_disk_leaves_the_previous_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """An overwrite that fails for space leaves the old checkpoint whole, and nothing else."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        results = ranks.run(2, _overwrite_on_full_disk, str(disk))
    for found, wrong in results:
        assert (found.kind, found.left, found.wrong, wrong) == ("NotEnoughSpaceError", ["ckpt"], [], [])


class BrokenListener:
    """A plugin whose event hook fails on one rank."""

    @hookimpl
    def shardckpt_event(self, event: Any) -> None:
        """Fail when rank 1 begins to write."""
        if event.rank == 1 and event.phase == "writing":
            raise ConnectionError("the metrics server is away")


def _save_with_broken_listener(directory: str) -> tuple[Attempt, int]:
    listener = BrokenListener()
    get_plugin_manager().register(listener)
    try:
        found = save_with(directory, lambda *_: None)
    finally:
        get_plugin_manager().unregister(listener)
    return found, len(found.left)


@backends.both_in_proof
def test_broken_listener_on_one_rank(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """An event hook that raises on one rank neither fails a save nor leaves the other ranks waiting."""
    for found, left in gloo_ranks.run(3, _save_with_broken_listener, str(tmp_path)):
        assert (found.kind, found.message, found.wrong, left) == ("", "", [], 1)
