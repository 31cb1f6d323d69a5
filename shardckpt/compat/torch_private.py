"""The private names of torch that other systems' names need, each with the reason; no other module here imports any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import shardckpt.tensors.torch_private  # noqa: F401 - the modules that DCP imports then keep no process group

# isort: split
import torch
from torch.distributed._shard.metadata import ShardMetadata

# The class that FSDP1 puts into state dicts, and the classes that describe its shards: none has a public name.
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardckpt.planning.boxes import Ints


def make_sharded_tensor(
    shards: list[tuple[torch.Tensor, Ints]], others: list[tuple[Ints, Ints]], shape: Ints, rank: int, other_rank: int
) -> Any:
    """Return a ShardedTensor of torch's without a collective; its default group must exist.

    ``shards`` are this rank's tensors, contiguous, of one dtype and device, each with its offset. ``others`` has offset
    and shape of all other shards, which are said to lie on ``other_rank``.
    """
    first, _ = shards[0]
    local = [Shard.from_tensor_and_offsets(tensor, list(offset), rank) for tensor, offset in shards]
    place = f"rank:{other_rank}/{first.device}"
    metadata = ShardedTensorMetadata(
        [*(shard.metadata for shard in local), *(ShardMetadata(list(o), list(s), place) for o, s in others)],
        torch.Size(shape),
        TensorProperties(dtype=first.dtype, layout=first.layout, pin_memory=first.is_pinned()),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)  # noqa: SLF001


def find_group(sharded_tensor: Any) -> Any:
    """Return the process group of a ShardedTensor of torch's."""
    return sharded_tensor._process_group  # noqa: SLF001


def get_root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh is a slice of: no public name leads from FSDP's dimension to expert parallelism's."""
    return mesh._get_root_mesh()  # noqa: SLF001


__all__ = ["ChunkShardingSpec", "find_group", "get_root_mesh", "make_sharded_tensor"]
