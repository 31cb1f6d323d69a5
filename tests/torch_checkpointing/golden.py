"""The golden checkpoints of torch_checkpointing, and a training that they fit; see ``tests/golden/README.md``."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.manager import CheckpointConfig, CheckpointManager, PerRank
from tests.interop.stock import Kept, load_rows

GOLDEN = Path(__file__).parents[1] / "golden" / "torch-checkpointing-0.1.1"
#: The trainings, each with the number of its ranks.
TRAININGS = {"torch-1": 1, "torch-2": 2, "safetensors-2": 2, "unlisted-2": 2, "mesh-4": 4, "stages-4": 4}
STEP = 7
SHAPES = {"0.weight": (8, 6), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)}


def values(name: str) -> torch.Tensor:
    """Return the stored values of a parameter."""
    size = torch.Size(SHAPES[name])
    return torch.arange(size.numel(), dtype=torch.float32).view(size) + 100 * list(SHAPES).index(name)


def copy_golden(name: str, target: Path) -> Path:
    """Copy a golden checkpoint, to damage it."""
    shutil.copytree(GOLDEN / name, target)
    return target


class Training:
    """A sharded model with two parameter groups, its optimizer and schedule, as they are before the training."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        decayed = [param for param in self.model.parameters() if param.ndim == 2]
        others = [param for param in self.model.parameters() if param.ndim == 1]
        self.optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1])
        self.state = Kept(step=torch.tensor(0), log=[torch.tensor(0), torch.tensor(0)], name="")
        self.loader = Kept()

    def manager(self, folder: Path, **more: Any) -> CheckpointManager:
        """Return a manager of all of it, and of ``more``."""
        states = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "train_state": self.state,
            **more,
        }
        return CheckpointManager(CheckpointConfig(folder=str(folder)), states)

    def check(self) -> None:
        """Check that model, optimizer and schedule are the golden ones."""
        for name, tensor in get_model_state_dict(self.model).items():
            assert torch.equal(tensor.full_tensor(), values(name)), name  # type: ignore[union-attr]
        states: Any = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        for name, state in states.items():
            assert state["step"] == 3
            assert torch.equal(state["exp_avg"].full_tensor(), -values(name)), name
            assert torch.equal(state["exp_avg_sq"].full_tensor(), 2 * values(name)), name
        groups = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        assert groups == [(0.25 * 0.1, 0.5), (0.125 * 0.1, 0.0)]
        schedule = self.schedule.state_dict()
        assert (schedule["last_epoch"], schedule["base_lrs"]) == (3, [0.25, 0.125])
        assert schedule["milestones"] == Counter([2, 5])

    def check_progress(self) -> None:
        """Check the training's progress."""
        assert self.state.loaded == {"step": 7, "log": [3, 4], "name": "run"}


def resume_by_manager(folder: Path, written_by: int) -> None:
    """Load all of it by a manager; the loaders, too, if as many ranks load as have saved."""
    training = Training()
    more = {"loader": PerRank(training.loader)} if written_by == dist.get_world_size() > 1 else {}
    with training.manager(folder, **more) as manager:
        assert manager.load()
        assert manager.loaded_step == STEP
    training.check()
    training.check_progress()
    if more:
        rank = dist.get_rank()
        assert training.loader.loaded["position"] == 10 + rank
        assert training.loader.loaded["rng"].tolist() == [rank, rank]


def resume_by_adapters(checkpoint: Path) -> None:
    """Load model and optimizer as the README does, and the schedule with the common state."""
    training = Training()
    loaded = dist_checkpointing.load(to_sharded_state_dict(training.model, training.optimizer), checkpoint)
    load_into(loaded, training.model, training.optimizer)
    training.schedule.load_state_dict(loaded["lr_scheduler"])
    training.check()
    assert (loaded["step"], loaded["note"]) == (STEP, b"a note")


def resume_by_descriptions(checkpoint: Path) -> None:
    """Load every tensor by its rows, and all else as the common state."""
    found = {f"model.{name}": values(name) for name in SHAPES}
    for name in SHAPES:
        moments = {"exp_avg": -values(name), "exp_avg_sq": 2 * values(name), "step": torch.tensor(3.0)}
        found |= {f"optimizer.state.{name}.{slot}": value for slot, value in moments.items()}
    progress = {"step": torch.tensor(7), "log.0": torch.tensor(3), "log.1": torch.tensor(4)}
    common = load_rows(checkpoint, {**found, **{f"train_state.{key}": value for key, value in progress.items()}})
    assert (common["step"], common["train_state"], common["note"]) == (STEP, {"name": "run"}, b"a note")
    assert common["lr_scheduler"]["last_epoch"] == 3
    groups = common["optimizer"]
    nested = [group["lr"] for group in groups.get("param_groups", [])]
    flattened = [groups[key] for name in ("0.weight", "0.bias") if (key := f"param_groups.{name}.lr") in groups]
    assert nested or flattened
    assert [rates for rates in (nested, flattened) if rates] == [[0.025, 0.0125]]
