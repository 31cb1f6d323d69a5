"""State dicts as plain PyTorch jobs have them, for DCP's own functions with our storage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.interop.sample import check_equal

BLANK = 0


def numbers(*shape: int, first: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that follow each other."""
    return (torch.arange(torch.Size(shape).numel()) + first).reshape(shape).to(dtype)


def tensors(version: int) -> dict[str, torch.Tensor]:
    """The whole tensors of a state by their keys; ones that all differ from save to save."""
    return {
        "model.rows": numbers(7, 3, first=version),
        "model.columns": numbers(4, 6, first=3 * version, dtype=torch.bfloat16),
        "model.copies": numbers(5, first=9 * version),
        "model.large": numbers(1 << 18, 3, first=version),
        "model.bias": numbers(5, first=9 + version),
        "model.scale": torch.tensor(2.5 + version),
        "model.empty": torch.empty(0, 3),
        "optimizer.moments.0": numbers(2, 2, first=1 + version),
        "optimizer.moments.1": numbers(3, first=2 + version, dtype=torch.int64),
        "flags": numbers(4, first=version).remainder(2).to(torch.bool),
        "mixed.1": numbers(2, first=4 + version),
    }


def state(version: int) -> dict[str, Any]:
    """DTensors where there is a group, tensors, lists and plain values; version 0 is a destination."""
    full = tensors(version)
    full = {key: torch.zeros_like(tensor) for key, tensor in full.items()} if version == BLANK else full
    return {
        "model": {
            "rows": _sharded(full["model.rows"], Shard(0)),
            "columns": _sharded(full["model.columns"], Shard(1)),
            "copies": _sharded(full["model.copies"], Replicate()),
            "large": _sharded(full["model.large"], Shard(0)),
            "bias": full["model.bias"],
            "scale": full["model.scale"],
            "empty": full["model.empty"],
        },
        "optimizer": {
            "moments": [full["optimizer.moments.0"], full["optimizer.moments.1"]],
            "lr": 0.5 * version,
            "betas": (0.9, 0.9 + version),
            "groups": [{"decay": 0.5 * version}, {"names": ["a"] * version}],
        },
        "flags": full["flags"],
        "mixed": [0.25 * version, full["mixed.1"], "end" * version],
        "nothing": None,
        "epoch": version,
        "name": "run" * version,
    }


def values(version: int) -> dict[str, Any]:
    """What is no tensor in a state."""
    return {
        "optimizer": {key: value for key, value in state(version)["optimizer"].items() if key != "moments"},
        "mixed": [0.25 * version, "end" * version],
        "nothing": None,
        "epoch": version,
        "name": "run" * version,
    }


def check(found: dict[str, Any], version: int) -> None:
    """Whether a state is, bit for bit, the one of that save, on this rank."""
    check_equal(_local(found), _local(state(version)), f"state {version}")


def load(path: str, version: int, reader: Any = None, planner: Any = None) -> None:
    """``dcp.load`` into a blank state, by DCP's own reader or another, and a look at every value."""
    blank = state(BLANK)
    where = {"checkpoint_id": path} if reader is None else {"storage_reader": reader(path)}
    dcp.load(blank, planner=planner, **where)
    check(blank, version)


def _sharded(full: torch.Tensor, placement: Any) -> torch.Tensor:
    if not dist.is_initialized():
        return full
    return distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [placement], src_data_rank=None)


def _local(nested: Any) -> Any:
    if isinstance(nested, dict):
        return {key: _local(value) for key, value in nested.items()}
    if isinstance(nested, list):
        return [_local(value) for value in nested]
    return nested.to_local() if hasattr(nested, "to_local") else nested


__all__ = ["BLANK", "check", "load", "numbers", "state", "tensors", "values"]
