"""A save that cannot fit is refused before it writes a file; one that fits is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing, settings
from shardckpt.cli import main
from shardckpt.engine import space
from shardckpt.errors import NotEnoughSpaceError, StorageError
from shardckpt.mapping import ShardedTensor
from tests import backends
from tests.commit import owners
from tests.faults import samples
from tests.faults.attempts import Attempt, attempt
from tests.faults.disks import small_disk
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from tests.backends import Backend
    from tests.ranks import RankPool, Ranks

MIB = 1 << 20
#: What a checkpoint of one or two large tensors takes beside them, on a file system with pages of 4 KiB.
REST = 256 << 10
_MORE = [(1, True), (2, False)]


def _large(nbytes: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """A state dict of one tensor, of which each rank has its part."""
    part = torch.ones(nbytes // world, dtype=torch.uint8)
    return {"large": ShardedTensor.from_rank_offsets("large", part, (0, rank, world))}


def _save_too_much(directory: str, background: bool, overwrite: bool) -> tuple[Attempt, list[str]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []
    target = Path(directory) / "ckpt"
    if overwrite:
        dist_checkpointing.save(samples.state_dict(3, rank, world), target)

    def action(target: Path) -> None:
        state = _large(3 * MIB, rank, world)  # half of it, which is what a rank of two has, would fit
        try:
            # without a writer no file is made, not even one that is gone again
            with patch("shardckpt.engine.transaction.CheckpointWriter", side_effect=AssertionError):
                dist_checkpointing.save(state, target, overwrite=overwrite, async_sharded_save=background)
        finally:
            if overwrite:
                wrong.extend(samples.differences(samples.load(target, rank, world), 3, rank, world))

    return attempt(directory, action), wrong


@backends.both_in_proof
@pytest.mark.parametrize(
    ("world", "background"), [(1, False), (2, True), *(pytest.param(*each, marks=pytest.mark.proof) for each in _MORE)]
)
def test_what_does_not_fit_is_refused_before_a_file_is_written(
    gloo_ranks: RankPool, tmp_path: Path, world: int, background: bool
) -> None:
    """Ranks whose tensors fit only one by one get one error; nothing is left, and a smaller save then succeeds."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        results = gloo_ranks.run(world, _save_too_much, str(disk), background, False)
    (message,) = {found.message for found, _ in results}
    for text in (
        f"cannot save to {disk}/ckpt: `shardckpt prune",
        "The tensors take 3.1 MB",
        "2.1 MB free",
        "No file was written",
    ):
        assert text in message
    for found, _ in results:
        assert (found.kind, found.left, found.wrong) == ("NotEnoughSpaceError", [], [])


@backends.both_in_proof
@pytest.mark.parametrize("background", [False, True])
def test_an_overwrite_that_does_not_fit_leaves_the_old_checkpoint(
    ranks: Ranks, tmp_path: Path, background: bool
) -> None:
    """The old checkpoint loads bit for bit, and the error says that both need room."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        results = ranks.run(2, _save_too_much, str(disk), background, True)
    for found, wrong in results:
        assert (found.kind, found.left, found.wrong, wrong) == ("NotEnoughSpaceError", ["ckpt"], [], [])
        assert "so both need space" in found.message


@backends.both_in_proof
def test_what_just_fits_is_saved(tmp_path: Path) -> None:
    """A save that leaves next to nothing free is not refused; one that is a page larger than all that is free is."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        with pytest.raises(NotEnoughSpaceError, match=r"4\.2 MB free, 1 B too little"):
            dist_checkpointing.save(_large(4 * MIB + 1), disk / "ckpt")
        dist_checkpointing.save(_large(4 * MIB - REST), disk / "ckpt")
        assert space.find_free_bytes(disk) < REST
        dist_checkpointing.load(_large(4 * MIB - REST), disk / "ckpt")


def _save_copies(directory: str) -> None:
    values = torch.ones(3 * MIB // 2, dtype=torch.uint8)
    state = {"copy": ShardedTensor.from_rank_offsets("copy", values, replica_id=dist.get_rank())}
    dist_checkpointing.save(state, Path(directory) / "ckpt")


@backends.both_in_proof
def test_replicas_count_once(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks with copies of a tensor that fits once save it."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        ranks.run(2, _save_copies, str(disk))


def test_tied_tensors_count_once(tmp_path: Path) -> None:
    """A tensor of two names that a format stores once is saved where it fits once."""
    values = torch.ones(3 * MIB // 2, dtype=torch.uint8)
    state = {key: ShardedTensor.from_rank_offsets(key, values) for key in ("a", "b")}
    with small_disk(tmp_path / "disk", "2m") as disk:
        dist_checkpointing.save(state, disk / "ckpt", "safetensors")


def test_a_save_by_a_cached_plan_is_forecast_by_its_own_values(tmp_path: Path) -> None:
    """Saves of the same shards are forecast, too: where the tensors are tied by then, as tied ones."""
    with small_disk(tmp_path / "disk", "5m") as disk:

        def save(name: str, *values: torch.Tensor) -> None:
            state = {key: ShardedTensor.from_rank_offsets(key, data) for key, data in zip("ab", values, strict=True)}
            dist_checkpointing.save(state, disk / name, "safetensors")

        one, other = (torch.full((3 * MIB // 2,), value, dtype=torch.uint8) for value in (1, 2))
        save("first", one, other)
        with pytest.raises(NotEnoughSpaceError):
            save("second", one, other)
        save("second", one, one)


def test_other_views_of_the_same_memory_count(tmp_path: Path) -> None:
    """Tensors that begin at the same place and have other sizes are stored each, and count each."""
    values = torch.ones(3 * MIB // 2, dtype=torch.uint8)
    views = {"a": values, "b": values[:-1]}
    state = entire(views)
    with small_disk(tmp_path / "disk", "2m") as disk, pytest.raises(NotEnoughSpaceError):
        dist_checkpointing.save(state, disk / "ckpt")


def test_a_full_file_system_is_not_one_that_says_nothing(tmp_path: Path) -> None:
    """With nothing free a save is refused; a tmpfs without a limit, which reports no blocks at all, is saved to."""
    with small_disk(tmp_path / "full", "1m") as disk:
        (disk / "filler").write_bytes(bytes(MIB))
        assert space.find_free_bytes(disk) == 0
        with pytest.raises(StorageError):
            dist_checkpointing.save(_large(MIB), disk / "ckpt")
        assert samples.listing(disk).keys() == {"filler"}
    with small_disk(tmp_path / "unlimited", "0") as disk:
        assert space.find_free_bytes(disk) == space.UNKNOWN
        dist_checkpointing.save(_large(MIB), disk / "ckpt")


def test_leftovers_that_could_go_are_named(tmp_path: Path) -> None:
    """The error says how much a command would free, and where, and it does; what a living process writes stays."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        (owners.leave(disk / "other", owners.dead()) / "large").write_bytes(bytes(MIB))
        (owners.leave(disk / "third", owners.living()) / "large").write_bytes(bytes(MIB))
        with pytest.raises(NotEnoughSpaceError, match=rf"`shardckpt prune {disk}` frees 1\.0 MB") as caught:
            dist_checkpointing.save(_large(2 * MIB + REST), disk / "ckpt")
        assert not (disk / "ckpt").exists()
        assert main(str(caught.value).split("`")[1].split()[1:]) == 0
        dist_checkpointing.save(_large(2 * MIB + REST), disk / "ckpt")


def test_own_leftovers_go_before_the_forecast(tmp_path: Path) -> None:
    """What a killed save to the same target has left is removed first, and its space counts as free."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        (owners.leave(disk / "ckpt", owners.dead()) / "large").write_bytes(bytes(3 * MIB))
        dist_checkpointing.save(_large(2 * MIB), disk / "ckpt")


@table("reason", ["the setting", "the strategy"])
def test_who_switches_it_off_gets_the_system_s_words(tmp_path: Path, backend: Backend, reason: str) -> None:
    """With the setting 0, or a strategy that may write less than the tensors have, the save is tried."""
    strategy = backend.save_strategy()
    if reason == "the strategy":
        strategy.stores_all_bytes = False  # type: ignore[misc]
    with (
        patch.dict(os.environ, {settings.SPACE_CHECK: "0"} if reason == "the setting" else {}),
        small_disk(tmp_path / "disk", "2m") as disk,
        pytest.raises(NotEnoughSpaceError, match="No space left on device"),
    ):
        dist_checkpointing.save(_large(3 * MIB), disk / "ckpt", strategy)
