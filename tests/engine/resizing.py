"""A model whose vocabulary grows between a save and a load, on any number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import load_into, to_sharded_state_dict

RESIZED = ["*embed_tokens.weight*", "*lm_head.weight*"]


class Trained(NamedTuple):
    """Whole tensors of a training: the weights, and the first moments."""

    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


def make(rows: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with an embedding of so many rows, sharded if there are ranks, and its optimizer."""
    torch.manual_seed(rows)
    model = torch.nn.Sequential()
    model.add_module("embed_tokens", torch.nn.Embedding(rows, 4))
    model.add_module("norm", torch.nn.Linear(4, 4))
    model.add_module("lm_head", torch.nn.Linear(4, rows, bias=False))
    if dist.is_initialized() and dist.get_world_size() > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def gather(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    """Collective: return copies of what a training has."""
    named = dict(model.named_parameters())
    return Trained(
        {name: _whole(param.detach()) for name, param in named.items()},
        {name: _whole(optimizer.state[param]["exp_avg"]) for name, param in named.items()},
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def save(path: str, rows: int) -> Trained:
    """Save a training, and return what it has."""
    made = make(rows)
    dc.save(to_sharded_state_dict(*made), path)
    return gather(*made)


def load(path: str, rows: int) -> tuple[Trained, Trained]:
    """Load into a training with another number of rows; return what it had before and what it has then."""
    made = make(rows)
    before = gather(*made)
    load_into(dc.load(to_sharded_state_dict(*made), path, resize=RESIZED), *made)
    return before, gather(*made)


def check(saved: Trained, before: Trained, after: Trained) -> None:
    """Check that rows are copied, that new rows are as they were, and that their moments are zero."""
    for name, weight in after.weights.items():
        rows = min(len(weight), len(saved.weights[name]))
        assert torch.equal(weight[:rows], saved.weights[name][:rows])
        assert torch.equal(weight[rows:], before.weights[name][rows:])
        assert torch.equal(after.moments[name][:rows], saved.moments[name][:rows])
        assert not after.moments[name][rows:].any()
