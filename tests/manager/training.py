"""A small training whose every step depends on all that a checkpoint has to bring back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt.manager import CheckpointConfig, CheckpointManager, PerRank

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 24


class Loader:
    """Batches by position; every rank reads its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0

    def batch(self) -> torch.Tensor:
        """The next one."""
        generator = torch.Generator().manual_seed(1000 * self.rank + self.position)
        self.position += 1
        return torch.randn(4, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"rank": self.rank, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        assert state["rank"] == self.rank
        self.position = state["position"]


class Progress:
    """What torchtitan calls the train state: plain values and a tensor."""

    def __init__(self) -> None:
        self.step = 0
        self.seen = torch.zeros((), dtype=torch.int64)
        self.history: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """Its values."""
        return {"step": self.step, "seen": self.seen, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them."""
        self.step, self.seen, self.history = state["step"], state["seen"], state["history"]


class Training:
    """A model with dropout, AdamW, a schedule, a loader, random numbers; and a manager.

    Args:
        folder: Of the checkpoints.
        sharded: Whether FSDP2 shards the model over all ranks.
        states: More states by name.
        config: Of the manager.
    """

    def __init__(
        self, folder: str | Path, *, sharded: bool = True, states: dict[str, Any] | None = None, **config: Any
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 33), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(33, 1)
        )
        if sharded and self.world > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.loader, self.progress = Loader(self.rank), Progress()
        torch.manual_seed(7 + self.rank)  # of the dropout, which every rank has its own of
        self.states: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "dataloader": PerRank(self.loader),
            "train_state": self.progress,
            **(states or {}),
        }
        config = {"interval": 2, "keep_latest_k": 0, **config}
        self.manager = CheckpointManager(CheckpointConfig(folder=str(folder), **config), self.states)

    def step(self) -> float:
        """Train a step; the mean loss of all ranks."""
        loss = self.model(self.loader.batch()).square().mean()
        loss.backward()
        self.manager.maybe_wait_for_staging()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.progress.step += 1
        self.progress.seen += 4
        self.progress.history.append(self.progress.step)
        total = loss.detach().clone()
        if self.world > 1:
            dist.all_reduce(total)
        return total.item() / self.world

    def run(self, until: int) -> list[float]:
        """Train to a step, saving as configured; the losses."""
        losses = []
        while self.progress.step < until:
            losses.append(self.step())
            self.manager.save(self.progress.step)
        return losses
