from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, KeyMismatchError, NotACheckpointError
from shardckpt.local import TensorAwareStateDict, load_local, save_local
from shardckpt.mapping import BlockScales, ShardedObject, ShardedTensor
from shardckpt.state_dict import nested_values
from tests import backends
from tests.local.shards import MODES, check_state, make_part, make_state, make_tensor
from tests.names import METADATA
from tests.tables import in_proof

if TYPE_CHECKING:
    from tests.ranks import Ranks


def _save_locally(root: str, algo: str) -> None:
    part, _ = make_part(algo)
    part.copy_tensors_to_cpu()
    save_local(part, Path(root, str(dist.get_rank())))
    with pytest.raises(CheckpointingException, match="not empty"):
        save_local(part, Path(root, str(dist.get_rank())))
    save_local(part, Path(root, str(dist.get_rank())), overwrite=True)


def _load_locally(root: str, algo: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    part = load_local(Path(root, str(rank)))
    part.restore_tensor_device()
    check_state(part.to_state_dict(make_state(rank, world, filled=False), algo=algo), rank, world)


@backends.both_in_proof
@pytest.mark.parametrize("world", [2, *in_proof(4)])
@pytest.mark.parametrize("algo", MODES)
def test_local_checkpoints_come_back(ranks: Ranks, tmp_path: Path, world: int, algo: str) -> None:
    """Each rank saves into its own folder and loads from it, and all together have the whole state again."""
    ranks.run(world, _save_locally, str(tmp_path), algo)
    ranks.run(world, _load_locally, str(tmp_path), algo)


def _saved(path: Path) -> TensorAwareStateDict:
    state = {"w": ShardedTensor.from_rank_offsets("w", make_tensor(1)), "list": [1, {"a": None}]}
    part, _ = TensorAwareStateDict.from_state_dict(state)
    save_local(part, path)
    return part


def test_block_scales_come_back(tmp_path: Path) -> None:
    """What scales a tensor is a part of its description."""
    codes = ShardedTensor.from_rank_offsets("codes", make_tensor(1))
    codes.block_scales = BlockScales("scales", tuple(codes.global_shape))
    part, _ = TensorAwareStateDict.from_state_dict({"codes": codes})
    save_local(part, tmp_path / "0")
    (loaded,) = nested_values(load_local(tmp_path / "0").sharded_state_dict)
    assert isinstance(loaded, ShardedTensor)
    assert loaded.block_scales == codes.block_scales


@backends.both_in_proof
def test_a_damaged_local_checkpoint_is_refused(tmp_path: Path) -> None:
    """Any byte of its tensors or its common state that has changed is noticed."""
    _saved(tmp_path / "0")
    for path in sorted(tmp_path.glob("0/*")):
        if path.suffix == ".json" or path.name == METADATA:  # which a load of ours does not read
            continue
        content = path.read_bytes()
        values = content.find(make_tensor(1).numpy().tobytes())
        place = values + 9 if values >= 0 else len(content) // 2  # a header beside them need not be read
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(CorruptCheckpointError):
            load_local(tmp_path / "0")
        path.write_bytes(content)
    assert [torch.equal(tensor, make_tensor(1)) for tensor in load_local(tmp_path / "0").tensors] == [True]


class _Unknown:
    """A class that no load allows."""


def test_an_error_has_the_key_of_the_shard(tmp_path: Path) -> None:
    """What cannot be saved is named by the key that the caller gave it."""
    state = {"o": ShardedObject("rng_state", _Unknown(), (1,), (0,))}
    with pytest.raises(CheckpointingException, match="rng_state"):
        save_local(TensorAwareStateDict.from_state_dict(state)[0], tmp_path / "a")
    sparse = ShardedTensor("model.weight", torch.ones(2, 2).to_sparse(), torch.float32, (2, 2), (2, 2), (0, 0), None)
    with pytest.raises(CheckpointingException, match=r"model\.weight"):
        save_local(TensorAwareStateDict.from_state_dict({"w": sparse})[0], tmp_path / "b")


def test_what_is_no_local_checkpoint_is_refused(tmp_path: Path) -> None:
    """No directory, a checkpoint of all ranks, and a state dict without its tensors: each is named."""
    with pytest.raises(NotACheckpointError):
        load_local(tmp_path / "none")
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", make_tensor(1))}, tmp_path / "whole")
    with pytest.raises(CheckpointingException, match="not a local checkpoint"):
        load_local(tmp_path / "whole")
    dist_checkpointing.save({"local": {"step": 1}}, tmp_path / "other")  # a state that has a key of this name
    with pytest.raises(CheckpointingException, match="not a local checkpoint"):
        load_local(tmp_path / "other")
    part = _saved(tmp_path / "0")
    part.pop_tensors()
    with pytest.raises(CheckpointingException, match="the tensors are out"):
        save_local(part, tmp_path / "1")
    assert not (tmp_path / "1").exists()


def test_a_derived_class_is_refused_for_what_it_is(tmp_path: Path) -> None:
    """A load would make the base in its place: the error says so, and what to give."""

    class Mine(ShardedTensor):
        """A shard with something more."""

    shard = Mine(**vars(ShardedTensor.from_rank_offsets("w", make_tensor(1))))
    part, _ = TensorAwareStateDict.from_state_dict({"w": shard})
    with pytest.raises(CheckpointingException, match=r"'w' is a Mine.*give a ShardedTensor or ShardedObject itself"):
        save_local(part, tmp_path / "0")


def test_a_missing_shard_is_a_key_mismatch(tmp_path: Path) -> None:
    """A local checkpoint that lacks an object or tensor that is wanted says which, and fills nothing."""
    _saved(tmp_path / "0")
    destination = torch.zeros(8, 3)
    wanted = {
        "w": ShardedTensor.from_rank_offsets("w", destination),
        "o": ShardedObject("o", None, (1,), (0,)),
    }
    with pytest.raises(KeyMismatchError, match=r"Unexpected keys.*: o\n"):
        load_local(tmp_path / "0").to_state_dict(wanted)
    assert not destination.any()
