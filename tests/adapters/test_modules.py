"""Modules and optimizers: saved by name, resumed by any number of ranks, stages merged without collisions."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import nested_values, split_for_save
from tests.adapters.models import Layer, Stage, made_model, sharded, train, wholes
from tests.adapters.modules import OPTIMIZERS, adamw, assert_close, resume, save_by, train_alone

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fsdp2_goes_on_at_any_number_of_ranks(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    """Saved by 4 ranks, training goes on at 4, 2 and 1 with the losses of the run that was never stopped."""
    going_on = ranks.run(4, save_by, tmp_path / "ckpt", "fsdp2", optimizer)
    assert_close(going_on, train_alone(optimizer))
    assert ranks.run(4, resume, tmp_path / "ckpt", "fsdp2", optimizer) == going_on
    for world in (2, 1):
        assert_close(ranks.run(world, resume, tmp_path / "ckpt", "fsdp2", optimizer), going_on[0])


def _plain_names(directory: Path) -> set[str]:
    model = sharded(made_model(1))
    optimizer = adamw(model)
    train(model, optimizer, 0, 1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": get_model_state_dict(model), "optimizer": flat}, checkpoint_id=directory / "dcp")
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), directory / "ours")
    return set(dcp.FileSystemReader(directory / "dcp").read_metadata().state_dict_metadata)


def test_tensors_have_the_names_that_dcp_gives_them(ranks: Ranks, tmp_path: Path) -> None:
    """Keys are those of dcp.save of the flattened state dicts; the options of a group are one object."""
    names = ranks.run(2, _plain_names, tmp_path)[0]

    stored = dist_checkpointing.load_sharded_metadata(tmp_path / "ours")
    tensors = {shard.key for shard in stored.values() if isinstance(shard, ShardedTensor)}
    objects = {shard.key for shard in stored.values()} - tensors
    assert tensors == {name for name in names if ".param_groups." not in name}
    assert len(objects) == 2
    assert all(re.fullmatch(r"optimizer\.param_groups\.\(group [0-9a-f]{16}\)", name) for name in objects)


def _stages(seed: int, layers: int = 4) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Interleaved virtual stages: rank r of n has layers r, r + n, ..., each a part with an optimizer of its own."""
    model = made_model(seed, layers)
    mine = range(dist.get_rank(), layers, dist.get_world_size())
    parts: list[nn.Module] = [Stage(model, [number]) for number in mine]
    return parts, [adamw(part, lr=0.01 * (number + 1)) for part, number in zip(parts, mine, strict=True)]


def _save_stages(directory: Path) -> None:
    parts, optimizers = _stages(1)
    for number, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True)):
        train(part, optimizer, 0, 2 + dist.get_rank() + number, alone=True)
    dist_checkpointing.save(to_sharded_state_dict(parts, *optimizers), directory)


def _load_stages(directory: Path) -> dict[str, Any]:
    parts, optimizers = _stages(2)
    loaded = dist_checkpointing.load(to_sharded_state_dict(parts, *optimizers), directory, strict=True)
    load_into(loaded, parts, *optimizers)
    state: dict[str, Any] = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        state |= wholes(get_model_state_dict(part))
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state |= {f"optimizer.{k}": v for k, v in get_optimizer_state_dict(part, optimizer, options=options).items()}
    return state


def test_pipeline_stages_have_their_own_keys(ranks: Ranks, tmp_path: Path) -> None:
    """Stages, several a rank, each with its optimizer, load at another number: tensors, steps and options."""
    ranks.run(2, _save_stages, tmp_path / "ckpt")
    whole = ranks.run(1, _load_stages, tmp_path / "ckpt")[0]

    assert whole["optimizer.param_groups.3.up.weight.lr"] == 0.04
    assert [whole[f"optimizer.state.{layer}.up.weight.step"].item() for layer in range(4)] == [2, 3, 3, 4]
    for part in ranks.run(4, _load_stages, tmp_path / "ckpt"):
        assert part
        for name, value in part.items():
            assert torch.equal(value, whole[name]) if isinstance(value, torch.Tensor) else value == whole[name], name


def test_parts_that_claim_one_name_are_refused() -> None:
    """Two parts whose layers are numbered alike would overwrite each other: the error names both."""
    with pytest.raises(ShardingError, match=r"'0\.scale' is in model part 0 and in model part 1"):
        to_sharded_state_dict([Stage(made_model(1), [0]), Stage(made_model(2), [0])])
    model = made_model(1)
    shared = to_sharded_state_dict([Stage(model, [0]), Stage(model, [0, 1])])
    assert set(shared) == set(model.state_dict())


def test_an_optimizer_has_the_parameters_of_one_part() -> None:
    """Parameters of two parts, of no part, or of two optimizers are refused with the way out."""
    parts = [Stage(made_model(1), [number]) for number in range(2)]
    params = [param for part in parts for param in part.parameters()]
    with pytest.raises(ShardingError, match="optimizer 0 are spread over modules 0, 1"):
        to_sharded_state_dict(parts, torch.optim.SGD(params))
    with pytest.raises(ShardingError, match="optimizer 1 are not all in the model"):
        to_sharded_state_dict(parts, torch.optim.SGD(parts[0].parameters()), torch.optim.SGD(Layer().parameters()))
    with pytest.raises(ShardingError, match=r"is in optimizer 0 and in optimizer 1"):
        to_sharded_state_dict(parts, *(torch.optim.SGD(parts[0].parameters()) for _ in range(2)))


def test_groups_must_be_as_they_were(tmp_path: Path) -> None:
    """Parameters that were saved with different options cannot get them in one group: the error names two of them."""
    model = made_model(1)
    dist_checkpointing.save(to_sharded_state_dict(model, adamw(model)), tmp_path / "ckpt")
    one_group = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    loaded = dist_checkpointing.load(to_sharded_state_dict(model, one_group), tmp_path / "ckpt")
    with pytest.raises(CheckpointingException, match=r"'0\..*' and '0\..*' are in one group .* values of (lr|weight)"):
        load_into(loaded, model, one_group)


@pytest.mark.parametrize("first", [0, 1])
def test_an_option_that_some_lack_is_no_option_of_all(tmp_path: Path, first: int) -> None:
    """Parameters of which some were saved with an option cannot be in one group, whichever of them come first."""
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model, own = torch.nn.ModuleList([one, two]), {"params": [*two.parameters()], "name": "head"}
    saved = torch.optim.SGD([{"params": [*one.parameters()]}, own], lr=0.5)
    dist_checkpointing.save(to_sharded_state_dict(model, saved), tmp_path / "ckpt")
    merged = torch.optim.SGD([param for part in (one, two)[:: 1 - 2 * first] for param in part.parameters()], lr=0.5)
    loaded = dist_checkpointing.load(to_sharded_state_dict(model, merged), tmp_path / "ckpt")
    with pytest.raises(CheckpointingException, match="values of name: "):
        load_into(loaded, model, merged)


def test_what_was_not_loaded_is_named_or_kept(tmp_path: Path) -> None:
    """A model with a layer more gets an error that names its parameters, and with strict=False keeps them."""
    small, large = made_model(1, layers=1), made_model(2, layers=2)
    dist_checkpointing.save(to_sharded_state_dict(small, adamw(small)), tmp_path / "ckpt")
    before, optimizer = copy.deepcopy(large.state_dict()), adamw(large)
    wanted = to_sharded_state_dict(large, optimizer)
    loaded = dist_checkpointing.load(wanted, tmp_path / "ckpt", strict="log_unexpected")
    with pytest.raises(KeyMismatchError, match=r"the model has parameters .*: 1\.down\.bias, .*strict=False"):
        load_into(loaded, large, optimizer)
    load_into(loaded, large, optimizer, strict=False)
    assert torch.equal(large.state_dict()["0.up.weight"], small.state_dict()["0.up.weight"])
    assert torch.equal(large.state_dict()["1.up.weight"], before["1.up.weight"])
    train(large, optimizer, 0, 1)


def test_what_is_handed_back_is_what_was_described(tmp_path: Path) -> None:
    """Optimizers that were loaded, or not, and a state dict of torch's own form are told apart."""
    model = made_model(1)
    optimizer = adamw(model)
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "ckpt")
    loaded = dist_checkpointing.load(to_sharded_state_dict(model, optimizer), tmp_path / "ckpt")
    with pytest.raises(ShardingError, match="has an optimizer: pass"):
        load_into(loaded, model)
    with pytest.raises(ShardingError, match=r"load to_sharded_state_dict\(model, optimizer\)"):
        load_into(loaded["model"], model, optimizer)
    with pytest.raises(ShardingError, match="set_optimizer_state_dict"):
        load_into({**loaded, "optimizer": {"state": {}, "param_groups": []}}, model, optimizer)


def test_a_model_is_handed_back_without_optimizers(tmp_path: Path) -> None:
    """Parameters alone are loaded from a checkpoint with optimizer state, by the prefix that they have there."""
    model, other = made_model(1), made_model(2)
    dist_checkpointing.save(to_sharded_state_dict(model, adamw(model)), tmp_path / "ckpt")
    loaded = dist_checkpointing.load(to_sharded_state_dict(other, prefix="model."), tmp_path / "ckpt")
    load_into(loaded, other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


class _JournaledRequest(nn.Module):
    """State beside parameters."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.note = note

    def get_extra_state(self) -> dict[str, str]:
        """The note."""
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        """Take a note."""
        self.note = state["note"]


def _extra_state(directory: Path) -> list[str]:
    """Rank 0 has stages a and c, rank 1 has b and c."""
    names = ("ab"[dist.get_rank()], "c")
    parts = [nn.ModuleDict({name: _JournaledRequest(f"of {name}")}) for name in names]
    dist_checkpointing.save(to_sharded_state_dict(parts), directory)
    empty = [nn.ModuleDict({name: _JournaledRequest("")}) for name in names]
    load_into(dist_checkpointing.load(to_sharded_state_dict(empty), directory, strict=True), empty)
    return [module.note for part in empty for module in part.values()]  # type: ignore[misc]


def test_extra_state_is_each_modules_own(ranks: Ranks, tmp_path: Path) -> None:
    """What a module keeps that is no tensor is stored under its name, on whatever stage it is."""
    assert ranks.run(2, _extra_state, tmp_path / "ckpt") == [["of a", "of c"], ["of b", "of c"]]


def _replicas_of_a_mesh(directory: Path) -> bool:
    """Tensor parallelism in pairs, each pair a replica of the other, as in data parallelism without sharding."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, other = made_model(1), made_model(2)
    for each in (model, other):
        for layer in each.children():
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    dist_checkpointing.save(to_sharded_state_dict(model), directory)
    load_into(dist_checkpointing.load(to_sharded_state_dict(other), directory, strict=True), other)
    pairs = zip(wholes(model.state_dict()).values(), wholes(other.state_dict()).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_replicas_of_a_tensor_parallel_model_are_written_once(ranks: Ranks, tmp_path: Path) -> None:
    """A mesh that every data-parallel rank has anew needs no replica ids from the caller."""
    assert ranks.run(4, _replicas_of_a_mesh, tmp_path / "ckpt") == [True] * 4
    plain = made_model(1).state_dict()
    found = dist_checkpointing.load_plain_tensors(tmp_path / "ckpt")
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_nothing_of_modules_is_common_state() -> None:
    """All that is described of a model and an optimizer is sharded or replicated: no rank's stands for the others'."""
    model = made_model(1)
    sharded, common = split_for_save(to_sharded_state_dict(model, adamw(model)))
    shards = list(nested_values(sharded))
    assert not list(nested_values(common))
    assert len({shard.key for shard in shards}) == len(shards)


def test_parameters_named_like_options_of_numbered_groups(tmp_path: Path) -> None:
    """A model's ``0.lr`` and the ``lr`` of its optimizer's group 0 have one key: the parameter's options keep it."""
    model = nn.Sequential(nn.ParameterDict({"lr": nn.Parameter(torch.ones(2)), "eps": nn.Parameter(torch.ones(2))}))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "ckpt")
    optimizer.param_groups[0]["lr"] = 0.5

    loaded = dist_checkpointing.load(to_sharded_state_dict(model, optimizer), tmp_path / "ckpt")
    load_into(loaded, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("loaded", [None, nn.Linear(2, 2), ({}, set(), set())])
def test_what_is_no_loaded_state_dict_is_refused(loaded: Any) -> None:
    """A model in the place of the state dict, and the tuple of `strict="return_all"`, are errors that say so."""
    model = nn.Linear(2, 2)
    with pytest.raises(ShardingError, match="in the place of the loaded state dict"):
        load_into(loaded, model)
    with pytest.raises(CheckpointingException, match="keep_options=True: expected a list of texts or one text"):
        load_into(to_sharded_state_dict(model), model, keep_options=True)  # type: ignore[arg-type]
