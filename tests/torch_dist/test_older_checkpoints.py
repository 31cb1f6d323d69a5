"""Checkpoints of ours that lack what a save writes today: the index of our own, digests by xxhash in short segments."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import zlib
from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.dist_checkpointing import ShardedTensor
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manifest import FileRecord, Record
from tests.damage import flip
from tests.faults import samples
from tests.names import COMMON, INDEX, METADATA, RECORD, data_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

#: Rows of 1 KiB: a rank of two has 6 MiB of them, more than a segment of old.
ROWS = 12 << 10
#: What a segment of an older checkpoint had at most.
OLD_SEGMENT = 4 << 20


def large(rank: int, world: int) -> torch.Tensor:
    """A rank's rows."""
    rows = torch.arange(ROWS * 256, dtype=torch.int32).view(ROWS, 256)
    return rows.chunk(world)[rank].clone()


def _state(rank: int, world: int) -> dict[str, Any]:
    shard = ShardedTensor.from_rank_offsets("large", large(rank, world), (0, rank, world))
    return {**samples.state_dict(1, rank, world), "large": shard}


def _save(path: str) -> None:
    dc.save(_state(dist.get_rank(), dist.get_world_size()), path)


def _check(path: str) -> None:
    """Load this rank's part under the layout of this group."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wanted = {**samples.template(rank, world), "large": _state(rank, world)["large"]}
    wanted["large"].data.fill_(-1)
    loaded = dc.load(wanted, path)
    assert torch.equal(loaded.pop("large"), large(rank, world))
    assert samples.differences(loaded, 1, rank, world) == []


def _check_in_every_way(ranks: Ranks, path: Path) -> None:
    """By this process and by three ranks, entire, in slices, and by what the queries say."""
    _check(str(path))
    ranks.run(3, _check, str(path))
    with dc.open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint["large"][4000:7000, 5:9], large(0, 1)[4000:7000, 5:9])
    plain = dc.load_plain_tensors(path)
    assert torch.equal(plain["large"], large(0, 1))
    assert dc.load_common_state_dict(path) == {name: samples.state_dict(1)[name] for name in ("iteration", "args")}


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, as it is written today."""
    path = tmp_path_factory.mktemp("saved") / "ckpt"
    ranks.run(2, _save, str(path))
    return path


def _described(path: Path) -> dict[str, tuple[Any, ...]]:
    """What the index says, by key."""
    found = dc.load_sharded_metadata(path)
    return {key: (type(shard), getattr(shard, "dtype", None), shard.global_shape) for key, shard in found.items()}


def test_standard_files_alone(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    """A copy without our index and shardckpt.json, as other tools make it, loads through .metadata, and is the same."""
    path = tmp_path / "copy"
    shutil.copytree(saved, path, ignore=shutil.ignore_patterns(INDEX, RECORD))
    assert not {INDEX, RECORD} & {file.name for file in path.iterdir()}
    _check_in_every_way(ranks, path)
    assert _described(path) == _described(saved)


def test_standard_files_alone_and_their_metadata_is_lost(saved: Path, tmp_path: Path) -> None:
    """Without shardckpt.json nobody vouches for our index: then a .metadata that is lost is an error that names it."""
    path = tmp_path / "copy"
    shutil.copytree(saved, path, ignore=shutil.ignore_patterns(METADATA, RECORD))
    with pytest.raises(CheckpointingException, match=re.escape(str(path / METADATA))):
        _check(str(path))


def digested_as_of_old(file: FileRecord, content: bytes) -> FileRecord:
    """A file's record as releases before the index wrote it: CRC-32, segments of 4 MiB, both columns deflated."""
    segments = [content[start : start + OLD_SEGMENT] for start in range(0, len(content), OLD_SEGMENT)]
    columns = array("I", map(len, segments)).tobytes() + array("I", map(zlib.crc32, segments)).tobytes()
    text = base64.b64encode(zlib.compress(columns, 1)).decode()
    return file.model_copy(update={"digest": hashlib.sha256(columns).hexdigest(), "segments": text})


@pytest.fixture
def old(saved: Path, tmp_path: Path) -> Path:
    """The same as an older release has left it."""
    path = tmp_path / "old"
    shutil.copytree(saved, path, ignore=shutil.ignore_patterns(INDEX))
    record = Record.parse((path / RECORD).read_bytes())
    files = [digested_as_of_old(file, (path / file.name).read_bytes()) for file in record.files if file.name != INDEX]
    assert max(file.size for file in files) > OLD_SEGMENT
    renewed = record.model_copy(update={"digest_algorithm": "crc32", "files": tuple(files)})
    (path / RECORD).write_bytes(renewed.dump())
    return path


@pytest.mark.parametrize("threads", ["1", "4"])
def test_older_checkpoints_load(ranks: Ranks, old: Path, monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    """A checkpoint of an older release loads entire and in slices, and verify finds it as it was written."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", threads)
    _check_in_every_way(ranks, old)
    names = (METADATA, COMMON, data_file(0), data_file(1))
    assert {result.name: result.fault for result in verify_checkpoint(old)} == dict.fromkeys(names, "")


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", [METADATA, data_file(1)])
def test_damage_of_older_checkpoints_is_found(old: Path, name: str, place: float) -> None:
    """A bit that is flipped in an older checkpoint is found by verify and by the load that reads it."""
    flip(old / name, int(place * (old / name).stat().st_size))
    with pytest.raises(CorruptCheckpointError, match=re.escape(str(old / name))):
        _check(str(old))
    assert [result.name for result in verify_checkpoint(old) if result.fault] == [name]


def test_keys_are_removed_from_older_checkpoints(old: Path) -> None:
    """What a removal writes anew has digests of the old kind, since what is kept has: all of them still hold."""
    dc.remove_sharded_tensors(old, "bias")
    record = Record.parse((old / RECORD).read_bytes())
    assert record.digest_algorithm == "crc32"
    assert not [result for result in verify_checkpoint(old) if result.fault or result.foreign]
    assert torch.equal(dc.load_plain_tensors(old)["large"], large(0, 1))
    assert not [key for key in dc.load_sharded_metadata(old) if key.startswith("bias")]


def test_an_older_checkpoint_is_saved_over(old: Path) -> None:
    """An overwrite leaves what is written today, and nothing of the older one."""
    dc.save(_state(0, 1), old, overwrite=True)
    assert (old / INDEX).exists()
    assert not (old / data_file(1)).exists()
    assert not [result for result in verify_checkpoint(old) if result.fault or result.foreign]
    _check(str(old))
