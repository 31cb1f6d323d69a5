from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

from shardckpt import dist_checkpointing as dc
from shardckpt.dist_checkpointing import ShardedObject, ShardedTensor
from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import RECORD_NAME, Record
from shardckpt.mapping import PlainObject
from shardckpt_torch_dist import TorchDistSaveShardedStrategy
from shardckpt_torch_dist.dialects.index_file import encode_index, parse_index
from shardckpt_torch_dist.file_names import INDEX_FILE
from shardckpt_torch_dist.remove import remove_keys
from tests.property.search import drawn, for_all
from tests.torch_dist.dialects.metadata_pickle import stock
from tests.torch_dist.indexes import INDEXES, content

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt_torch_dist.dialects.stored import StoredIndex


def save(directory: Path) -> None:
    """Tensors and objects of two groups, the second in a file of its own."""
    state = {
        "w": ShardedTensor.from_rank_offsets("model.w", torch.arange(12.0).view(4, 3)),
        "b": ShardedTensor.from_rank_offsets("model.b", torch.ones(3)),
        "m": ShardedTensor.from_rank_offsets("optim.m", torch.zeros(4, 3)),
        "group": ShardedObject("optim.group", {"lr": 1}, (1,), (0,)),
        "rng": ShardedObject("rng", [1, 2], (1,), (0,)),
    }
    dc.save(state, directory, TorchDistSaveShardedStrategy(separation_hint="optim"))


def check_indexes(directory: Path, keys: set[str]) -> StoredIndex:
    """Our index and DCP's have these keys and say the same."""
    index = parse_index((directory / INDEX_FILE).read_bytes(), INDEX_FILE)
    record = Record.parse((directory / RECORD_NAME).read_bytes())
    found = pickle.loads((directory / ".metadata").read_bytes())
    assert {*index.keys, *index.objects} == keys
    assert (found.state_dict_metadata, found.storage_data) == (
        stock(index, "").state_dict_metadata,
        stock(index, "").storage_data,
    )
    assert found.storage_meta.save_id == record.save_id
    return index


@drawn(60)
def test_what_is_kept_stays_as_it_was(count: int) -> None:
    """Without some keys, an index says of the others what it said, and names the files that they are in."""

    def check(case: tuple[StoredIndex, set[int]]) -> None:
        index, numbers = case
        keys = {key for number, key in enumerate([*index.keys, *index.objects]) if number in numbers}
        found = remove_keys(index, keys)
        tensors, objects = ({k: v for k, v in part.items() if k not in keys} for part in content(index))
        assert content(found) == content(parse_index(encode_index(found), "kept")) == (tensors, objects)
        chunks = (chunk for tensor in tensors.values() for chunk in tensor.chunks.values())
        assert set(found.files) == {item.file for item in (*objects.values(), *(chunk.item for chunk in chunks))}

    for_all(st.tuples(INDEXES, st.sets(st.integers(0, 11))), count, check)


def test_both_indexes_are_renewed(tmp_path: Path) -> None:
    """A removal takes keys, or all, out of our index and out of DCP's, and drops the file that only they needed."""
    target = tmp_path / "ckpt"
    save(target)
    check_indexes(target, {"model.w", "model.b", "optim.m", "optim.group/shard_0_1", "rng/shard_0_1"})
    assert (target / "optim__0_0.distcp").exists()
    dc.remove_sharded_tensors(target, "optim")
    assert check_indexes(target, {"model.w", "model.b", "rng/shard_0_1"}).files == ["__0_0.distcp"]
    assert not (target / "optim__0_0.distcp").exists()
    assert dc.load_plain_tensors(target).keys() == {"model.w", "model.b"}
    for prefix in ("model", "rng"):
        dc.remove_sharded_tensors(target, prefix)
    assert check_indexes(target, set()).files == []


def test_an_object_of_many_keys_stays_as_long_as_one_of_them(tmp_path: Path) -> None:
    """Keys that share an archive are removed one by one, and the others still find it."""
    target = tmp_path / "ckpt"
    keys = ("optim.a.lr", "optim.b.lr")
    state = {
        "w": ShardedTensor.from_rank_offsets("model.w", torch.arange(12.0).view(4, 3)),
        "lr": PlainObject("optim/lr", 0.5, keys=keys),
    }
    dc.save(state, target)
    index = check_indexes(target, {"model.w", *keys})
    assert len(set(index.objects.values())) == 1
    dc.remove_sharded_tensors(target, "optim.a")
    check_indexes(target, {"model.w", "optim.b.lr"})
    stock_state = {"optim.b.lr": 0.0}
    dcp.load(stock_state, checkpoint_id=target, no_dist=True)
    assert stock_state == {"optim.b.lr": 0.5}
    dc.remove_sharded_tensors(target, "optim")
    check_indexes(target, {"model.w"})


def test_an_index_that_the_record_does_not_vouch_for_is_not_used(tmp_path: Path) -> None:
    """Beside another library's checkpoint our index may be older: there .metadata alone counts, and is renewed."""
    target = tmp_path / "ckpt"
    save(target)
    (target / RECORD_NAME).unlink()
    stale = (target / INDEX_FILE).read_bytes()
    dc.remove_sharded_tensors(target, "optim")
    assert (target / INDEX_FILE).read_bytes() == stale
    assert dc.load_plain_tensors(target).keys() == {"model.w", "model.b"}


def test_items_that_claim_more_than_their_file(tmp_path: Path) -> None:
    """An index by which a rewrite would be larger than the file is refused, and nothing is written."""
    target = tmp_path / "ckpt"
    dcp.save({key: torch.ones(500) for key in "abcd"}, checkpoint_id=target, no_dist=True)
    metadata = dcp.FileSystemReader(target).read_metadata()
    (file,) = {info.relative_path for info in metadata.storage_data.values()}
    size = (target / file).stat().st_size
    for index, info in metadata.storage_data.items():
        if index.fqn in "ab":
            info.offset, info.length = int(index.fqn == "b"), size - 1
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=rf"{file} has {size} bytes, its items claim \d+"):
        dc.remove_sharded_tensors(target, "d")
    assert (target / file).stat().st_size == size
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
