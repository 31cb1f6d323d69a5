"""States that tests export, under any number of ranks, and what reads the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path


def global_tensors() -> dict[str, torch.Tensor]:
    """Tensors of every kind that a safetensors file holds: 0-D, empty, ints, bools, 8-bit floats, packed, strided."""
    numbers = torch.arange(24)
    return {
        "layers.10.w": torch.linspace(-3, 3, 7 * 5).reshape(7, 5),
        "layers.2.w": torch.linspace(0, 1, 6 * 4, dtype=torch.float64).reshape(6, 4),
        "half": torch.linspace(-1, 1, 9).bfloat16(),
        "count": torch.tensor(11),
        "scale": torch.tensor(0.1),
        "empty": torch.zeros(0, 4),
        "mask": numbers % 3 == 0,
        "ids": numbers.to(torch.int32).reshape(4, 6),
        "large_ids": torch.tensor([1, 2**63 + 5], dtype=torch.uint64),
        "eight": (numbers / 7).reshape(6, 4).to(torch.float8_e4m3fn),
        "eight_scale_inv": torch.tensor([[0.123456789]]),
        "packed": numbers.to(torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2),
        "wave": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64),
    }


def local_shards(key: str, tensor: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    """This rank's part: uneven rows, or columns with an odd number of ranks; what is small is a replica on each."""
    axis = (world // 2) % max(tensor.dim(), 1)
    if tensor.dim() == 0 or tensor.shape[axis] < world:
        return [ShardedTensor.from_rank_offsets(key, tensor.clone(), replica_id=rank)]
    starts = [tensor.shape[axis] * r // world for r in range(world + 1)]
    part = tensor.narrow(axis, starts[rank], starts[rank + 1] - starts[rank])
    offset = [0] * tensor.dim()
    offset[axis] = starts[rank]
    return [ShardedTensor(key, part, part.dtype, tuple(part.shape), tuple(tensor.shape), tuple(offset), None)]


def sharded_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A state dict of this rank's shards, whatever the number of ranks."""
    active = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if active else (0, 1)
    return {key: local_shards(key, tensor, rank, world) for key, tensor in tensors.items()}


def save(path: Path, tensors: dict[str, torch.Tensor] | None = None, strategy: Any = None) -> Path:
    """A checkpoint of these tensors, cut among the ranks that call; its path."""
    dc.save({**sharded_state(global_tensors() if tensors is None else tensors), "step": 3}, path, strategy)
    return path


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, by safetensors' own reader, which knows not all dtypes of its format."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if name != "packed":
                    assert name not in found
                    found[name] = file.get_tensor(name)
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are of one dtype and shape, and bit for bit the same."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.contiguous(), other.contiguous()
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
