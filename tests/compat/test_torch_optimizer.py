"""The helpers of torch's sharded optimizer loading, as code that imports them calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Placement
from torch.distributed.tensor import distribute_tensor

from shardckpt import optimizer_state
from shardckpt.compat import torch_optimizer
from shardckpt.compat.torch_optimizer import (
    STATE_DICT_2D_LAYOUT,
    _alloc_tensor,
    _create_colwise_spec,
    _gen_rank_device,
    _get_state_dict_2d_layout,
    _is_nested_tensor,
    _ReaderWithOffset,
)
from shardckpt.errors import KeyMismatchError, ShardingError
from shardckpt_torch_dist import CheckpointStorageReader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def test_the_helpers_are_where_the_error_says() -> None:
    """The face has the function alone, and says of each of torch's helpers where it is."""
    for name in torch_optimizer.__all__:
        if name != "load_sharded_optimizer_state_dict":
            with pytest.raises(ImportError, match=f"no {name}: import it from shardckpt.compat.torch_optimizer"):
                getattr(optimizer_state, name)
    assert torch_optimizer.load_sharded_optimizer_state_dict is optimizer_state.load_sharded_optimizer_state_dict
    assert not hasattr(optimizer_state, "_no_such_helper")
    layout: STATE_DICT_2D_LAYOUT = {"w": (None, (2,))}
    assert layout["w"][0] is None


def test_memory_is_allocated_where_there_is_a_device() -> None:
    """State gets the properties that are stored; without an accelerator it and its ranks are on the CPU."""
    made = _alloc_tensor(TensorProperties(dtype=torch.bfloat16), (2, 3), "cpu")
    assert (made.dtype, tuple(made.shape), made.device.type) == (torch.bfloat16, (2, 3), "cpu")
    if not torch.cuda.is_available():
        assert _alloc_tensor(TensorProperties(dtype=torch.float32), (1,)).device.type == "cpu"
        assert _gen_rank_device(3) == "cpu"
    assert _gen_rank_device(3, "cpu") == "cpu"


def _make(spec: Any, tensor: Any, shape: tuple[int, ...], group: Any = None) -> Any:
    """A ShardedTensor by torch's spec, with this rank's part."""
    metadata = spec.build_metadata(torch.Size(shape), ShardProperties(dtype=torch.float32))
    own = metadata.shards_metadata[dist.get_rank(group)]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(tensor, own)], metadata, process_group=group
    )


def _two_dimensional(path: str) -> Any:
    """Two ranks of data parallelism hold rows 4 to 8 of a parameter with 12 rows: tensor parallelism has cut it."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    spec = _create_colwise_spec(group)
    assert [str(place) for place in spec.placements] == ["rank:0/cpu", "rank:1/cpu"]
    assert [str(place) for place in _create_colwise_spec().placements] == ["rank:0/cpu", "rank:1/cpu"]
    stored = {"optimizer.state.w.exp_avg": torch.arange(24.0).reshape(12, 2), "step": torch.tensor(3.0)}
    dcp.save(stored, checkpoint_id=path)
    wanted = {"optimizer.state.w.exp_avg": _make(spec, torch.zeros(2, 2), (4, 2), group), "step": torch.tensor(0.0)}
    for reader in (dcp.FileSystemReader(path), CheckpointStorageReader(path)):
        wanted["optimizer.state.w.exp_avg"].local_shards()[0].tensor.zero_()
        dcp.load(wanted, storage_reader=reader, planner=_ReaderWithOffset({"optimizer.state.w.exp_avg": (4, 0)}))
        assert torch.equal(
            wanted["optimizer.state.w.exp_avg"].local_shards()[0].tensor,
            stored["optimizer.state.w.exp_avg"][4 + 2 * rank : 6 + 2 * rank],
        )
        assert wanted["step"].item() == 3.0
    planner = _ReaderWithOffset({"absent": (4, 0)})
    planner.set_up_planner({"absent": wanted["optimizer.state.w.exp_avg"]}, reader.read_metadata(), rank == 0)
    with pytest.raises(KeyMismatchError, match="'absent' is not in the checkpoint"):
        planner.create_local_plan()


def test_a_part_of_a_stored_tensor_is_read_at_its_offset(ranks: Ranks, tmp_path: Path) -> None:
    """Sharded state of a part that tensor parallelism cut is read from where the part lies, by any reader."""
    ranks.run(2, _two_dimensional, str(tmp_path / "c"))


def _wrong_offsets(path: str) -> None:
    """One rank asks for 4 rows of 8 at offsets where the stored tensor does not have them."""
    dcp.save({"w": torch.arange(16.0).reshape(8, 2), "name": "n"}, checkpoint_id=path)
    wanted = _make(_create_colwise_spec(), torch.full((4, 2), -1.0), (4, 2))
    cases: dict[str, tuple[str, Any]] = {
        r"'w'.* \[6:10, 0:2\] .* \(8, 2\)": ("w", (6, 0)),
        r"'w'.* \[0:4, 1:3\] ": ("w", (0, 1)),
        r"'w'.* \[-2:2, 0:2\] ": ("w", (-2, 0)),
        r"'w'.*\(4,\).*2 axes": ("w", (4,)),
        "'name' is no tensor in the checkpoint": ("name", (0, 0)),
    }
    for text, (key, offset) in cases.items():
        planner = _ReaderWithOffset({key: offset})
        planner.set_up_planner({key: wanted}, dcp.FileSystemReader(path).read_metadata(), is_coordinator=True)
        with pytest.raises(ShardingError, match=text):
            planner.create_local_plan()


def test_a_part_that_is_not_stored_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """An offset from which a tensor reaches out of the stored one is an error: the rest would not be filled."""
    ranks.run(1, _wrong_offsets, str(tmp_path / "c"))


def _layouts() -> Any:
    rank = dist.get_rank()
    spec = _create_colwise_spec()
    inner = _make(spec, torch.zeros(2, 2), (4, 2))
    outer_metadata = _create_colwise_spec().build_metadata(torch.Size((8, 2)), ShardProperties(dtype=torch.float32))
    nested = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(inner, outer_metadata.shards_metadata[rank])], outer_metadata
    )
    layout, group = _get_state_dict_2d_layout({"w": nested, "b": torch.zeros(3), "s": inner})
    assert layout == {"w": ([4 * rank, 0], [4, 2]), "b": (None, torch.Size([3])), "s": (None, torch.Size([4, 2]))}
    assert group is inner._process_group
    assert [_is_nested_tensor(each) for each in (nested, inner, torch.zeros(1))] == [True, False, False]
    assert _get_state_dict_2d_layout({"b": torch.zeros(3)})[1] is None
    mesh = init_device_mesh("cpu", (2,))
    dtensor = distribute_tensor(torch.zeros(4, 2), mesh, [Placement(0)])
    assert not _is_nested_tensor(dtensor)


def test_nested_tensors_show_where_their_part_lies(ranks: Ranks) -> None:
    """FSDP1 over tensor parallelism: the offset and shape of this rank's part, and the group that shards it."""
    ranks.run(2, _layouts)
