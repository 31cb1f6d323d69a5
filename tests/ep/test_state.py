"""State dicts with experts through dist_checkpointing: what is refused, what is told apart, and who reads it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.distributed.comm import Comm
from shardckpt.errors import KeyMismatchError, RefusedByPolicyError, ShardingError, StrategyMismatchError
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel import FullyParallelLoadStrategyWrapper, FullyParallelSaveStrategyWrapper
from shardckpt.state_dict import nested_values, split_for_save
from shardckpt.validation.replicas import choose_main_replicas
from shardckpt_ep import (
    EPLoadStrategy,
    EPSaveStrategy,
    ExpertLayout,
    expert_layouts,
    expert_object,
    expert_sharded_state_dict,
)
from shardckpt_torch_dist import TorchDistLoadShardedStrategy
from tests.ep.checkpoints import store
from tests.ep.cycles import layouts
from tests.ep.live import FQN, Case, Meshes, check, expected, mesh_of, order, state, whole
from tests.ep.state import HALVES, save_case

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _loaded(path: Path, case: Case, options: dict[str, Any]) -> None:
    meshes = Meshes()
    held = state(case, meshes.of(case), empty=True)
    given = layouts(case, meshes.of(case), held)
    dist_checkpointing.load(expert_sharded_state_dict(held, given), path, **options)
    check(case, meshes.of(case), held)


@pytest.mark.parametrize(
    "options",
    [{}, {"sharded_strategy": "ep"}, {"accept": ["ep"]}, {"sharded_strategy": TorchDistLoadShardedStrategy()}],
    ids=["by the marker", "by name", "by policy", "by torch_dist's own reader"],
)
def test_what_ep_wrote_is_read(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    """The gate finds ep's reader for ep's checkpoints; torch_dist's reads them, too, where it is the one given."""
    ranks.run(2, save_case, tmp_path / "ckpt", HALVES)
    ranks.run(2, _loaded, tmp_path / "ckpt", HALVES, options)


def _read_as_others_do(path: Path) -> None:
    """Half of the rows of all experts on every rank, by torch_dist; and all, by plain DCP."""
    rows = {"w": ShardedTensor.from_rank_offsets(f"model.{FQN}", torch.zeros(8, 3, 3), (1, dist.get_rank(), 2))}
    loaded = dist_checkpointing.load(rows, path, TorchDistLoadShardedStrategy())
    assert torch.equal(loaded["w"], whole(8).chunk(2, 1)[dist.get_rank()])
    found = {f"model.{FQN}": torch.zeros(8, 6, 3)}
    dcp.load(found, checkpoint_id=path)
    assert torch.equal(found[f"model.{FQN}"], whole(8))


def test_readers_that_know_no_experts_read_what_ep_wrote(ranks: Ranks, tmp_path: Path) -> None:
    """torch_dist cuts the tensor of all experts as it likes, and plain dcp.load has it whole, without our planner."""
    ranks.run(2, save_case, tmp_path / "ckpt", HALVES)
    ranks.run(2, _read_as_others_do, tmp_path / "ckpt")


def test_what_torch_dist_wrote_is_read_by_ep(ranks: Ranks, tmp_path: Path) -> None:
    """An instance of ep's reader reads (torch_dist, 1), whose files are the same, into any layout."""
    store(tmp_path / "ckpt", expected(8), 3, 0)

    ranks.run(2, _loaded, tmp_path / "ckpt", HALVES, {"sharded_strategy": EPLoadStrategy()})
    ranks.run(2, _loaded, tmp_path / "ckpt", HALVES, {})


def test_the_gate_keeps_the_two_names_apart(ranks: Ranks, tmp_path: Path) -> None:
    """A policy or a name that means the other backend is refused with what the checkpoint is."""
    ranks.run(2, save_case, tmp_path / "ckpt", HALVES)
    wanted = {"w": ShardedTensor.from_rank_offsets(f"model.{FQN}", torch.zeros(8, 6, 3))}

    with pytest.raises(RefusedByPolicyError, match=r"is a 'ep' checkpoint of version 1"):
        dist_checkpointing.load(wanted, tmp_path / "ckpt", accept=["torch_dist"])
    with pytest.raises(StrategyMismatchError, match="leave sharded_strategy out"):
        dist_checkpointing.load(wanted, tmp_path / "ckpt", "torch_dist")


def test_plain_dcp_directories_stay_torch_dists(tmp_path: Path) -> None:
    """A directory without a marker is recognised as torch_dist, as before there was ep."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)

    reader = dist_checkpointing.get_default_load_sharded_strategy(tmp_path / "ckpt")
    assert type(reader) is TorchDistLoadShardedStrategy


def _with_rank_0_outside(path: Path) -> Any:
    mesh = DeviceMesh("cpu", [2, 3], mesh_dim_names=("ep",))
    value = whole(8).chunk(2)[mesh.get_local_rank()].clone() if mesh.get_coordinate() else torch.full((1, 1), -1.0)
    held = {FQN: value}
    given = {FQN: ExpertLayout.from_local(value, mesh)}
    dist_checkpointing.save(expert_sharded_state_dict(held, given), path, EPSaveStrategy(given))
    if mesh.get_coordinate():
        value.zero_()
    found = dist_checkpointing.load(expert_sharded_state_dict(held, given), path, EPLoadStrategy(given))
    return found[FQN] is value, float(value.flatten()[0])


def test_ranks_outside_the_mesh_store_and_read_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Also where the main rank is outside: its value comes back as it is, and the others' experts are all there."""
    assert ranks.run(4, _with_rank_0_outside, tmp_path / "ckpt") == [
        (True, -1.0),
        (True, -1.0),
        (True, 1.0),
        (True, 73.0),
    ]
    assert torch.equal(dist_checkpointing.load_plain_tensors(tmp_path / "ckpt")[FQN], whole(8))


def _through_wrappers(path: Path) -> None:
    case, meshes = Case(order(("replicate", 2), ("ep", 2)), experts=5, kind="local"), Meshes()
    held = state(case, meshes.of(case))
    given = layouts(case, meshes.of(case), held)
    saver = FullyParallelSaveStrategyWrapper(EPSaveStrategy(given))
    with AsyncCallsQueue() as queue:
        described = expert_sharded_state_dict(held, given)
        queue.schedule_async_request(dist_checkpointing.save(described, path, saver, async_sharded_save=True))
        queue.maybe_finalize_async_calls(blocking=True)
    held = state(case, meshes.of(case), empty=True)
    reader = FullyParallelLoadStrategyWrapper(EPLoadStrategy(given))
    dist_checkpointing.load(expert_sharded_state_dict(held, given), path, reader)
    check(case, meshes.of(case), held)


def test_copies_share_the_work_behind_the_training(ranks: Ranks, tmp_path: Path) -> None:
    """The parallel wrappers and asynchronous saves take ep's strategies as they take torch_dist's."""
    ranks.run(4, _through_wrappers, tmp_path / "ckpt")

    found = dist_checkpointing.load_plain_tensors(tmp_path / "ckpt")
    assert torch.equal(found[f"model.{FQN}"], whole(5))


def _halves() -> tuple[DeviceMesh, dict[str, Any], dict[str, ExpertLayout]]:
    """Half of the experts on every rank, twice."""
    mesh = mesh_of(("replicate", 2), ("ep", 2))
    held: dict[str, Any] = {FQN: torch.ones(4, 6, 3)}
    return mesh, held, {FQN: ExpertLayout.from_local(held[FQN], mesh)}


def _misdescribed(how: str) -> None:
    mesh, held, given = _halves()
    other = "layers.7.moe.experts.w1"
    is_expert = None
    if how == "lost" and mesh.get_local_rank("ep") == 1:
        held, given = {}, {}
    elif how == "copies":
        given = {FQN: ExpertLayout.from_local(held[FQN], mesh["ep"])}
    elif how == "uneven":
        held = {FQN: torch.ones(3 + mesh.get_local_rank("ep"), 6, 3)}
        given = {FQN: ExpertLayout.from_local(held[FQN], mesh)}
    elif how == "plain":
        held[other] = torch.ones(4, 6, 3)
    elif how == "efsdp":
        held[other] = DTensor.from_local(torch.ones(4, 6, 3), mesh["replicate"], run_check=False)
    elif how == "marked":
        held["head"], is_expert = torch.ones(2), "head".__eq__
    elif how == "not there":
        given[other] = given[FQN]
    elif how == "shape":
        held[FQN] = torch.ones(4, 6, 2)
    expert_sharded_state_dict(held, given, is_expert=is_expert)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("lost", r"experts 4-7 of 'layers.0.moe.experts.w1' are described by no rank"),
        ("copies", r"experts 0-7 of .* are described by several ranks \(rank 0 and rank 2, which are not copies"),
        (
            "uneven",
            r"ranks disagree on the tensor of all experts: shape \(6, 6, 3\).*\(8, 6, 3\).*pass experts_per_rank",
        ),
        ("plain", r"'layers.7.moe.experts.w1' is an expert's and has no layout: a plain tensor of shape \(4, 6, 3\)"),
        ("efsdp", r"'layers.7.moe.experts.w1' .* a DTensor without an expert-parallel mesh dimension"),
        ("marked", r"'head' is an expert's and has no layout"),
        ("not there", r"1 layouts are of parameters that the state dict does not have: layers.7.moe.experts.w1"),
        ("shape", r"'layers.0.moe.experts.w1': this rank's has shape \(4, 6, 2\), its layout says \(4, 6, 3\)"),
    ],
)
def test_what_would_lose_experts_is_refused_on_every_rank(ranks: Ranks, how: str, reason: str) -> None:
    """Lost, doubled and forgotten experts are one ShardingError on all ranks, which names key and experts."""
    for outcome in ranks.outcomes(4, _misdescribed, how):
        assert outcome.kind == ShardingError.__name__
        assert re.search(reason, outcome.message)


def _described_otherwise(path: Path, is_save: bool) -> None:
    _, held, given = _halves()
    as_whole = {FQN: ShardedTensor.from_rank_offsets(FQN, held[FQN], replica_id=dist.get_rank())}
    if is_save:
        dist_checkpointing.save(as_whole, path, EPSaveStrategy(given))
    else:
        dist_checkpointing.load(as_whole, path, EPLoadStrategy(given))


def test_a_strategy_with_layouts_refuses_shards_that_are_described_otherwise(ranks: Ranks, tmp_path: Path) -> None:
    """Half of the experts given as the whole tensor is an error of the save, and of the load."""
    reason = r"is described as \(4, 6, 3\) at \(0, 0, 0\) of \(4, 6, 3\); its layout has \[Box"
    for outcome in ranks.outcomes(4, _described_otherwise, tmp_path / "ckpt", True):
        assert outcome.kind == ShardingError.__name__
        assert re.search(reason, outcome.message)
    assert not (tmp_path / "ckpt").exists()
    store(tmp_path / "half", {FQN: torch.ones(4, 6, 3)}, 1, 0)
    for outcome in ranks.outcomes(4, _described_otherwise, tmp_path / "half", False):
        assert re.search(reason, outcome.message)


def _compared(different: bool) -> Any:
    mesh, held, given = _halves()
    if different:
        held[FQN] *= mesh.get_local_rank("replicate")
    nest, _ = split_for_save(expert_sharded_state_dict(held, given, check_replicas=True))
    shards = list(nested_values(nest))
    return [shard.replica_id for shard in choose_main_replicas(shards, Comm(), compare=True)]


def test_copies_of_experts_are_compared_where_asked_for(ranks: Ranks) -> None:
    """With check_replicas, ranks that have the same experts must have the same values; the lowest writes them."""
    assert ranks.run(4, _compared, False) == [[0], [0], [1], [1]]
    for outcome in ranks.outcomes(4, _compared, True):
        assert outcome.kind == ShardingError.__name__
        assert re.search(r"replicated values differ between ranks:\n.*'layers.0.moe.experts.w1'", outcome.message)


def _saved_on_a_wrong_mesh(path: Path) -> None:
    live_on = mesh_of(("replicate", 2), ("ep", 2))
    wrong = mesh_of(("ep", 2), ("replicate", 2))  # made anew from sizes
    held = {FQN: whole(8).chunk(2)[live_on.get_local_rank("ep")].clone()}
    given = {FQN: ExpertLayout.from_local(held[FQN], wrong)}
    described = expert_sharded_state_dict(held, given, check_replicas=True)
    dist_checkpointing.save(described, path, EPSaveStrategy(given))


def test_a_wrong_mesh_of_plain_tensors_shows_in_its_copies(ranks: Ranks, tmp_path: Path) -> None:
    """Plain tensors do not say where they lie; where a wrong mesh calls other experts copies, a save refuses them."""
    for outcome in ranks.outcomes(4, _saved_on_a_wrong_mesh, tmp_path / "ckpt"):
        assert outcome.kind == ShardingError.__name__
        assert re.search(r"replicated values differ between ranks:\n.*'layers.0.moe.experts.w1'", outcome.message)
    assert not (tmp_path / "ckpt").exists()


def _objects(path: Path, experts: list[list[int]], *, is_save: bool) -> Any:
    mine = experts[dist.get_rank()]
    nest = {str(e): expert_object("router.stats", {"hits": e} if is_save else None, e, 5) for e in mine}
    described = expert_sharded_state_dict(nest, {}, is_expert=lambda _: False)
    if is_save:
        return dist_checkpointing.save(described, path, "ep")
    return dist_checkpointing.load(described, path)


def test_objects_go_with_their_experts(ranks: Ranks, tmp_path: Path) -> None:
    """Objects of single experts are loaded by whichever ranks have the experts then."""
    ranks.run(2, _objects_saved, tmp_path / "ckpt", [[0, 1, 2], [3, 4]])

    found = ranks.run(3, _objects_loaded, tmp_path / "ckpt", [[4], [0, 3], [1, 2]])
    assert found == [{"4": {"hits": 4}}, {"0": {"hits": 0}, "3": {"hits": 3}}, {"1": {"hits": 1}, "2": {"hits": 2}}]


def test_missing_objects_are_named_by_expert(ranks: Ranks, tmp_path: Path) -> None:
    """An object that no rank has is an error that says whose it is."""
    for outcome in ranks.outcomes(2, _objects_saved, tmp_path / "ckpt", [[0, 2], [3]]):
        assert outcome.kind == ShardingError.__name__
        assert "experts 1, 4 of 'router.stats' are described by no rank" in outcome.message


def _objects_saved(path: Path, experts: list[list[int]]) -> Any:
    return _objects(path, experts, is_save=True)


def _objects_loaded(path: Path, experts: list[list[int]]) -> Any:
    return _objects(path, experts, is_save=False)


def _factored(path: Path) -> Any:
    mesh = mesh_of(("ep", 2))
    rank = dist.get_rank()
    slots = {"exp_avg": whole(8), "row_var": whole(8)[:, :, :1], "col_var": whole(8)[:, :1]}
    held = {"model": {FQN: whole(8).chunk(2)[rank].clone()}, "optimizer": {"state": {FQN: {}}}}
    held["optimizer"]["state"][FQN] = {name: value.chunk(2)[rank].clone() for name, value in slots.items()}
    held["optimizer"]["state"][FQN]["step"] = torch.tensor(3.0)
    given = {FQN: ExpertLayout.from_local(held["model"][FQN], mesh)}
    dist_checkpointing.save(expert_sharded_state_dict(held, given), path, EPSaveStrategy(given))


def test_factored_state_is_stored_for_all_experts(ranks: Ranks, tmp_path: Path) -> None:
    """Adafactor's rows and columns of every rank's experts make up those of all experts; the step is stored once."""
    ranks.run(2, _factored, tmp_path / "ckpt")

    found = dist_checkpointing.load_plain_tensors(tmp_path / "ckpt")
    prefix = f"optimizer.state.{FQN}."
    assert torch.equal(found[prefix + "row_var"], whole(8)[:, :, :1])
    assert torch.equal(found[prefix + "col_var"], whole(8)[:, :1])
    assert found[prefix + "step"].item() == 3.0


def test_a_wanted_expert_tensor_that_is_not_stored_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """Keys of experts go through the same strictness as all others."""
    store(tmp_path / "ckpt", {"other": torch.ones(2)}, 1, 0)

    for outcome in ranks.outcomes(2, _loaded, tmp_path / "ckpt", HALVES, {}):
        assert outcome.kind == KeyMismatchError.__name__
        assert f"model.{FQN}" in outcome.message


def _tied(path: Path) -> list[list[str]]:
    mesh = mesh_of(("ep", 2))
    model = torch.nn.ModuleDict({f"{n}": torch.nn.ModuleDict({"experts": torch.nn.Linear(3, 2)}) for n in range(2)})
    first, second = model["0"].experts, model["1"].experts
    second.weight = first.weight
    first.weight.data.fill_(dist.get_rank() + 1)
    given = expert_layouts(model, mesh, ["0.experts", "1.experts"])
    dist_checkpointing.save(expert_sharded_state_dict(model.state_dict(), given), path, "ep")
    params = dict(model.named_parameters())
    state = {name: {"exp_avg": torch.zeros_like(param)} for name, param in params.items()}
    described = expert_sharded_state_dict({"state": state}, given)
    return [sorted(given), sorted(described["state"])]


def test_tied_experts_have_a_layout_under_each_name(ranks: Ranks, tmp_path: Path) -> None:
    """A model's state dict has a tied parameter twice and its optimizer's once: both are described."""
    names = [f"{n}.experts.{name}" for n in range(2) for name in ("bias", "weight")]
    assert ranks.run(2, _tied, tmp_path / "ckpt") == [[names, names[:3]]] * 2
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "ckpt")
    assert [stored[f"{n}.experts.weight"][:, 0].tolist() for n in range(2)] == [[1, 1, 2, 2]] * 2
