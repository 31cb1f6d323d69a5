"""What the tests of versions share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict

if TYPE_CHECKING:
    from pathlib import Path


class Second(nn.Linear):
    """Its first version stored the weight transposed."""

    _version = 2

    def __init__(self, value: float = 1.0) -> None:
        super().__init__(3, 3)
        self.seen: list[Any] = []
        with torch.no_grad():
            self.weight.copy_(torch.arange(9.0).view(3, 3) * value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.seen.append(local_metadata.get("version"))
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t().contiguous()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def load(model: nn.Module, path: Path, **options: Any) -> None:
    """Load a model."""
    load_into(dist_checkpointing.load(to_sharded_state_dict(model), path, **options), model)


def _shard(module: nn.Module, kind: str) -> Any:
    if kind == "fsdp2":
        return fully_shard(module)
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def resume_sharded(kind: str, path: Path) -> None:
    """Save a sharded model, if there are two ranks, and load it into one that is sharded in its layers, too."""
    if dist.get_world_size() == 2:
        dist_checkpointing.save(to_sharded_state_dict(_shard(nn.Sequential(Second(2.0)), kind)), path)
    model = _shard(nn.Sequential(_shard(inner := Second(), kind)), kind)
    load(model, path, on_unused="error")
    assert inner.seen == [2]
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert dist.get_rank() or torch.equal(found["0.weight"], Second(2.0).weight)
