"""What the tests of accelerate share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.integrations import small


class Job:
    """A training with Accelerate, of this process or of its group's ranks.

    Args:
        sharded: FSDP2, applied before the model is prepared; else what Accelerate makes of it (DDP).
    """

    def __init__(self, *, sharded: bool = False) -> None:
        self.accelerator = Accelerator(cpu=True)
        model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(small.WIDTH, 3), torch.nn.Linear(3, 1))
        with torch.random.fork_rng():
            torch.manual_seed(3)
            for param in model.parameters():
                torch.nn.init.normal_(param)
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model = self.accelerator.prepare_model(model, evaluation_mode=sharded)
        self.optimizer, self.scheduler = self.accelerator.prepare(optimizer, scheduler)

    def train(self, steps: int) -> None:
        """Make so many steps, every rank with the same data."""
        for inputs, labels in torch.utils.data.DataLoader(torch.utils.data.Subset(small.data(), range(steps))):
            self.accelerator.backward(torch.nn.functional.mse_loss(self.model(inputs), labels))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """All of model and optimizer, whole."""
        whole = StateDictOptions(full_state_dict=True)
        found: Any = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=whole)
        moments = {f"{name}.{slot}": value for name, slots in found["state"].items() for slot, value in slots.items()}
        rates = {"lr": torch.tensor([group["lr"] for group in found["param_groups"]])}
        return {**get_model_state_dict(self.model, options=whole), **moments, **rates}
