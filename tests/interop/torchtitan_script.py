"""Trains by torchtitan's own containers in processes of its own: ``torchtitan_script <world> <action> <folder>``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer.dcp import CheckpointManager as Theirs  # type: ignore[import-not-found]
from torchtitan.components.dataloader import ParallelAwareDataloader  # type: ignore[import-not-found]
from torchtitan.components.optimizer import (  # type: ignore[import-not-found]
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from shardckpt.integrations.torchtitan import TitanCheckpointManager
from shardckpt.manager import CheckpointConfig, CheckpointManager, PerRank
from tests.interop.stock import assert_equal

STEPS = 3


class Numbers(torch.utils.data.IterableDataset[Any]):
    """A data set without end, which knows its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        """Yield from the position on."""
        while True:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there."""
        self.position = state_dict["position"]


class Job:
    """A model in two parts, torchtitan's containers and its train state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.parts: list[Any] = [
            nn.Sequential(nn.Linear(6, 5), nn.Tanh()),
            nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(5, 3)),
        ]
        for part in self.parts:
            fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
        groups = [
            ParamGroupConfig(pattern="bias$", optimizer_name="Adam", optimizer_kwargs={"lr": 0.5}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.25, "weight_decay": 0.1}),
        ]
        config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.optimizers = OptimizersContainer(config, model_parts=self.parts)
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda epoch: 0.5**epoch)
        self.loader = ParallelAwareDataloader(Numbers(), rank, world)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the train state, as torchtitan's Trainer does."""
        return {"step": self.step, "ntokens_seen": 10 * self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the train state."""
        self.step = int(state_dict["step"])
        assert int(state_dict["ntokens_seen"]) == 10 * self.step

    def train(self, until: int) -> None:
        """Train, the same on any number of ranks."""
        batches = iter(self.loader)
        while self.step < until:
            self.step += 1
            next(batches)
            torch.manual_seed(self.step)
            inputs = torch.randn(4, 6)
            for part in self.parts:
                inputs = part(inputs)
            inputs.square().sum().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()

    def content(self) -> list[Any]:
        """Return everything as plain values, whole on each rank."""
        found: list[Any] = [
            tensor.full_tensor() for part in self.parts for tensor in get_model_state_dict(part).values()
        ]
        for number, optimizer in enumerate(self.optimizers):
            part = self.parts[number // 2]
            state: Any = get_optimizer_state_dict(part, optimizer)
            for name, slots in sorted(state["state"].items()):
                values = (value for _, value in sorted(slots.items()))
                found += [name, *(v.full_tensor() if hasattr(v, "full_tensor") else v for v in values)]
            found.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
        return [*found, [scheduler.get_last_lr() for scheduler in self.schedulers], self.step]

    def titan(self, folder: str, kind: Any, **options: Any) -> Any:
        """Return a manager of torchtitan's protocol."""
        config = kind.Config(enable=True, interval=1, keep_latest_k=0, last_save_model_only=False, **options)
        return config.build(
            dataloader=self.loader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=folder,
        )

    def ours(self, folder: str, loader: bool) -> CheckpointManager:
        """Return the manager of a loop of one's own."""
        states = {
            "model": self.parts,
            "optimizer": self.optimizers,
            "lr_scheduler": self.schedulers,
            "train_state": self,
            **({"dataloader": PerRank(self.loader)} if loader else {}),
        }
        return CheckpointManager(CheckpointConfig(folder=str(Path(folder, "checkpoint"))), states)


def check(job: Job, resumed_loader: bool) -> None:
    """Compare with a training that was not interrupted, now and a step later."""
    whole = Job(0)
    whole.train(STEPS)
    for until in (STEPS, STEPS + 1):
        job.train(until)
        whole.train(until)
        assert_equal(job.content(), whole.content())
    if resumed_loader:
        assert next(iter(job.loader)) == next(iter(whole.loader))


def write(folder: str, mode: str) -> None:
    """Save by torchtitan's own manager."""
    job = Job(0)
    manager = job.titan(folder, Theirs, async_mode=mode)
    job.train(STEPS)
    assert manager.save(STEPS)
    manager.maybe_wait_for_saving()
    manager.close()


def resume(folder: str) -> None:
    """Load what torchtitan saved by the manager of a loop of one's own."""
    job = Job(1)
    same_world = dist.get_world_size() == 2  # torchtitan's loaders cannot be resharded
    with job.ours(folder, loader=same_world) as manager:
        assert manager.load()
        assert manager.loaded_step == STEPS
    check(job, resumed_loader=same_world)


def take_over(folder: str) -> None:
    """Load what torchtitan saved by TitanCheckpointManager, save a step, and load that."""
    excluded = [] if dist.get_world_size() == 2 else ["dataloader"]
    job = Job(1)
    manager = job.titan(folder, TitanCheckpointManager, exclude_from_loading=excluded)
    assert manager.load(step=-1)
    assert job.step == STEPS
    job.train(STEPS + 1)
    assert manager.save(STEPS + 1)
    manager.close()
    other = Job(2)
    manager = other.titan(folder, TitanCheckpointManager)
    assert manager.load(step=-1)
    manager.close()
    assert other.step == STEPS + 1
    assert_equal(job.content(), other.content())


ACTIONS = {"write": write, "resume": resume, "take_over": take_over}


def run_rank(rank: int, world: int, store: str, action: str, arguments: list[str]) -> None:
    """Do an action on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    ACTIONS[action](*arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        world_size = int(sys.argv[1])
        arguments = (world_size, str(Path(scratch, "store")), sys.argv[2], sys.argv[3:])
        # forks: what they need is imported, and no thread has been started
        mp.start_processes(run_rank, arguments, nprocs=world_size, start_method="fork")
