"""A model with parameters of every kind that optimizers treat differently, trained bit for bit alike by any ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.adapters.models import WIDTH, sharded, train

EXPERTS = 6  # 4 ranks have 2, 2, 2 and none


class Block(nn.Module):
    """Experts (3-D), a gain (1-D), a frozen parameter, one without a gradient, and with ``flat`` a weight (2-D)."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.up = nn.Linear(WIDTH, 10) if flat else None
        self.down = nn.Linear(10, WIDTH) if flat else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width) in and out."""
        if self.up is not None and self.down is not None:
            x = x + self.down(torch.tanh(self.up(x)))
        return x + self.frozen * self.gain * torch.tanh(torch.einsum("bi,eij->bj", x, self.experts))


def made_model(name: str, seed: int) -> nn.Sequential:
    """Fresh blocks; torch's Adafactor takes no step with a 2-D weight that FSDP2 shards (nor does it need one here)."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(flat=name != "adafactor") for _ in range(2))).double()


def _groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Two groups with other options; frozen parameters are in none."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    gains = [param for name, param in params.items() if name.endswith("gain")]
    others = [param for name, param in params.items() if not name.endswith("gain")]
    return [{"params": others}, {"params": gains, "lr": lr / 4}]


def _sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(_groups(model, lr), lr=lr, momentum=0.9)


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(model, lr), lr=lr)


def _adafactor(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(_groups(model, lr), lr=lr)


OPTIMIZERS: dict[str, Any] = {"adamw": _adamw, "sgd": _sgd, "adafactor": _adafactor}


def started(name: str, seed: int, lr: float = 0.02) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 over all ranks, and its optimizer."""
    model = sharded(made_model(name, seed))
    return model, OPTIMIZERS[name](model, lr)


def train_alike(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
    """The losses when all ranks take the whole batch: each has the same gradients, of which FSDP2 takes the mean."""
    return train(model, optimizer, first, steps, alike=dist.get_world_size())


def whole(value: Any) -> Any:
    """A DTensor gathered; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, gathered."""
    return {name: whole(param.detach()) for name, param in model.named_parameters()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of an optimizer, gathered, by ``<parameter>.<slot>``."""
    named = ((name, optimizer.state.get(param, {})) for name, param in model.named_parameters())
    return {f"{name}.{slot}": whole(value).clone() for name, slots in named for slot, value in slots.items()}
