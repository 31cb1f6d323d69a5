"""Megatron's conversions to torch's shards, as a user of Megatron writes the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from shardckpt.compat.megatron.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from shardckpt.compat.megatron.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from shardckpt.compat.megatron.dist_checkpointing.strategies.torch import (
    MCoreMetadata,
    MCoreSavePlan,
    TorchDistSaveShardedStrategy,
    _get_filesystem_reader,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    flatten_state_dict,
    mcore_to_pyt_state_dict,
    sharded_tensor_to_torch_sharded_tensor,
)
from shardckpt.errors import CheckpointingException, PluginError, ShardingError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _shards(rank: int, world: int) -> dict[Any, Any]:
    """Rows of ``w``, two of the experts, and a part of a flattened tensor, under keys that are no texts, too."""
    experts = [
        ShardedTensor.from_rank_offsets(
            "e", torch.full((2, 2), 10.0 + 2 * rank + n), (0, 2 * rank + n, 2 * world), prepend_axis_num=1
        )
        for n in range(2)
    ]
    rows = torch.arange(4.0).reshape(2, 2) + 100 * rank
    return {
        "layers": [{"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, world))}],
        0: {"e": experts[0], 1: experts[1]},
    }


def _wanted(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _wanted(value) for key, value in state.items()}
    return [_wanted(value) for value in state] if isinstance(state, list) else state.without_data()


def _saves_and_loads(path: str) -> Any:
    """Megatron's own way from its shards to ``dcp.save`` and back, step by step."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    state = _shards(rank, world)
    shards, _, _ = _replace_state_dict_keys_with_sharded_keys(state, keep_only_main_replica=True)
    dcp.save(mcore_to_pyt_state_dict(shards), checkpoint_id=path)
    wanted = _wanted(state)
    shards, flat_mapping, rename_mapping = _replace_state_dict_keys_with_sharded_keys(wanted)
    values = mcore_to_pyt_state_dict(shards, is_loading=True, init_device=torch.device("cpu"))
    dcp.load(values, storage_reader=_get_filesystem_reader(path))
    unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in values.items()}
    loaded = _replace_sharded_keys_with_state_dict_keys(unwrapped, flat_mapping, rename_mapping)
    _restore_dict_types(loaded, wanted)
    assert torch.equal(loaded["layers"][0]["w"], state["layers"][0]["w"].data)
    assert [torch.equal(loaded[0][key], state[0][key].data) for key in ("e", 1)] == [True, True]
    return [type(values[key]).__name__ for key in "we"]


def test_shards_are_converted_saved_loaded_and_converted_back(ranks: Ranks, tmp_path: Path) -> None:
    """By plain DCP every rank gets its shards again, prepended axes, several of a key and keys that are ints too."""
    kinds = ["CheckpointableShardedTensor", "LocalShardsContainer"]
    assert _saves_and_loads(str(tmp_path / "one")) == kinds
    assert ranks.run(2, _saves_and_loads, str(tmp_path / "two")) == [kinds] * 2


def test_shards_of_any_kind_are_found_by_their_offset() -> None:
    """A container gives the data at an offset, a flattened shard has its boxes; without data there is neither."""
    one, two = _shards(0, 1)[0].values()
    container = LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(each) for each in (one, two)])
    items = container.__create_write_items__("e", container)
    assert [tuple(item.index.offset or ()) for item in items] == [(0, 0, 0), (1, 0, 0)]
    assert torch.equal(container.__get_tensor_shard__(items[1].index), two.data[None])
    flat = ShardedTensor(
        "f", torch.arange(4.0), torch.float32, (2, 3), (2, 3), (0, 0), (1, 1), flattened_range=slice(1, 5)
    )
    wrapped = CheckpointableShardedTensor(flat.data, flat)
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in wrapped.__create_chunk_list__()] == [
        ((0, 1), (1, 2)),
        ((1, 0), (1, 2)),
    ]
    assert (tuple(wrapped.size()), wrapped.dtype, "'f'" in repr(wrapped)) == ((2, 3), torch.float32, True)
    with pytest.raises(CheckpointingException, match="has no memory of its own"):
        wrapped + 1
    with pytest.raises(ShardingError, match="'f' has no data"):
        CheckpointableShardedTensor.from_sh_ten(flat.without_data())
    with pytest.raises(ShardingError, match="no shards has no shape"):
        LocalShardsContainer([])


def test_objects_are_grouped_by_unique_key() -> None:
    """Objects become archives of a list; other replicas are left out of a save, and a loose value is refused."""
    state = {"a": ShardedObject("o", 1, (2,), (0,)), "b": ShardedObject("o", 2, (2,), (1,), replica_id=1)}
    shards, paths, names = _replace_state_dict_keys_with_sharded_keys(state, True)
    assert (list(shards), paths, names) == (["o/shard_0_2"], {"a": ("a",), "b": ("b",)}, {"o/shard_0_2": ["a"]})
    archive = mcore_to_pyt_state_dict(shards)["o/shard_0_2"]
    assert torch.load(archive, weights_only=True) == [1]
    assert _replace_sharded_keys_with_state_dict_keys({"o/shard_0_2": [1]}, paths, names) == {"a": 1}
    with pytest.raises(CheckpointingException, match=r"has 0 values for 1 names: a"):
        _replace_sharded_keys_with_state_dict_keys({"o/shard_0_2": []}, paths, names)
    with pytest.raises(ShardingError, match="step is a int"):
        _replace_state_dict_keys_with_sharded_keys({"step": 3})
    with pytest.raises(CheckpointingException, match="a list has not the structure of a dict"):
        _restore_dict_types([], {})


def _to_torch() -> Any:
    rank = dist.get_rank()
    shards = [*_shards(rank, 2)[0].values()]
    made = sharded_tensor_to_torch_sharded_tensor(shards, rank=rank)
    assert [shard.metadata.shard_offsets for shard in made.local_shards()] == [[2 * rank + n, 0, 0] for n in range(2)]
    assert made.local_shards()[0].tensor.data_ptr() == shards[0].data.data_ptr()
    assert all(map(torch.equal, _unwrap_pyt_sharded_tensor(made), [shard.data for shard in shards]))
    assert (made.key, made.mcore_sh_ten.data, len(made.metadata().shards_metadata)) == ("e", None, 4)
    irregular = ShardedTensor("i", torch.ones(1), torch.float32, (1,), (3,), (rank,), None)
    with pytest.raises(ShardingError, match="'i' is no regular grid of shards: use mcore_to_pyt_state_dict"):
        sharded_tensor_to_torch_sharded_tensor([irregular])
    return tuple(made.size())


def test_shards_become_a_sharded_tensor_of_torchs(ranks: Ranks) -> None:
    """The ShardedTensor has the memory of this rank's shards and lists the grid; what is no grid is refused."""
    assert ranks.run(2, _to_torch) == [(4, 2, 2)] * 2


def test_state_dicts_are_flattened_as_torch_flattens_them() -> None:
    """A list without tensors, shards and dicts is a leaf, keys are texts, and two paths to one name are an error."""
    shard = _shards(0, 1)["layers"][0]["w"]
    flat, paths = flatten_state_dict({"betas": [0.9, [0.99]], 0: {"w": [shard, 1]}, "t": (shard,), "empty": {}})
    assert set(flat) == {"betas", "0.w.0", "0.w.1", "t"}
    assert (flat["betas"], paths["0.w.1"]) == ([0.9, [0.99]], ("0", "w", 1))
    with pytest.raises(ValueError, match=r"are both 'a.b': rename one of them"):
        flatten_state_dict({"a.b": 1, "a": {"b": 2}})


def test_old_pickles_classes_are_torchs_with_one_more_field() -> None:
    """Code that asks ``isinstance(metadata, Metadata)`` or reads ``mcore_data`` works with Megatron's classes."""
    metadata, plan = MCoreMetadata({}, mcore_data={"k": {}}), MCoreSavePlan([])
    assert (isinstance(metadata, Metadata), metadata.mcore_data) == (True, {"k": {}})
    assert (isinstance(plan, SavePlan), plan.mcore_data) == (True, None)


class _Writer:
    """A writer of another library that has planned to add a number to a list."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def get_save_function_and_args(self) -> Any:
        """The function that writes, the one that stages, and the arguments of the first."""
        return (lambda rank, staged, out: out.append((rank, staged))), (lambda: "staged"), [0, None, self.written]

    def retrieve_write_results(self) -> Any:
        """What was written."""
        return self.written

    def finish(self, metadata: Any, results: Any) -> None:
        """Finish the save."""
        self.written = [metadata, results]


def test_a_writers_plan_becomes_a_request() -> None:
    """What another library's writer has planned is staged, written and finished; an override is refused."""
    writer, strategy = _Writer(), TorchDistSaveShardedStrategy("torch_dist", 1)

    class Ranks:
        group = None

    strategy._get_save_and_finalize_callbacks(writer, (writer, "metadata", Ranks())).execute_sync()
    assert writer.written == ["metadata", [[(0, "staged")]]]
    with pytest.raises(PluginError, match="_get_save_and_finalize_callbacks would never be called"):
        type("Mine", (TorchDistSaveShardedStrategy,), {"_get_save_and_finalize_callbacks": print})
