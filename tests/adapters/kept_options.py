"""A resume under FSDP with an option that keeps its live value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict

if TYPE_CHECKING:
    from pathlib import Path


def _train(lr: float, *, flat: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 4)
    if flat:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=lr)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def resume_sharded(path: Path, *, flat: bool = False) -> list[float]:
    """Save with options of 0.5, load into a job with 0.25 that keeps ``lr``; the options.

    Args:
        path: The checkpoint.
        flat: Whether FSDP1 shards the model, whose state torch hands over; else FSDP2.
    """
    dist_checkpointing.save(to_sharded_state_dict(*_train(0.5, flat=flat)), path)
    model, optimizer = _train(0.25, flat=flat)
    loaded = dist_checkpointing.load(to_sharded_state_dict(model, optimizer), path)
    load_into(loaded, model, optimizer, keep_options=("lr",))
    return [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]]
