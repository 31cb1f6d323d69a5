"""A small model, trained alike by any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 6
BATCH = 12


class Layer(nn.Module):
    """A linear layer with a buffer and a parameter without a gradient; 4 ranks cut its rows unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width) in and out."""
        return x + self.scale * self.down(torch.tanh(self.up(x))) + self.mean


class Stage(nn.Module):
    """Some of a model's layers, under their numbers in the whole."""

    def __init__(self, model: nn.Module, layers: list[int]) -> None:
        super().__init__()
        for number, layer in enumerate(model.children()):
            if number in layers:
                self.add_module(str(number), layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers in order."""
        for layer in self.children():
            x = layer(x)
        return x


def made_model(seed: int, layers: int = 2) -> nn.Sequential:
    """Fresh layers."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(layers))).double()


def sharded(model: nn.Module) -> nn.Module:
    """The model under FSDP2, over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int, *, alike: int = 1, alone: bool = False
) -> list[float]:
    """The global loss at each step; the global batches are the same for any number of ranks, or for one alone.

    ``alike`` ranks that follow each other (tensor parallel) take the same part.
    """
    together = dist.is_initialized() and not alone
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    losses = []
    for number in range(first, first + steps):
        batch = torch.sin(torch.arange(BATCH * WIDTH, dtype=torch.float64) * (number + 1)).view(BATCH, WIDTH)
        loss = model(batch.chunk(world // alike)[rank // alike]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if together:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def wholes(nest: Any) -> dict[str, torch.Tensor]:
    """The tensors of a state dict, gathered."""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t.detach() for name, t in nest.items()}
