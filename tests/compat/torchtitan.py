"""What the tests of torchtitan share."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt.compat.torchtitan import (
    TRAIN_STATE,
    CheckpointManager,
    ModelWrapper,
)
from tests.integrations import small, titan

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Checkpoint:
    """The options of the document's job config."""

    enable_checkpoint: bool = True
    folder: str = "checkpoint"
    interval: int = 2
    model_weights_only: bool = False
    export_dtype: str = "float32"
    async_mode: str = "disabled"
    keep_latest_k: int = 0
    exclude_from_loading: list[str] = field(default_factory=list)


class Rotary(torch.nn.Module):
    """A part with a buffer that is computed, as Llama's rotary embedding is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs_cis", torch.arange(4.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs."""
        return inputs


class Job:
    """A training of two parts on each rank, by the document's constructor.

    Args:
        folder: Where the job dumps.
        kind: The class of its manager.
        states: Beside the train state.
        options: Of the checkpoints.
    """

    def __init__(self, folder: Path | str, kind: Any = CheckpointManager, states: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        whole = small.model()
        whole[2].p = 0.0
        self.parts: list[Any] = [titan.part_of(whole, [0, 1]), titan.part_of(whole, [2, 3])]
        self.parts[0].add_module("rotary", Rotary())
        if dist.is_initialized():
            for part in self.parts:
                fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizers = titan.Optimizers(self.parts)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in self.optimizers.optimizers]
        self.loader = titan.Loader()
        self.step = 0
        self.states: dict[str, Any] = {TRAIN_STATE: self, **(states or {})}
        config = SimpleNamespace(
            job=SimpleNamespace(dump_folder=str(folder)), checkpoint=Checkpoint(**options), fault_tolerance=None
        )
        ft_manager = SimpleNamespace(enabled=False)
        self.manager = kind(
            dataloader=self.loader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states=self.states,
            job_config=config,
            ft_manager=ft_manager,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the train state."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.step = int(state_dict["step"])

    def train(self, until: int, last: int = 0) -> None:
        """Train to a step, as torchtitan's loop does; save ``last`` by force."""
        batches = iter(self.loader)
        while self.step < until:
            self.step += 1
            inputs, labels = next(batches)
            for part in self.parts:
                inputs = part(inputs)
            torch.nn.functional.mse_loss(inputs, labels).backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.optimizers.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()
            self.manager.save(curr_step=self.step, force=self.step == last)

    def content(self) -> list[Any]:
        """Return all that is saved."""
        weights = ModelWrapper(self.parts).state_dict()
        return [weights, [each.state_dict() for each in self.schedulers], self.step, self.loader.given]
