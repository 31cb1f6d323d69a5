"""A module's tensors are listed as torch's own state-dict functions list them, whatever was done to the module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardckpt import dist_checkpointing
from shardckpt.adapters import SavedModules, to_sharded_state_dict
from shardckpt.adapters.module_tree import list_state_tensors, name_parameters
from shardckpt.adapters.optimizers import get_optimizer_state
from tests.adapters.models import Layer, made_model
from tests.adapters.module_tree import check
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


class _Extra(nn.Linear):
    """Has more in its state dict than tensors."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class _Saving(nn.Linear):
    """Decides itself what its state dict has."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach() / 2


class _Renamed(nn.Sequential):
    """Has its child under another name, by torch's own protocol and a hook."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self._register_state_dict_hook(self._rename)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"inner.weight": "0.weight"}

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}0.weight"] = state.pop(f"{prefix}0.weight")


def _drop_bias(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and name.endswith("bias")]:
        del state[name]


def _hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_state_dict_post_hook(_drop_bias)
    return module


def _prepared() -> nn.Module:
    """A hook before the state dict changes what is in it."""
    module = nn.Sequential(nn.Linear(2, 2))
    made = torch.ones(1)
    module[0].register_state_dict_pre_hook(lambda module, *_: module.register_buffer("made", made))
    return module


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


def _overridden() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].state_dict = lambda *_, destination, prefix, **__: destination.update({f"{prefix}bias": torch.ones(1)})  # type: ignore[assignment,method-assign]
    return module


def _buffered() -> nn.Module:
    module = nn.Sequential(nn.BatchNorm1d(2), Layer())
    module.register_buffer("lost", torch.ones(1), persistent=False)
    module.register_buffer("none", None)
    module.register_parameter("absent", None)
    return module


USUAL: dict[str, Callable[[], nn.Module]] = {
    "nested": made_model,  # type: ignore[dict-item]
    "tied": _tied,
    "shared module": lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2),
    "buffers": _buffered,
    "one level": lambda: nn.Linear(2, 2),
    "checkpoint wrapper": lambda: nn.Sequential(checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(Layer())))),
}

USUAL["nested"] = lambda: nn.Sequential(made_model(1), nn.ModuleDict({"head": made_model(2)}), None)  # type: ignore[arg-type]

UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "extra state": lambda: nn.Sequential(_Extra(2, 2)),
    "own state": lambda: nn.Sequential(_Saving(2, 2)),
    "names": _Renamed,
    "hook after": _hooked,
    "hook before": _prepared,
    "method of one module": _overridden,
    "TorchScript": lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@table("kind", [*USUAL, *UNUSUAL])
def test_lists_what_torch_lists(kind: str) -> None:
    """Any module's tensors are those of get_model_state_dict; the walk lists those of usual modules, and no others."""
    module = (USUAL | UNUSUAL)[kind]()
    assert (list_state_tensors(module) is None) == (kind in UNUSUAL)
    named = name_parameters(module)
    if named is None:
        assert kind in ("names", "TorchScript")  # else what hooks and classes add to a state dict is no parameter
    else:
        found = {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in module.named_parameters()}
        assert named == {id(each): name for name, each in found.items()}
    check(module, is_usual=kind in USUAL)


@pytest.mark.parametrize("kept", [False, True])
def test_changes_between_saves(tmp_path: Path, kept: bool) -> None:
    """A module that is changed in any way between two saves is saved as it is then, under torch's names."""
    model = made_model(1)
    saved = SavedModules()
    describe = saved.describe if kept else to_sharded_state_dict
    optimizer = torch.optim.AdamW(model.parameters())

    def add() -> None:
        model[0].extra = nn.Parameter(torch.full((3,), 7.0))
        optimizer.add_param_group({"params": [model[0].extra], "lr": 0.5})

    def tie() -> None:
        del optimizer.state[model[1].up.weight]
        model[1].up.weight = model[0].up.weight
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p is not model[0].extra]

    def halve() -> None:
        model[0].down.bias.grad = None
        model[0].down.bias.data = torch.randn(6)
        del optimizer.state[model[0].down.bias]

    changes: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "freeze": lambda: model[0].up.weight.requires_grad_(False),
        "other memory": lambda: setattr(model[0].up.weight, "data", torch.randn(10, 6).double()),
        "other dtype": halve,
        "add": add,
        "tie": tie,
        "wrap": lambda: model.register_module("1", checkpoint_wrapper(model[1])),
        "rename": lambda: model.register_module("last", model._modules.pop("1")),
        "buffer": lambda: model.register_buffer("count", torch.tensor(3)),
        "not persistent": lambda: model._non_persistent_buffers_set.add("count"),
        "hook": lambda: model.register_state_dict_post_hook(_drop_bias),
    }
    for number, (name, change) in enumerate(changes.items()):
        change()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        expected = {key: value.clone() for key, value in get_model_state_dict(model).items()}
        stored = get_optimizer_state_dict(model, optimizer)
        found = get_optimizer_state([model], [optimizer])
        assert found.states.keys() == stored["state"].keys(), name
        assert found.groups == stored["param_groups"], name
        path = tmp_path / str(number)
        dist_checkpointing.save(describe(model, optimizer), path)
        saved.release()
        with dist_checkpointing.open_checkpoint(path) as checkpoint:
            stored_names = {key.removeprefix("model.") for key in checkpoint if key.startswith("model.")}
            assert stored_names == expected.keys(), name
            for key, value in expected.items():
                assert checkpoint[f"model.{key}"][...].equal(value), (name, key)
            for key, state in stored["state"].items():
                assert checkpoint[f"optimizer.state.{key}.exp_avg"][...].equal(state["exp_avg"]), (name, key)


@table("kind", ["adamw", "momentum", "sgd", "fresh", "tensor lr"])
def test_optimizer_state_is_torchs(kind: str) -> None:
    """Optimizer state has the names, values and groups that get_optimizer_state_dict gives, and makes none."""
    model = made_model(1)
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "weight_decay": 0.1}]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups)
    if kind in ("momentum", "sgd"):
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9 if kind == "momentum" else 0)
    if kind == "tensor lr":
        optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.1), amsgrad=True)
    if kind != "fresh":
        model(torch.ones(2, 6).double()).sum().backward()
        optimizer.step()
    found = get_optimizer_state([model], [optimizer])
    assert (not optimizer.state) == (kind in ("fresh", "sgd") and not any(optimizer.state.values()))
    if kind == "fresh":
        assert not found.states
        return
    expected = get_optimizer_state_dict(model, optimizer)
    assert found.groups == expected["param_groups"]
    assert found.states.keys() == {name for name, values in expected["state"].items() if values}
    for name, values in found.states.items():
        for slot, value in values.items():
            assert value is expected["state"][name][slot] or value.equal(expected["state"][name][slot])


def _reshard() -> None:
    model = made_model(1)
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    model(torch.ones(2, 6).double())
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    found = list_state_tensors(model)
    assert found is not None
    assert all(isinstance(value, DTensor) for name, value in found.items() if "mean" not in name)
    check(model)


def test_fsdp2_parameters_are_resharded(ranks: Ranks) -> None:
    """What FSDP2 has gathered for a forward pass is saved sharded, as by torch's own function."""
    ranks.run(2, _reshard)


def _load_both(directory: Path) -> None:
    model = fully_shard(made_model(1))
    dist_checkpointing.save(to_sharded_state_dict(model), directory)
    loaded = dist_checkpointing.load(to_sharded_state_dict(model), directory)
    assert not any(value.requires_grad for value in loaded.values())
    given = dict(model.named_parameters())
    kept = dist_checkpointing.load(to_sharded_state_dict(given), directory)
    assert all(kept[name] is parameter for name, parameter in given.items())


def test_loaded_parameters_are_detached(ranks: Ranks, tmp_path: Path) -> None:
    """A load returns a module's DTensors detached, as in torch's state dicts, and the caller's own as they are."""
    ranks.run(2, _load_both, tmp_path / "ckpt")


def _wrapped_by_ddp() -> None:
    model = DistributedDataParallel(made_model(1))
    assert list_state_tensors(model) is not None
    check(model)
    shards = to_sharded_state_dict(model)
    assert shards.keys() == made_model(1).state_dict().keys()
    assert {shard.replica_id for shard in shards.values()} == {dist.get_rank()}


def test_lists_ddp(ranks: Ranks) -> None:
    """The name that DDP adds is left out."""
    ranks.run(2, _wrapped_by_ddp)
