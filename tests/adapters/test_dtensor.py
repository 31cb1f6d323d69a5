"""DTensors as shards: what N ranks save, M ranks load, whatever the placements."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.adapters.dtensor import sharded_tensor_from_dtensor
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensor, is_main_replica
from shardckpt.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from shardckpt.state_dict import nested_values, split_for_save
from tests.adapters.layouts import S0, S1, SS0, Layout, Meshes, R, values

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _shards(state: Any) -> list[Any]:
    return list(nested_values(split_for_save(state)[0]))


def _describe(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Any]) -> Any:
    dtensor = distribute_tensor(values(shape), init_device_mesh("cpu", mesh_shape), placements)
    return sharded_tensor_from_dtensor("weight", dtensor).without_data()


def test_replicas_are_named_by_the_coordinates_on_replicating_mesh_dimensions(ranks: Ranks) -> None:
    """Of an HSDP tensor one replica of each shard is the main one, and the others say which they are."""
    shards = ranks.run(4, _describe, (8, 4), (2, 2), [R, S0])

    assert [shard.replica_id for shard in shards] == [(0,), (0,), (1,), (1,)]
    assert [is_main_replica(shard.replica_id) for shard in shards] == [True, True, False, False]
    assert [shard.global_offset for shard in shards] == [(0, 0), (4, 0), (0, 0), (4, 0)]


def test_even_shards_form_a_regular_grid_and_uneven_ones_do_not(ranks: Ranks) -> None:
    """``axis_fragmentations`` counts the pieces where all are equal, and is None where they are not."""
    assert ranks.run(4, _describe, (8, 4), (2, 2), [S0, S1])[3].axis_fragmentations == (2, 2)
    assert ranks.run(4, _describe, (8, 4), (2, 2), [S0, S0])[3].axis_fragmentations == (4, 1)
    uneven = ranks.run(4, _describe, (7, 4), (4,), [S0])
    assert [shard.axis_fragmentations for shard in uneven] == [None] * 4
    assert [shard.local_shape for shard in uneven] == [(2, 4), (2, 4), (2, 4), (1, 4)]


def test_empty_shards_lie_at_the_end_of_the_global_tensor(ranks: Ranks) -> None:
    """A rank that gets nothing of a short axis describes an empty shard inside the global shape."""
    shards = ranks.run(4, _describe, (2, 3), (4,), [S0])

    assert [shard.local_shape for shard in shards] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    assert [shard.global_offset for shard in shards] == [(0, 0), (1, 0), (2, 0), (2, 0)]


def test_fsdp2_over_tensor_parallelism_is_one_shard_a_rank(ranks: Ranks) -> None:
    """A strided placement with the plain one that follows it cuts one block for each rank."""
    shards = ranks.run(4, _describe, (8, 4), (2, 2), [SS0, S0])  # ranks (0, 0), (0, 1), (1, 0) and (1, 1) of the mesh

    assert [shard.global_offset for shard in shards] == [(0, 0), (4, 0), (2, 0), (6, 0)]


def _strided() -> Any:
    dtensor = distribute_tensor(values((8, 1)), init_device_mesh("cpu", (2,)), [SS0])
    described = to_sharded_state_dict({"weight": dtensor})["weight"]
    shards = _shards({"weight": described})
    return [(s.key, s.global_offset, s.local_shape, s.data.flatten().tolist()) for s in shards]  # type: ignore[attr-defined]


def test_a_strided_tensor_is_several_shards_of_one_key(ranks: Ranks) -> None:
    """A rank's rows that are not one block are described as boxes, each a view of its part of the local tensor."""
    first, second = ranks.run(2, _strided)

    assert first == [("weight", (0, 0), (2, 1), [1.0, 2.0]), ("weight", (4, 0), (2, 1), [5.0, 6.0])]
    assert second == [("weight", (2, 0), (2, 1), [3.0, 4.0]), ("weight", (6, 0), (2, 1), [7.0, 8.0])]


def _aliases() -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(distribute_tensor(values((4, 2)), mesh, [S0]))
    (piece,) = _shards(to_sharded_state_dict({"weight": parameter}))
    assert type(piece.data) is torch.Tensor
    return piece.data.data_ptr() == parameter.to_local().data_ptr(), piece.data.requires_grad


def test_the_data_is_the_local_tensor_itself(ranks: Ranks) -> None:
    """A described parameter shares its local tensor's memory, outside autograd, so that a load fills it."""
    assert ranks.run(2, _aliases) == [(True, False)] * 2


def _optimizer_state() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(distribute_tensor(values((8, 1)), mesh, [SS0]))
    moment = distribute_tensor(values((8, 1)), mesh, [SS0])
    found = get_param_id_to_sharded_param_map(to_sharded_state_dict({"w": param}), [param])
    moments = {"spread": moment, "local": moment.to_local().clone(), "step": torch.tensor(3.0)}
    state = {"state": {0: dict(moments)}, "param_groups": [{"params": [0]}]}
    optim_state_to_sharding_state(state, found)
    described = state["state"][0]  # type: ignore[index]
    shards = _shards(described)
    offsets = {(shard.key, shard.global_offset) for shard in shards if isinstance(shard, ShardedTensor)}
    merged = [described[name].merge_fn([]) is moments[name] for name in ("spread", "local")]
    return sorted(offsets), merged


def test_an_optimizers_state_lies_where_its_parameter_lies(ranks: Ranks) -> None:
    """Moments of a strided parameter, DTensors or local tensors, get its boxes, and a load gives themselves back."""
    for rank, (offsets, merged) in enumerate(ranks.run(2, _optimizer_state)):
        boxes = [(2 * rank, 0), (2 * rank + 4, 0)]
        moments = [(f"optimizer.state.{name}.w", box) for name in ("local", "spread") for box in boxes]
        assert offsets == sorted([*moments, ("optimizer.state.step.w", ())])
        assert merged == [True, True]


def _some_ranks(directory: Path) -> Any:
    """Two meshes of 2 of the 4 ranks: a tensor in the second, and one that both have a copy of."""
    groups = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    mine = groups[dist.get_rank() // 2]
    state = {
        "one": DTensor.from_local(torch.full((2,), float(dist.get_rank())), groups[1], [S0], run_check=False),
        "both": distribute_tensor(values((4, 2)), mine, [S0], src_data_rank=None),
    }
    dist_checkpointing.save(to_sharded_state_dict(state), directory)
    with torch.no_grad():
        state["both"].to_local().zero_()
    loaded = dist_checkpointing.load(to_sharded_state_dict(state), directory, strict=True)
    same = [loaded[name] is state[name] for name in state]
    return same, torch.equal(state["both"].full_tensor(), values((4, 2)))


def test_a_mesh_may_have_some_of_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks outside a mesh get their value back as it is; of copies on several meshes one is written, all are read."""
    for same, filled in ranks.run(4, _some_ranks, tmp_path / "ckpt"):
        assert same == [True, True]
        assert filled
    found = dist_checkpointing.load_plain_tensors(tmp_path / "ckpt")
    assert found["one"].tolist() == [2.0, 2.0, 3.0, 3.0]
    assert torch.equal(found["both"], values((4, 2)))


def _other_experts(directory: Path, check_replicas: bool) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("ep", "efsdp"))["efsdp"]
    local = torch.full((2, 3), float(dist.get_rank()))
    experts = DTensor.from_local(local, mesh, [S0], run_check=False)
    dist_checkpointing.save(to_sharded_state_dict({"experts": experts}, check_replicas=check_replicas), directory)


def test_different_tensors_under_one_key_on_several_meshes_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Expert-parallel ranks that each have other experts under one key lose none in silence: the save fails on all."""
    for check_replicas in (True, False):
        outcomes = ranks.outcomes(4, _other_experts, tmp_path / "ckpt", check_replicas)
        assert {outcome.kind for outcome in outcomes} == {"ShardingError"}
        assert "'experts': one value on rank 0 / one value on rank 2" in outcomes[3].message
        assert "shardckpt_ep.expert_layouts" in outcomes[3].message
        assert "pass check_replicas=False" not in outcomes[3].message
        assert not (tmp_path / "ckpt").exists()


def _refused(kind: str, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(4 - dist.get_rank(), 2)
    if kind == "partial":
        dtensor = DTensor.from_local(local[:3], mesh, [Partial()], run_check=False)
    elif kind == "wrong shape":
        dtensor = DTensor.from_local(local, mesh, [S0], run_check=False, shape=torch.Size((9, 2)), stride=(2, 1))
    else:
        dtensor = distribute_tensor(values((8, 2)), mesh, [SS0])
    state = {"layer": {"weight": dtensor}}
    if kind == "strided":
        sharded_tensor_from_dtensor("layer.weight", dtensor)
    dist_checkpointing.save(to_sharded_state_dict(state), directory)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("partial", r"'layer.weight' has the placement Partial\(.*its values are still to be reduced; redistribute"),
        ("strided", r"'layer.weight' has the placements .* is 2 boxes .*to_sharded_state_dict describes"),
        ("wrong shape", r"'layer.weight': the local tensor has shape .*pass shape= and stride="),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(ranks: Ranks, tmp_path: Path, kind: str, reason: str) -> None:
    """A save names the tensor and says what to do, on all ranks, though one alone may have the fault."""
    outcomes = ranks.outcomes(2, _refused, kind, tmp_path / "ckpt")

    assert [outcome.kind for outcome in outcomes] == [ShardingError.__name__] * 2
    assert all(re.search(reason, outcome.message) for outcome in outcomes)
    assert not (tmp_path / "ckpt").exists()


def _outside() -> None:
    dtensor = distribute_tensor(values((4, 2)), DeviceMesh("cpu", [0]), [S0])
    sharded_tensor_from_dtensor("layer.weight", dtensor)


def test_a_rank_outside_the_mesh_has_no_shard(ranks: Ranks) -> None:
    """Asked for the one shard of a rank outside the mesh, the description is refused with the way out."""
    outside = ranks.outcomes(2, _outside)[1]

    assert outside.kind == ShardingError.__name__
    assert "'layer.weight': this rank is not in its mesh" in outside.message


def _layout_of(shape: tuple[int, ...], layout: Layout) -> Any:
    state = to_sharded_state_dict({"w": Meshes().spread(values(shape), layout)})
    dist.barrier()  # who leaves early takes the connections along that others still make
    return [(s.global_offset, s.local_shape) for s in _shards(state) if is_main_replica(s.replica_id)]  # type: ignore[attr-defined]


def test_columns_and_rows_are_cut_left_to_right(ranks: Ranks) -> None:
    """[Shard(1), Shard(0)] and [Shard(0), Shard(0)] lie as torch cuts them: the first mesh dimension first."""
    crossed = ranks.run(4, _layout_of, (4, 6), Layout((2, 2), (S1, S0)))
    assert crossed == [[((0, 0), (2, 3))], [((2, 0), (2, 3))], [((0, 3), (2, 3))], [((2, 3), (2, 3))]]
    twice = ranks.run(4, _layout_of, (6, 1), Layout((2, 2), (S0, S0)))
    assert twice == [[((0, 0), (2, 1))], [((2, 0), (1, 1))], [((3, 0), (2, 1))], [((5, 0), (1, 1))]]
