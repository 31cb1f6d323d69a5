"""A training as DCP scripts and torchtitan's manager save it, and every way to resume it here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.manager import CheckpointConfig, CheckpointManager, PerRank
from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import nested_items
from shardckpt_torch_dist import CheckpointStorageReader

if TYPE_CHECKING:
    from pathlib import Path

STEP = 7


class Kept:
    """A state that gives another one than it is given, which it keeps."""

    def __init__(self, **state: Any) -> None:
        self._state = state
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state before."""
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what is given."""
        self.loaded = state_dict


class Loader:
    """A data loader whose state has the positions of all ranks, as torchtitan's has."""

    def __init__(self) -> None:
        self.positions: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each rank."""
        return {f"dp_rank_{dist.get_rank()}": b"%d" % dist.get_rank(), "world_size": dist.get_world_size()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what is given."""
        self.positions = state_dict


class TrainState:
    """Progress as tensors, as torchtitan stores it."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens = [0, 0]

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, one of them in a list."""
        return {"step": torch.tensor(self.step), "log": [torch.tensor(tokens) for tokens in self.tokens], "name": "run"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the values."""
        assert state_dict["name"] == "run"
        self.step, self.tokens = int(state_dict["step"]), [int(tokens) for tokens in state_dict["log"]]


class Training:
    """A sharded model with two parameter groups, its optimizer and schedule."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        decayed = [param for param in self.model.parameters() if param.ndim == 2]
        others = [param for param in self.model.parameters() if param.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.5, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.25)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = TrainState()
        self.loader = Loader()

    def train(self, steps: int) -> None:
        """Make some steps, the same on any number of ranks."""
        for step in range(steps):
            torch.manual_seed(step)
            self.model(torch.randn(4, 6)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        self.state.step, self.state.tokens = STEP, [3, 4]

    def content(self) -> list[Any]:
        """Return everything as plain values, whole on each rank."""
        found: list[Any] = [tensor.full_tensor() for tensor in get_model_state_dict(self.model).values()]
        optimizer: Any = get_optimizer_state_dict(self.model, self.optimizer)
        for name, state in sorted(optimizer["state"].items()):
            found += [name, *(v.full_tensor() if hasattr(v, "full_tensor") else v for _, v in sorted(state.items()))]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return [*found, groups, self.schedule.state_dict()]

    def state_dict(self, form: str) -> dict[str, Any]:
        """Return everything in a form that others save: ``nested``, ``flattened`` or ``torchtitan``."""
        options = StateDictOptions(flatten_optimizer_state_dict=form != "nested")
        model = get_model_state_dict(self.model)
        others = {
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
            "lr_scheduler": self.schedule.state_dict(),
            "dataloader": self.loader.state_dict(),
            "train_state": self.state.state_dict(),
        }
        # torchtitan's manager puts the model's tensors at the top level
        return {**model, **others} if form == "torchtitan" else {"model": model, **others}

    def names(self, form: str) -> list[str]:
        """Return the names that model and optimizer have at the top level of a form."""
        return [*(get_model_state_dict(self.model) if form == "torchtitan" else ["model"]), "optimizer"]

    def restore(self, state: dict[str, Any], form: str) -> None:
        """Take what was loaded into :meth:`state_dict` in place, as torch's functions do."""
        options = StateDictOptions(flatten_optimizer_state_dict=form != "nested")
        set_model_state_dict(
            self.model,
            {name: state[name] for name in self.names(form)[:-1]} if form == "torchtitan" else state["model"],
        )
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)
        if "lr_scheduler" in state:
            self.schedule.load_state_dict(state["lr_scheduler"])
            self.state.load_state_dict(state["train_state"])

    def manager(self, folder: Path) -> CheckpointManager:
        """Return a manager of all of it."""
        states = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "train_state": self.state,
            "dataloader": PerRank(self.loader),
        }
        return CheckpointManager(CheckpointConfig(folder=str(folder), last_save_model_only=False), states)


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """Compare two results of :meth:`Training.content`."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def trained() -> list[Any]:
    """Return the content after the training that wrote the checkpoint; every number of ranks computes the same."""
    training = Training(0)
    training.train(3)
    return training.content()


def write_stock(form: str, folder: Path) -> None:
    """Save as a DCP script or torchtitan's manager does."""
    training = Training(0)
    training.train(3)
    dcp.save(training.state_dict(form), checkpoint_id=folder / f"step-{STEP}")


def resume_by_manager(folder: Path, written_by: int) -> None:
    """Load all of it into another training by a manager."""
    training = Training(1)
    with training.manager(folder) as manager:
        assert manager.load()
        assert manager.loaded_step == STEP
    assert_equal(training.content(), trained())
    assert (training.state.step, training.state.tokens) == (STEP, [3, 4])
    everyone = {f"dp_rank_{rank}": b"%d" % rank for rank in range(written_by)}
    assert training.loader.positions == {**everyone, "world_size": written_by}


def resume_by_adapters(checkpoint: Path) -> None:
    """Load model and optimizer as the README does, the progress as a dict of tensors, and the schedule as an object."""
    training = Training(1)
    wanted = to_sharded_state_dict(training.model, training.optimizer)
    wanted |= to_sharded_state_dict({"train_state": training.state.state_dict()})
    loaded = dist_checkpointing.load(wanted, checkpoint)
    load_into({name: loaded[name] for name in ("model", "optimizer")}, training.model, training.optimizer)
    training.schedule.load_state_dict(loaded["lr_scheduler"])
    training.state.load_state_dict(loaded["train_state"])
    assert_equal(training.content(), trained())
    assert (training.state.step, training.state.tokens) == (STEP, [3, 4])


def resume_by_stock_load(checkpoint: Path, form: str, our_reader: bool, whole: bool = True) -> None:
    """Load by ``dcp.load``: model and optimizer, and of a whole checkpoint the schedule and the progress as well."""
    training = Training(1)
    state = training.state_dict(form)
    names = [*training.names(form), *(["lr_scheduler", "train_state"] if whole else [])]
    state = {name: state[name] for name in names}
    reader = CheckpointStorageReader(checkpoint) if our_reader else None
    dcp.load(state, checkpoint_id=None if our_reader else checkpoint, storage_reader=reader)
    training.restore(state, form)
    if whole:
        assert_equal(training.content(), trained())
        assert (training.state.step, training.state.tokens) == (STEP, [3, 4])
    else:
        assert_equal(training.content()[:-1], trained()[:-1])


def load_rows(checkpoint: Path, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Load every stored tensor by its rows, described one by one, and compare it; return the common state."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = {}
    for key, stored in dist_checkpointing.load_tensors_metadata(checkpoint).items():
        shape = stored.global_shape
        low, high = (shape[0] * n // world for n in (rank, rank + 1)) if shape else (0, 0)
        data = torch.empty((high - low, *shape[1:]) if shape else (), dtype=stored.dtype)
        offset = (low, *(0 for _ in shape[1:])) if shape else ()
        replica = 0 if shape else rank
        wanted[key] = ShardedTensor(key, data, data.dtype, tuple(data.shape), shape, offset, None, replica)
    assert wanted.keys() == expected.keys()
    loaded = dist_checkpointing.load(dict(wanted), checkpoint)
    for key, shard in wanted.items():
        full = expected[key]
        rows = full[shard.global_offset[0] :][: shard.local_shape[0]] if full.dim() else full
        assert torch.equal(loaded.pop(key), rows), key
    return loaded


def resume_by_descriptions(checkpoint: Path, form: str) -> None:
    """Load everything by ``dist_checkpointing.load``: tensors by their keys, all else as the common state."""
    training = Training(0)
    training.train(3)
    state = training.state_dict(form)
    items = [(path, leaf) for path, leaf in nested_items(state) if isinstance(leaf, torch.Tensor)]
    tensors = {".".join(map(str, path)): getattr(leaf, "full_tensor", lambda leaf=leaf: leaf)() for path, leaf in items}
    common = load_rows(checkpoint, tensors)
    options = {key: value for key, value in state["optimizer"].items() if key.startswith("param_groups")}
    assert common["optimizer"] == options
    assert common["lr_scheduler"] == training.schedule.state_dict()
    assert common["train_state"] == {"name": "run"}
