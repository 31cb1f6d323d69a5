"""A small model with its optimizer, which is trained, saved and loaded."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


class Job:
    """A model with its optimizer."""

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        dtype: torch.dtype = torch.float32,
        frozen: Iterable[int] = (),
    ) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
        self.optimizer = make(self.model.parameters())
        self.freeze(*frozen)

    def freeze(self, *layers: int) -> None:
        """Let only the other layers learn."""
        for number, layer in enumerate(self.model):
            layer.requires_grad_(number not in layers)

    def train(self, *batches: int) -> None:
        """Take a step for each batch."""
        for number in batches:
            batch = torch.sin(torch.arange(8.0) * (number + 1)).view(2, 4).to(self.model[0].weight.dtype)

            def loss(batch: torch.Tensor = batch) -> torch.Tensor:
                self.optimizer.zero_grad()
                value: torch.Tensor = self.model(batch).square().sum()
                value.backward()
                return value

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(loss)
                continue
            loss()
            # some classes must be told that they train
            self.optimizer.is_training = True  # type: ignore[attr-defined]
            self.optimizer.step()

    def save(self, path: Path) -> None:
        """Save both."""
        dist_checkpointing.save(to_sharded_state_dict(self.model, self.optimizer), path)

    def load(self, path: Path) -> None:
        """Load both."""
        loaded = dist_checkpointing.load(to_sharded_state_dict(self.model, self.optimizer), path)
        load_into(loaded, self.model, self.optimizer)

    def values(self) -> list[Any]:
        """The weights, and what the optimizer's state dict has."""
        return copy.deepcopy([*(param.detach() for param in self.model.parameters()), self.optimizer.state_dict()])
