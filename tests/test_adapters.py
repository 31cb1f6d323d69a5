"""DTensors and state dicts as ShardedTensors: what N ranks save, M ranks load."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import sharded_tensor_from_dtensor, to_sharded_state_dict
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensor, is_main_replica

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

R, S0, S1 = Replicate(), Shard(0), Shard(1)

#: (mesh shape, placements): 1-D, uneven, HSDP in both orders, 2-D on two axes, and one axis split twice.
LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((1,), [S0]),
    ((2,), [S1]),
    ((3,), [S0]),
    ((4,), [S0]),
    ((4,), [S1]),
    ((4,), [R]),
    ((2, 2), [R, S0]),
    ((2, 2), [S1, R]),
    ((2, 2), [S0, S1]),
    ((2, 2), [S1, S0]),
    ((2, 2), [S0, S0]),
    ((2, 1, 2), [R, S0, S1]),
]

#: Even and uneven sizes, sizes below the number of ranks (empty shards), and an empty tensor.
SHAPES = [(8, 4), (7, 5), (3, 2), (1, 9), (5, 0), (0, 5)]


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float64).reshape(shape)


def _sharded(mesh_shape: tuple[int, ...], placements: list[Any], *, empty: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", mesh_shape)
    state: dict[str, Any] = {}
    for shape in SHAPES:
        values = _values(shape)
        state["x".join(map(str, shape))] = distribute_tensor(values * 0 if empty else values, mesh, placements)
    scalar = torch.tensor(0.0 if empty else 2.5)
    state["scalar"] = distribute_tensor(scalar, mesh, [R] * len(mesh_shape))
    return state


def _save(mesh_shape: tuple[int, ...], placements: list[Any], directory: Path) -> None:
    dist_checkpointing.save(to_sharded_state_dict(_sharded(mesh_shape, placements)), directory)


def _load(mesh_shape: tuple[int, ...], placements: list[Any], directory: Path) -> dict[str, torch.Tensor]:
    state = _sharded(mesh_shape, placements, empty=True)
    dist_checkpointing.load(to_sharded_state_dict(state), directory, strict=True)
    return {name: tensor.full_tensor() for name, tensor in state.items()}


def _assert_global(found: dict[str, torch.Tensor]) -> None:
    for shape in SHAPES:
        assert torch.equal(found["x".join(map(str, shape))], _values(shape)), shape
    assert found["scalar"].item() == 2.5


def _world(mesh_shape: tuple[int, ...]) -> int:
    return torch.Size(mesh_shape).numel()


@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS)
def test_saved_shards_make_up_the_global_tensors(
    ranks: RankPool, tmp_path: Path, mesh_shape: tuple[int, ...], placements: list[Any]
) -> None:
    """What any mesh saves is, read whole by one process, the global tensor that torch distributed."""
    ranks.run(_world(mesh_shape), _save, mesh_shape, placements, tmp_path / "ckpt")

    _assert_global(dist_checkpointing.load_plain_tensors(tmp_path / "ckpt"))


@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS)
def test_shards_are_loaded_in_place_at_another_layout(
    ranks: RankPool, tmp_path: Path, mesh_shape: tuple[int, ...], placements: list[Any]
) -> None:
    """A checkpoint of 3 uneven ranks fills the local tensors of any mesh, and they gather to the global tensor."""
    ranks.run(3, _save, (3,), [S0], tmp_path / "ckpt")

    for found in ranks.run(_world(mesh_shape), _load, mesh_shape, placements, tmp_path / "ckpt"):
        _assert_global(found)


def _describe(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Any]) -> Any:
    dtensor = distribute_tensor(_values(shape), init_device_mesh("cpu", mesh_shape), placements)
    return sharded_tensor_from_dtensor("weight", dtensor).without_data()


def test_replicas_are_named_by_the_coordinates_on_replicating_mesh_dimensions(ranks: RankPool) -> None:
    """Of an HSDP tensor one replica of each shard is the main one, and the others say which they are."""
    shards = ranks.run(4, _describe, (8, 4), (2, 2), [R, S0])

    assert [shard.replica_id for shard in shards] == [(0,), (0,), (1,), (1,)]
    assert [is_main_replica(shard.replica_id) for shard in shards] == [True, True, False, False]
    assert [shard.global_offset for shard in shards] == [(0, 0), (4, 0), (0, 0), (4, 0)]


def test_even_shards_form_a_regular_grid_and_uneven_ones_do_not(ranks: RankPool) -> None:
    """``axis_fragmentations`` counts the pieces where all are equal, and is None where they are not."""
    assert ranks.run(4, _describe, (8, 4), (2, 2), [S0, S1])[3].axis_fragmentations == (2, 2)
    assert ranks.run(4, _describe, (8, 4), (2, 2), [S0, S0])[3].axis_fragmentations == (4, 1)
    uneven = ranks.run(4, _describe, (7, 4), (4,), [S0])
    assert [shard.axis_fragmentations for shard in uneven] == [None] * 4
    assert [shard.local_shape for shard in uneven] == [(2, 4), (2, 4), (2, 4), (1, 4)]


def test_empty_shards_lie_at_the_end_of_the_global_tensor(ranks: RankPool) -> None:
    """A rank that gets nothing of a short axis describes an empty shard inside the global shape."""
    shards = ranks.run(4, _describe, (2, 3), (4,), [S0])

    assert [shard.local_shape for shard in shards] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    assert [shard.global_offset for shard in shards] == [(0, 0), (1, 0), (2, 0), (2, 0)]


def _aliases() -> tuple[bool, bool, bool]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(distribute_tensor(_values((4, 2)), mesh, [S0]))
    described = to_sharded_state_dict({"weight": parameter})["weight"]
    same = described.data.data_ptr() == parameter.to_local().data_ptr()
    return same, described.data.requires_grad, isinstance(described.data, DTensor)


def test_the_data_is_the_local_tensor_itself(ranks: RankPool) -> None:
    """A described parameter shares its local tensor's memory, outside autograd, so that a load fills it."""
    assert ranks.run(2, _aliases) == [(True, False, False)] * 2


def _nest() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(_values((4, 2)), mesh, [S0])
    state = {"state": {0: {"exp_avg": weight, "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "betas": (0.9, 1)}]}
    found = to_sharded_state_dict(state, prefix="optimizer.")
    inner = found["state"][0]
    return (
        inner["exp_avg"].key,
        inner["step"].key,
        inner["step"].replica_id,
        found["groups"],
        state["state"][0]["exp_avg"] is weight,
    )


def test_a_nest_keeps_its_form_and_names_tensors_by_their_path(ranks: RankPool) -> None:
    """Keys are the prefix and the dotted path; plain tensors are replicas by rank; other leaves are common state."""
    for rank, (average, step, replica, groups, untouched) in enumerate(ranks.run(2, _nest)):
        assert average == "optimizer.state.0.exp_avg"
        assert step == "optimizer.state.0.step"
        assert replica == rank
        assert groups == [{"lr": 0.1, "betas": (0.9, 1)}]
        assert untouched


def test_plain_tensors_are_whole_without_a_process_group(tmp_path: Path) -> None:
    """One process and no process group: a plain model's state dict is saved and loaded in place."""
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    dist_checkpointing.save(to_sharded_state_dict(model.state_dict(), "model."), tmp_path / "ckpt")
    dist_checkpointing.load(to_sharded_state_dict(other.state_dict(), "model."), tmp_path / "ckpt")

    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_shards_that_are_described_already_stay() -> None:
    """A state dict may mix DTensors with ShardedTensors of the caller's own."""
    own = ShardedTensor.from_rank_offsets("own", torch.zeros(2))

    assert to_sharded_state_dict({"a": own})["a"] is own


def _refusal(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(4 - dist.get_rank(), 2)
    if kind == "partial":
        dtensor = DTensor.from_local(local[:3], mesh, [Partial()], run_check=False)
    elif kind == "strided":
        from torch.distributed.tensor.placement_types import _StridedShard

        dtensor = DTensor.from_local(local[:3], mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    elif kind == "wrong shape":
        dtensor = DTensor.from_local(local, mesh, [S0], run_check=False, shape=torch.Size((9, 2)), stride=(2, 1))
    else:
        dtensor = distribute_tensor(_values((4, 2)), init_device_mesh("cpu", (1,)), [S0])
    sharded_tensor_from_dtensor("layer.weight", dtensor)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("partial", r"'layer.weight' has the placement Partial\(.*its values are still to be reduced; redistribute"),
        ("strided", r"'layer.weight' has the placement _StridedShard\(.*rows are not one block; redistribute"),
        ("wrong shape", r"'layer.weight': the local tensor has shape \(3, 2\).* has \(4, 2\); .* needs shape= and"),
        ("outside", r"'layer.weight': this rank is not in its mesh"),
    ],
)
def test_what_is_not_one_box_is_refused_by_name(ranks: RankPool, kind: str, reason: str) -> None:
    """A DTensor that cannot be described is a ShardingError that names the tensor and says what to do."""
    outcomes = ranks.outcomes(2, _refusal, kind)
    refused = outcomes[1]

    assert refused.kind == ShardingError.__name__
    assert re.search(reason, refused.message)
