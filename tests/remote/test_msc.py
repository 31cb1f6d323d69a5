"""Checkpoints at ``msc://profile/path``, through multi-storage-client's own fsspec filesystem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.mapping import ShardedTensor
from tests import backends
from tests.remote import jobs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks
pytest.importorskip("multistorageclient")
from tests.remote.msc import Profile, configured, profile

__all__ = ["profile"]  # fixtures


@backends.both_in_proof
def test_two_ranks_save_and_three_load(ranks: Ranks, tmp_path: Path, profile: Profile) -> None:
    """``msc://profile/path`` is saved to by 2 ranks, loaded by 3 and by this process, verified and queried."""
    ranks.run(2, configured, profile.config, jobs.save, profile.url, 4.0)
    ranks.run(3, configured, profile.config, jobs.check, profile.url, 4.0)
    jobs.check(profile.url, 4.0)
    assert (tmp_path / "objects/jobs/c/metadata.json").is_file()
    assert dc.check_is_distributed_checkpoint(profile.url)
    assert main(["verify", profile.url]) == 0
    with pytest.raises(StorageError, match=f"{profile.url} is not empty"):
        jobs.save(profile.url, 5.0)
    jobs.save(profile.url, 5.0, overwrite=True)
    jobs.check(profile.url, 5.0)


@backends.both_in_proof
def test_ranges_are_read_through_msc(tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of an eighth of a tensor asks MSC for ranges, about an eighth of the bytes together."""
    from multistorageclient.contrib.async_fs import MultiStorageAsyncFileSystem as FileSystem

    rows, columns = 64, 128 << 10
    values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", values)}, profile.url)
    counts: list[int] = []
    original = FileSystem.cat_file

    def counting(*arguments: Any, **options: Any) -> bytes:
        found: bytes = original(*arguments, **options)
        counts.append(len(found))
        return found

    monkeypatch.setattr(FileSystem, "cat_file", counting)
    wanted = ShardedTensor("w", None, values.dtype, (8, columns), (rows, columns), (16, 0), None)
    loaded = dc.load({"w": wanted}, profile.url, validate_access_integrity=False)["w"]
    assert torch.equal(loaded, values[16:24])
    eighth = values.numel() * values.itemsize // 8
    assert eighth <= sum(counts) < eighth + eighth // 2


@backends.both_in_proof
def test_damage_and_wrong_profiles_are_named(tmp_path: Path, profile: Profile) -> None:
    """A damaged object is named by its URL; a profile that is not configured is an error that says so."""
    jobs.save(profile.url, 4.0)
    data = tmp_path / "objects/jobs/c" / backends.data_file(0)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=f"{profile.url}/{backends.data_file(0)}: it has"):
        jobs.check(profile.url, 4.0)
    with pytest.raises(StorageError, match='cannot list msc://elsewhere/c: ValueError: Profile "elsewhere" not found'):
        jobs.check("msc://elsewhere/c", 4.0)
