"""The versions of modules come back, so that code that upgrades older state does not run on state of today."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as torch_dcp_to_torch_save

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.huggingface import dcp_to_torch_save, export_to_huggingface, huggingface_index
from shardckpt.local import TensorAwareStateDict
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.manager.replicas.healing import Healing
from shardckpt.manager.states import TrainingStates
from shardckpt.mapping import ShardedBase
from shardckpt.state_dict import nested_values
from tests import backends
from tests.adapters.versions import Second, load, resume_sharded
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tests.ranks import Ranks


class Third(Second):
    """The class of a later release."""

    _version = 3


class First(nn.Linear):
    """The class before it had a version."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__(3, 3)
        with torch.no_grad():
            self.weight.copy_(torch.arange(9.0).view(3, 3).t() * value)


class Hooked(First):
    """Has a version, and a hook that looks at it."""

    _version = 4

    def __init__(self, value: float = 1.0) -> None:
        super().__init__(value)
        self.seen: list[Any] = []
        self.register_load_state_dict_pre_hook(lambda _, state, prefix, metadata, *rest: self.seen.append(metadata))


class Storing(Second):
    """Decides itself what it stores."""

    def get_extra_state(self) -> Any:
        """Return something, so that torch is asked for the state dict."""
        return {"more": 1}

    def set_extra_state(self, state: Any) -> None:
        """Take nothing."""


class Structured(Hooked):
    """Its version is a dict."""

    _version = {"major": 2}  # type: ignore[assignment]  # noqa: RUF012 - torch's is a plain attribute, too


class Root(nn.Sequential):
    """A model that has a version itself."""

    _version = 7


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "the module itself": Second,
    "nested": lambda value: Root(nn.Linear(2, 2), nn.ModuleDict({"a": Second(value), "b": Third(value)})),
    "wrapped": lambda value: checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(Second(value)))),
    "its own state": lambda value: nn.Sequential(Storing(value), Second(value)),
    "shared": lambda value: nn.Sequential(*[Second(value)] * 2),
    "hooks": lambda value: nn.Sequential(Hooked(value)),
    "dicts": lambda value: nn.Sequential(Structured(value), Hooked(value)),
}


@backends.both
@table("kind", list(MODELS))
def test_modules_are_loaded_as_of_their_version(tmp_path: Path, kind: str) -> None:
    """By the adapters and by the manager, in its second save too: what load_state_dict of a state dict gives."""
    model, expected = MODELS[kind](2.0), MODELS[kind](1.0)
    expected.load_state_dict(model.state_dict())

    def check(found: nn.Module) -> None:
        assert repr(found.state_dict()) == repr(model.state_dict())
        for here, there in zip(found.modules(), expected.modules(), strict=True):
            assert getattr(here, "seen", None) == getattr(there, "seen", None)

    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "c")
    load(resumed := MODELS[kind](1.0), tmp_path / "c")
    check(resumed)
    config = CheckpointConfig(folder=str(tmp_path / "m"), interval=1, last_save_model_only=False)
    with CheckpointManager(config, {"model": model}) as manager:
        manager.save(1)
        manager.save(2)
    with CheckpointManager(config, {"model": (resumed := MODELS[kind](1.0))}) as manager:
        assert manager.load()
    check(resumed)


def test_a_model_is_loaded_with_its_optimizer(tmp_path: Path) -> None:
    """The versions stand beside the tensors of the model, and the optimizer has none of it."""
    jobs = [(model := nn.Sequential(Second(value)), torch.optim.AdamW(model.parameters())) for value in (2.0, 1.0)]
    jobs[0][0](torch.ones(1, 3)).sum().backward()
    jobs[0][1].step()
    dist_checkpointing.save(to_sharded_state_dict(*jobs[0]), tmp_path / "c")
    loaded = dist_checkpointing.load(to_sharded_state_dict(*jobs[1]), tmp_path / "c", on_unused="error")
    load_into(loaded, *jobs[1])
    assert repr(jobs[1][0].state_dict()) == repr(jobs[0][0].state_dict())
    assert repr(jobs[1][1].state_dict()) == repr(jobs[0][1].state_dict())


def test_older_state_is_upgraded(tmp_path: Path) -> None:
    """A class of a later version is told the stored one; of a class without a version none is."""
    dist_checkpointing.save(to_sharded_state_dict(nn.Sequential(Second(2.0))), tmp_path / "second")
    load(model := nn.Sequential(Third()), tmp_path / "second", on_unused="error", strict=True)
    assert model[0].seen == [2]
    dist_checkpointing.save(to_sharded_state_dict(nn.Sequential(First(2.0))), tmp_path / "first")
    for strict in (True, "assume_ok_unexpected"):
        load(model := nn.Sequential(Second()), tmp_path / "first", on_unused="error", strict=strict)
        assert model[0].seen == [None]
        assert torch.equal(model[0].weight, Second(2.0).weight)


@table("strict", [True, False, "assume_ok_unexpected"])
def test_a_model_without_versions_misses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: Any) -> None:
    """What is stored of versions is no key that something should have asked for, whatever ``strict`` says."""
    dist_checkpointing.save(to_sharded_state_dict(nn.Sequential(Second(2.0))), tmp_path / "c")
    model = nn.Sequential(First())
    loaded = dist_checkpointing.load(to_sharded_state_dict(model), tmp_path / "c", on_unused="error", strict=strict)
    assert loaded.keys() == {"0.weight", "0.bias"}
    load_into(loaded, model)
    assert torch.equal(model[0].weight, Second(2.0).weight)
    assert not caplog.records


def test_versions_are_no_value_of_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that loads by code of its own, and whose hooks change its state dict, is not offered them as a value."""
    models = Second(2.0), Second(1.0)
    for model in models:
        model.register_state_dict_post_hook(lambda *_: None)
    dist_checkpointing.save(to_sharded_state_dict(models[0]), tmp_path / "c")
    load(models[1], tmp_path / "c")
    assert torch.equal(models[1].weight, models[0].weight)
    assert "has no place" not in caplog.text


def test_torchs_own_modules_have_none(tmp_path: Path) -> None:
    """The checkpoint of a model of torch's classes has no more than it had; BatchNorm keeps its count."""
    model, resumed = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model(torch.ones(2, 3))
    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "c")
    assert to_sharded_state_dict(model).keys() == model.state_dict().keys()
    load(resumed, tmp_path / "c")
    assert resumed.num_batches_tracked == 1


def test_keys_may_be_others(tmp_path: Path) -> None:
    """With a prefix before all keys at the save and at the load, and of a checkpoint that has no versions."""

    def describe(model: nn.Module) -> Any:
        described = to_sharded_state_dict(model)
        for shard in nested_values(described):
            assert isinstance(shard, ShardedBase)
            shard.key = f"job.{shard.key}"
        return described

    for kind, seen in ((Second, 2), (First, None)):
        dist_checkpointing.save(describe(nn.Sequential(kind(2.0))), tmp_path / kind.__name__)
        model = nn.Sequential(Second())
        load_into(dist_checkpointing.load(describe(model), tmp_path / kind.__name__, on_unused="error"), model)
        assert model[0].seen == [seen]
        assert torch.equal(model[0].weight, Second(2.0).weight)


def test_other_readers_read_what_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stock ``dcp.load`` of the model's keys, a conversion to a file, weights, and an export without a word."""
    model = nn.Sequential(Second(2.0))
    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "c", ("torch_dist", 1))
    stock: dict[str, Any] = nn.Sequential(Second()).state_dict()
    dcp.load(stock, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(stock["0.weight"], model[0].weight)
    for convert in (dcp_to_torch_save, torch_dcp_to_torch_save):
        convert(tmp_path / "c", tmp_path / "c.pt")
        assert torch.load(tmp_path / "c.pt")["0.weight"].equal(model[0].weight)
    with dist_checkpointing.open_checkpoint(tmp_path / "c") as checkpoint:
        assert dict(checkpoint.weights()).keys() == {"0.weight", "0.bias"}
    (tmp_path / "config.json").write_text("{}")
    export_to_huggingface(tmp_path / "c", tmp_path / "hf", assets=[tmp_path / "config.json"])
    assert huggingface_index(tmp_path / "hf").keys() == {"0.weight", "0.bias"}
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


class Other(Root):
    """Another class of the first module of a stage."""

    _version = 8


def _stage(number: int) -> nn.Module:
    stage: nn.Module = (Root, Other)[number]()
    stage.add_module(str(number), (Second, Third)[number](2.0 if dist.is_initialized() else 1.0))
    return stage


def _save_stage(path: Path) -> None:
    dist_checkpointing.save(to_sharded_state_dict(_stage(dist.get_rank()), prefix="model."), path)


def _load_stages(path: Path) -> None:
    size = dist.get_world_size()
    parts = [_stage(number) for number in ((0, 1) if size == 1 else (dist.get_rank(),))]
    loaded = dist_checkpointing.load(to_sharded_state_dict(parts, prefix="model."), path, on_unused="error")
    load_into(loaded, parts)
    for part in parts:
        (layer,) = part.children()
        assert layer.seen == [layer._version]


def test_stages_have_their_own_versions(ranks: Ranks, tmp_path: Path) -> None:
    """Modules of one name in two stages, each of another version, are no conflict."""
    ranks.run(2, _save_stage, tmp_path / "c")
    ranks.run(2, _load_stages, tmp_path / "c")
    ranks.run(1, _load_stages, tmp_path / "c")


def test_fsdp2_has_them(ranks: Ranks, tmp_path: Path) -> None:
    """The classes that FSDP2 makes have the versions of those that they are made from, at any number of ranks."""
    for number in (2, 1):
        ranks.run(number, resume_sharded, "fsdp2", tmp_path / "c")


def test_a_replica_gives_them(tmp_path: Path) -> None:
    """Weights that another replica gives are not upgraded either."""
    model, joining = nn.Sequential(Second(2.0)), nn.Sequential(Second())
    given = Healing(TrainingStates({"model": model})).give()
    Healing(TrainingStates({"model": joining})).take(given)
    assert torch.equal(joining[0].weight, model[0].weight)


def test_a_manager_that_leaves_tensors_out_has_them(tmp_path: Path) -> None:
    """A model of which some tensors are not saved last is loaded as of its version by a class of a later one."""
    config = CheckpointConfig(folder=str(tmp_path), interval=1, exclude_from_last_save=("1.bias",))
    with CheckpointManager(config, {"model": nn.Sequential(Second(2.0), nn.Linear(2, 2))}) as manager:
        manager.save(1, last_step=True)
    model = nn.Sequential(Third(), nn.Linear(2, 2))
    with CheckpointManager(config, {"model": model}) as manager:
        assert manager.load()
    assert model[0].seen == [2]


def test_checkpoints_in_memory_have_them() -> None:
    """A part in memory gives the stored versions to a class of a later one, and is given back to one without."""
    part, _ = TensorAwareStateDict.from_state_dict(to_sharded_state_dict(nn.Sequential(Second(2.0))))
    model = nn.Sequential(Third())
    load_into(part.to_state_dict(to_sharded_state_dict(model), strict=True), model)
    assert model[0].seen == [2]
    part.to_state_dict(to_sharded_state_dict(nn.Sequential(First())), strict=True)
