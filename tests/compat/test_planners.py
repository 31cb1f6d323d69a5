from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as ours
from shardckpt.compat.megatron.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from shardckpt.compat.megatron.dist_checkpointing.strategies.torch import MCoreLoadPlanner, MCoreSavePlanner
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShapeMismatchError
from shardckpt_torch_dist import (
    CheckpointStorageReader,
    CheckpointStorageWriter,
    ShardedLoadPlanner,
    ShardedSavePlanner,
)
from tests.tables import table
from tests.torch_dist.te_stand_in import MXFP8StandIn

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

ROWS = torch.arange(48.0).reshape(12, 4)


def _save_planner(**kwargs: Any) -> MCoreSavePlanner:
    return MCoreSavePlanner(flatten_state_dict=False, **kwargs)


def _load_planner(**kwargs: Any) -> MCoreLoadPlanner:
    return MCoreLoadPlanner(flatten_state_dict=False, **kwargs)


def _state(rank: int, world: int, *, filled: bool) -> dict[str, Any]:
    """A rank's rows, what all ranks have, an object a rank, and a layer below a prepended axis."""
    rows = ROWS.chunk(world)[rank].clone()
    layer = torch.full((2,), float(rank))
    state = {
        "model": {
            "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, world)),
            "norm": ShardedTensor.from_rank_offsets("norm", torch.arange(3.0), replica_id=rank),
            "layer": ShardedTensor.from_rank_offsets("layers", layer, (0, rank, world), prepend_axis_num=1),
        },
        "rng": [ShardedObject("rng", {"seed": rank}, (world,), (rank,))],
    }
    if not filled:
        for shard in (*state["model"].values(), *state["rng"]):
            shard.data = None
    return state


def _check(state: dict[str, Any], rank: int, world: int) -> None:
    assert torch.equal(state["model"]["rows"].data, ROWS.chunk(world)[rank])
    assert state["model"]["norm"].data.tolist() == [0, 1, 2]
    assert state["model"]["layer"].data.tolist() == [rank, rank]
    assert state["rng"][0].data == {"seed": rank}


def _save_and_load(path: str, stock: bool) -> None:
    """Save and load what this rank has, through stock DCP's storage or ours."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    writer = dcp.FileSystemWriter(path) if stock else CheckpointStorageWriter(path)
    dcp.save(_state(rank, world, filled=True), storage_writer=writer, planner=_save_planner())
    wanted = _state(rank, world, filled=False)
    reader = dcp.FileSystemReader(path) if stock else CheckpointStorageReader(path)
    dcp.load(wanted, storage_reader=reader, planner=_load_planner())
    _check(wanted, rank, world)


@table("stock", [False, True])
def test_they_serve_dcp_alone_and_on_ranks(ranks: Ranks, tmp_path: Path, stock: bool) -> None:
    """dcp.save and dcp.load with Megatron's planners take its state dicts; dist_checkpointing reads the same."""
    _save_and_load(str(tmp_path / "alone"), stock)
    ranks.run(3, _save_and_load, str(tmp_path / "three"), stock)
    wanted = _state(1, 3, filled=False)
    if not stock:  # stock DCP stores no common state
        loaded = ours.load(wanted, tmp_path / "three", validate_access_integrity=False)
        assert torch.equal(loaded["model"]["rows"], ROWS.chunk(3)[1])
        assert loaded["rng"] == [{"seed": 1}]
    whole = ours.load_plain_tensors(tmp_path / "three")
    assert torch.equal(whole["rows"], ROWS)
    assert whole["layers"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_a_decentralized_plan_is_the_ranks_own() -> None:
    """create_decentralized_global_plan returns the plan as it is, for every replica that is this rank's to write."""
    planner = _save_planner()
    assert planner.can_run_decentralized_global_plan
    planner.set_up_planner(_state(1, 3, filled=True), is_coordinator=False)
    plan = planner.create_local_plan()
    assert [item.index.fqn for item in plan.items] == ["rows", "layers", "rng/shard_1_3"]  # norm is another rank's
    assert planner.create_decentralized_global_plan(plan) is plan


@table(
    ("arguments", "named"),
    [
        ({}, "flatten_state_dict=False"),
        ({"flatten_state_dict": True}, "can_run_decentralized_global_plan=False"),
        ({"flatten_state_dict": False, "dedup_replicated_tensors": True}, "can_run_decentralized_global_plan=False"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, Any], named: str) -> None:
    """What Megatron asserts is an error that names the argument to change."""
    with pytest.raises(CheckpointingException, match=named):
        MCoreSavePlanner(**arguments)


def test_a_flattened_plan_is_never_decentralized() -> None:
    """Paths of a flattened state dict need the plans of all ranks; without them any arguments are taken."""
    planner = MCoreSavePlanner(dedup_replicated_tensors=True, can_run_decentralized_global_plan=False)
    planner.set_up_planner({"plain": torch.ones(2)}, is_coordinator=True)
    plan = planner.create_local_plan()
    with pytest.raises(CheckpointingException, match="flatten_state_dict=False"):
        planner.create_decentralized_global_plan(plan)
    planner.flatten_state_dict = False
    with pytest.raises(CheckpointingException, match=r"planner_data of 1 keys.*create_global_plan"):
        planner.create_decentralized_global_plan(plan)


def test_a_bytes_object_is_stored_as_it_is(tmp_path: Path) -> None:
    """transform_object leaves a BytesIO alone, which Megatron has pickled itself; another value it pickles."""
    archive = io.BytesIO()
    torch.save([{"amax": 3}], archive)
    state = {"extra": archive, "iteration": 7}
    planner = _save_planner()
    planner.set_up_planner(state, is_coordinator=True)
    items = {item.index.fqn: item for item in planner.create_local_plan().items}
    assert planner.transform_object(items["extra"], archive) is archive
    assert planner.resolve_data(items["extra"]) is archive
    dcp.save(state, storage_writer=CheckpointStorageWriter(tmp_path / "c"), planner=_save_planner())
    wanted: dict[str, Any] = {"extra": io.BytesIO(), "iteration": 0}
    dcp.load(wanted, storage_reader=CheckpointStorageReader(tmp_path / "c"), planner=_load_planner())
    assert wanted == {"extra": [{"amax": 3}], "iteration": 7}


def test_shapes_are_checked_before_anything_is_filled(tmp_path: Path) -> None:
    """shapes_validation_sharded_tensors that differ are one error that names all; nothing is filled."""
    dcp.save(_state(0, 1, filled=True), storage_writer=CheckpointStorageWriter(tmp_path / "c"), planner=_save_planner())
    others = [ShardedTensor.from_rank_offsets(key, torch.zeros(5)) for key in ("rows", "norm")]
    target = torch.zeros(12, 4)
    planner = _load_planner(shapes_validation_sharded_tensors=others)
    with pytest.raises(dcp.api.CheckpointException, match=r"Global shape mismatch(?s:.)*'norm'(?s:.)*'rows'"):
        dcp.load({"rows": target}, storage_reader=CheckpointStorageReader(tmp_path / "c"), planner=planner)
    assert not target.any()
    metadata = CheckpointStorageReader(tmp_path / "c").read_metadata()
    with pytest.raises(ShapeMismatchError):
        planner._validate_global_shapes(metadata, others)
    with pytest.raises(KeyMismatchError, match="absent"):
        planner._validate_global_shapes(metadata, [ShardedTensor.from_rank_offsets("absent", torch.zeros(5))])
    planner._validate_global_shapes(metadata, [ShardedTensor.from_rank_offsets("rows", ROWS)])


@table("stock", [False, True])
@table("rows", [9, 15])
def test_tensors_that_may_differ_have_the_common_rows(tmp_path: Path, stock: bool, rows: int) -> None:
    """allow_shape_mismatch_sharded_tensors names a padded vocabulary; a ShardedTensor gets zeros, a plain one stays."""
    dcp.save({"emb": ROWS, "plain": ROWS}, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    reader = (dcp.FileSystemReader if stock else CheckpointStorageReader)(tmp_path / "c")
    given, plain = torch.full((rows, 4), -1.0), torch.full((rows, 4), -1.0)
    shard = ShardedTensor.from_rank_offsets("emb", given)
    other = ShardedTensor.from_rank_offsets("emb", given).without_data()
    described = {key: ShardedTensor.from_rank_offsets(key, given) for key in ("emb", "plain")}
    planner = _load_planner(allow_shape_mismatch_sharded_tensors=described)
    dcp.load({"emb": shard, "again": other, "plain": plain}, storage_reader=reader, planner=planner)
    common = min(rows, 12)
    for found in (given, other.data):
        assert found is not None
        assert torch.equal(found[:common], ROWS[:common])
        assert not found[common:].any()
    assert torch.equal(plain[:common], ROWS[:common])
    assert (plain[common:] == -1).all()
    assert not shard.allow_shape_mismatch
    planner = _load_planner(allow_shape_mismatch_sharded_tensors={"vocab": described["emb"]})
    with pytest.raises(dcp.api.CheckpointException, match="not in the checkpoint: vocab"):
        dcp.load({"emb": torch.zeros(12, 4)}, storage_reader=reader, planner=planner)


def test_the_readers_metadata_stays_as_it_is(tmp_path: Path) -> None:
    """_temporarily_bypass_shape_validation shows other sizes to the planner alone, and these only inside."""
    dcp.save({"emb": ROWS}, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    metadata = CheckpointStorageReader(tmp_path / "c").read_metadata()
    wanted = ShardedTensor.from_rank_offsets("emb", torch.zeros(15, 4))
    planner = _load_planner(allow_shape_mismatch_sharded_tensors={"emb": wanted})
    planner.set_up_planner({"emb": wanted}, metadata, is_coordinator=True)
    with planner._temporarily_bypass_shape_validation():
        assert planner.metadata is not None
        assert tuple(planner.metadata.state_dict_metadata["emb"].size) == (15, 4)
        assert tuple(metadata.state_dict_metadata["emb"].size) == (12, 4)
    assert planner.metadata is metadata


def test_quantized_tensors_are_resolved_plain_and_committed(tmp_path: Path) -> None:
    """resolve_tensor gives contiguous memory for a quantized destination, commit_tensor fills it, in any order."""
    values = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    dcp.save({"a": values, "b": values}, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    found = {key: MXFP8StandIn.quantized(torch.zeros(32, 32)) for key in ("a", "b")}
    wanted = {key: ShardedTensor.from_rank_offsets(key, data) for key, data in found.items()}
    planner = _load_planner()
    planner.set_up_planner(wanted, CheckpointStorageReader(tmp_path / "c").read_metadata(), is_coordinator=True)
    items = planner.finish_plan(planner.create_local_plan()).items
    targets = [planner.resolve_tensor(item) for item in items]  # both, before one is committed
    for item, target in reversed(list(zip(items, targets, strict=True))):
        assert target.is_contiguous()
        assert type(target) is torch.Tensor
        target.copy_(values)
        planner.commit_tensor(item, target)
    assert all(data.bits() == MXFP8StandIn.quantized(values).bits() for data in found.values())


def test_they_are_ours_with_megatrons_arguments() -> None:
    """What is not Megatron's vocabulary stands once, in ShardedSavePlanner and ShardedLoadPlanner."""
    assert issubclass(MCoreSavePlanner, ShardedSavePlanner)
    assert issubclass(MCoreLoadPlanner, ShardedLoadPlanner)
    loader = MCoreLoadPlanner(True, True, False, shapes_validation_sharded_tensors=[], allow_dtype_cast=True)
    assert loader.shapes_validation_sharded_tensors == []
    assert loader.allow_shape_mismatch_sharded_tensors is None
    assert loader.allow_dtype_cast
