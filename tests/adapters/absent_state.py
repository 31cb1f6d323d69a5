"""What the tests of absent state share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


WIDTH = 4


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


class Experts(nn.Module):
    """A layer that all see, and two experts of which a batch may reach any."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor, reached: Sequence[int], *, here: bool = True) -> torch.Tensor:
        """Shape (batch, width) in and out; where it is not ``here``, an expert that is reached gets no token."""
        y = torch.tanh(self.shared(x)) * self.frozen
        for number in reached:
            tokens = x if here else x[:0]
            y = y + (self.experts[number](tokens) if here else self.experts[number](tokens).sum())
        return y


@dataclass
class Training:
    """A model with its optimizer, and the losses that it has had."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def made(cls, optimizer: str, seed: int = 1) -> Training:
        """Fresh, of a seed."""
        torch.manual_seed(seed)
        model = Experts()
        return cls(model, OPTIMIZERS[optimizer](model.parameters()))

    def run(self, first: int, steps: int, *reached: int) -> list[float]:
        """Train so many steps, in which these experts are reached."""
        losses = []
        for number in range(first, first + steps):
            self.optimizer.zero_grad()
            batch = torch.sin(torch.arange(3.0 * WIDTH) * (number + 1)).view(3, WIDTH)
            loss = self.model(batch, reached).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def described(self) -> dict[str, Any]:
        """For a save or a load."""
        return to_sharded_state_dict(self.model, self.optimizer)

    def save(self, path: Path) -> None:
        """Save model and optimizer."""
        dist_checkpointing.save(self.described(), path)

    def load(self, path: Path, **options: Any) -> None:
        """Load them."""
        load_into(dist_checkpointing.load(self.described(), path, **options), self.model, self.optimizer)

    @property
    def with_state(self) -> set[str]:
        """The parameters that the optimizer has state of."""
        return {name for name, param in self.model.named_parameters() if self.optimizer.state.get(param)}
