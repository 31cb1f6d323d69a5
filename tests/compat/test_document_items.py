"""Items of the documents that no other test shows: ``items.py`` names these tests."""

from __future__ import annotations

import io
import logging
import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from shardckpt import ShardedObject, ShardedTensor
from shardckpt.compat.megatron import dist_checkpointing as dc
from shardckpt.compat.megatron.dist_checkpointing.strategies import base
from shardckpt.compat.megatron.dist_checkpointing.strategies import torch as strategies
from shardckpt.compat.mindspeed import (
    EPLoadPlanner,
    cleanup_old_checkpoints,
    create_default_local_load_plan_with_moe,
    get_check_moe_func,
)
from shardckpt.errors import CheckpointingException
from tests.compat.torchtitan import Job
from tests.ep.checkpoints import store
from tests.ep.live import mesh_of
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def test_checkpoints_are_ordered_by_step(tmp_path: Path) -> None:
    """A copy or a touch makes no checkpoint newer: the ones with the highest steps stay."""
    folders.save_all(tmp_path / "checkpoints", 9, 10, 11, name="global_step_{}")
    os.utime(tmp_path / "checkpoints" / "global_step_9", (4e9, 4e9))
    cleanup_old_checkpoints(Namespace(output_dir=str(tmp_path), save_total_limit=2))
    assert folders.names_in(tmp_path / "checkpoints") == {"global_step_10", "global_step_11"}


def test_megatrons_constants_and_registration(registry: Any) -> None:
    """The module's data are Megatron's; the default strategies are registered already, and may be again."""
    assert (strategies.MSC_PREFIX, strategies._metadata_fn) == ("msc://", ".metadata")
    assert isinstance(strategies.logger, logging.Logger)
    for _ in range(2):
        strategies.register_default_torch_strategies()
        found = base.get_default_strategy(base.StrategyAction.SAVE_SHARDED, "torch_dist", 1)
        assert isinstance(found, strategies.TorchDistSaveShardedStrategy)
        assert found.can_handle_sharded_objects
    assert strategies.TorchDistLoadShardedStrategy().can_handle_sharded_objects
    with pytest.raises(ImportError, match="flattened shards are loaded at their true shapes"):
        _ = strategies.get_reformulation_metadata


@table(
    ("arguments", "keywords"),
    [
        (("torch_dist", 1, True, 2, True, "optimizer"), {}),
        (
            (),
            {
                "backend": "torch_dist",
                "version": 1,
                "keep_only_main_replica": True,
                "thread_count": 2,
                "cached_metadata": True,
                "separation_hint": "optimizer",
            },
        ),
    ],
)
def test_megatrons_save_strategy_takes_its_six_arguments(
    tmp_path: Path, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """By place and by name: two files a rank for each prefix; a second save has the values of its moment."""
    strategy = strategies.TorchDistSaveShardedStrategy(*arguments, **keywords)
    for value in (1.0, 2.0):
        names = ("a", "b", "optimizer.a", "optimizer.b")
        state = {name: ShardedTensor.from_rank_offsets(name, torch.full((4,), value)) for name in names}
        path = tmp_path / str(value)
        dc.save(state, path, strategy)
        files = sorted(file.name for file in path.glob("*.distcp"))
        assert [name.startswith("optimizer") for name in files] == [False] * (len(files) // 2) + [True] * (
            len(files) // 2
        )
        assert all(tensor.eq(value).all() for tensor in dc.load_plain_tensors(path).values())


def _bytes_objects(path: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    written = ShardedObject("rng", io.BytesIO(bytes([rank, 7])), (world,), (rank,))
    dc.save({"rng": written}, path)
    loaded = dc.load({"rng": written.without_data()}, path)
    assert loaded["rng"].getvalue() == bytes([rank, 7])


def test_a_bytes_object_comes_back_on_its_rank(ranks: Ranks, tmp_path: Path) -> None:
    """A ShardedObject whose data is a BytesIO has the bytes of its own rank again."""
    ranks.run(2, _bytes_objects, str(tmp_path / "c"))


def test_flattened_shards_have_their_true_shape(tmp_path: Path) -> None:
    """Parts of a flattened tensor are stored as parts of the tensor, and loaded as other parts of it."""
    full = torch.arange(24.0)

    def parts(*ends: int) -> dict[str, Any]:
        pairs = zip((0, *ends), (*ends, 24), strict=True)
        return {
            f"{start}": ShardedTensor.from_rank_offsets_flat(
                "w", full[start:end].clone(), (4, 6), flattened_range=slice(start, end)
            )
            for start, end in pairs
        }

    dc.save(parts(5, 13), tmp_path / "c")
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], full.reshape(4, 6))
    wanted = {name: shard.without_data() for name, shard in parts(8, 9).items()}
    loaded = dc.load(wanted, tmp_path / "c")
    assert torch.equal(torch.cat([*loaded.values()]), full)


def _is_expert(key: str) -> bool:
    return key.startswith("experts")


@table(("experts", "pieces", "dim"), [(8, 1, 0), (8, 3, 0), (7, 1, 0), (7, 2, 0), (8, 2, 1)])
def test_the_planner_reads_any_stored_chunks(tmp_path: Path, experts: int, pieces: int, dim: int) -> None:
    """Each rank gets its experts, even or uneven, of a tensor stored in one chunk or in many, along any axis."""
    full = {"experts.w1": torch.arange(experts * 6.0).reshape(experts, 6), "norm": torch.arange(6.0).reshape(2, 3)}
    store(tmp_path / "c", full, pieces, dim)
    for rank, part in enumerate(full["experts.w1"].chunk(2)):
        held = {"experts.w1": torch.zeros_like(part), "norm": torch.zeros(2, 3), "absent": torch.ones(2)}
        planner = EPLoadPlanner(ep_rank=rank, ep_size=2, check_moe_fn=_is_expert, allow_partial_load=True)
        dcp.load(held, checkpoint_id=tmp_path / "c", planner=planner)
        assert torch.equal(held["experts.w1"], part)
        assert torch.equal(held["norm"], full["norm"])
        assert held["absent"].eq(1).all()


def test_another_size_of_what_is_no_expert_is_torchs_error(tmp_path: Path) -> None:
    """Tensors that are no experts are checked as torch checks them."""
    dcp.save({"norm": torch.ones(3)}, checkpoint_id=tmp_path)
    stored = dcp.FileSystemReader(tmp_path).read_metadata()
    with pytest.raises(ValueError, match="Size mismatch"):
        create_default_local_load_plan_with_moe(_is_expert, 0, {"norm": torch.ones(4)}, stored, True)


def _checks(name: str) -> bool:
    mesh = mesh_of((name, 2))
    held = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
    block = torch.nn.ModuleDict({"experts": torch.nn.ParameterDict({"w1": torch.nn.Parameter(held)})})
    model = torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"_checkpoint_wrapped_module": block})})
    return get_check_moe_func(model)("0.experts.w1")


@table("name", ["efsdp", "ep_fsdp", "dp_shard_mod_ep"])
def test_experts_are_known_by_the_name_of_their_mesh(ranks: Ranks, name: str) -> None:
    """The mesh dimensions of MindSpeed, VeOmni and torchtitan; a recompute wrapper is no part of a name."""
    assert ranks.run(2, _checks, name) == [True] * 2


def _save(folder: Path) -> None:
    job = Job(folder)
    job.train(2)
    job.manager.close()


def test_a_loader_of_another_world_size_says_so(ranks: Ranks, tmp_path: Path) -> None:
    """Each loader gets the states of all ranks by their names, as in torchtitan, and what it raises is raised."""
    ranks.run(2, _save, tmp_path)
    job = Job(tmp_path)
    with pytest.raises(CheckpointingException, match="ValueError: saved by 2 data-parallel ranks"):
        job.manager.load()


class _Experts:
    """A rank's experts, which are no DTensor."""

    def __init__(self, value: float) -> None:
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.w1 = torch.full((4 // self.world, 3), value)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Describe them."""
        return {"w1": ShardedTensor.from_rank_offsets("w1", self.w1, (0, self.rank, self.world))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them."""
        self.w1 = state_dict["w1"]


def _save_experts(folder: Path) -> None:
    job = Job(folder, states={"experts": _Experts(1.0 + dist.get_rank())})
    job.manager.save(1)
    job.manager.close()


def test_experts_of_a_rank_are_saved_by_their_description(ranks: Ranks, tmp_path: Path) -> None:
    """A state with ``sharded_state_dict`` is each rank's part of one tensor, which another number of ranks loads."""
    ranks.run(2, _save_experts, tmp_path)
    experts = _Experts(0.0)
    job = Job(tmp_path, states={"experts": experts}, exclude_from_loading=["dataloader"])
    assert job.manager.load()
    job.manager.close()
    assert experts.w1[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
