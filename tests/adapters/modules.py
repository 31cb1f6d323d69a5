"""What the tests of modules share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from tests.adapters.models import made_model, sharded, train

if TYPE_CHECKING:
    from pathlib import Path


BEFORE, AFTER = 3, 3


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    """Weights decay, other parameters do not: two groups of other options."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    weights = [param for name, param in params.items() if name.endswith("weight")]
    others = [param for name, param in params.items() if not name.endswith("weight")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": lr / 2}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9))


OPTIMIZERS: dict[str, Any] = {
    "adamw": adamw,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam tensor lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), amsgrad=True),
}


def parallelize(model: nn.Module, kind: str) -> nn.Module:
    """The model spread over the ranks in some way."""
    world = dist.get_world_size()
    if kind == "fsdp2":
        return sharded(model)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.children():
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def save_by(directory: Path, kind: str, optimizer: str) -> list[float]:
    """Save what a training of some kind has after a step; return its losses."""
    model = parallelize(made_model(1), kind)
    own = OPTIMIZERS[optimizer](model)
    alike = 2 if kind == "tp" else 1
    train(model, own, 0, BEFORE, alike=alike)
    dist_checkpointing.save(to_sharded_state_dict(model, own), directory)
    return train(model, own, BEFORE, AFTER, alike=alike)


def resume(directory: Path, kind: str, optimizer: str) -> list[float]:
    """Other parameters and another learning rate, until it is loaded."""
    model = parallelize(made_model(2), kind)
    own = OPTIMIZERS[optimizer](model)
    for group in own.param_groups:
        group["lr"] = group["lr"] * 3
    loaded = dist_checkpointing.load(to_sharded_state_dict(model, own), directory, strict=True)
    load_into(loaded, model, own)
    return train(model, own, BEFORE, AFTER, alike=2 if kind == "tp" else 1)


def train_alone(optimizer: str) -> list[float]:
    """The losses of one process without any parallelism."""
    model = made_model(1)
    own = OPTIMIZERS[optimizer](model)
    train(model, own, 0, BEFORE)
    return train(model, own, BEFORE, AFTER)


def assert_close(found: list[list[float]], expected: list[float]) -> None:
    """Losses are equal but for the order of sums."""
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-12)
