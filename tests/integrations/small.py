"""What the trainers of these tests train."""

from __future__ import annotations

import torch
import torch.distributed as dist

WIDTH = 4


def model() -> torch.nn.Sequential:
    """The same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )


def data(count: int = 24) -> torch.utils.data.TensorDataset:
    """Inputs, and what is to be learnt of them."""
    inputs = torch.linspace(-1, 1, count * WIDTH).reshape(count, WIDTH)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def torchrun() -> dict[str, str]:
    """The environment that torchrun gives a process: this one's place in its group."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}
    return {**{name: str(value) for name, value in ranks.items()}, **place}
