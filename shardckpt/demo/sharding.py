"""How a training script shares a model between ranks: FSDP2, and expert parallelism where there are experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardckpt.tensors  # noqa: F401 - so that what FSDP imports keeps no process group: see shardckpt.tensors.torch_private
from shardckpt.demo.experts import Experts

if TYPE_CHECKING:
    from shardckpt.demo.job import Layout
    from shardckpt.demo.model import ByteTransformer


def shard_model(model: ByteTransformer, layout: Layout) -> None:
    """Shard a model over all ranks of the default group, in place.

    FSDP2 shards over all of them. Experts are dealt out over ``ep`` first, and FSDP2 shards them over ``efsdp``: their
    parameters are DTensors on the mesh (efsdp, ep).
    """
    if layout.ep:
        mesh = init_device_mesh("cpu", (layout.fsdp, layout.ep), mesh_dim_names=("efsdp", "ep"))
        for module in model.modules():
            if isinstance(module, Experts):
                module.deal(mesh["ep"])
                fully_shard(module, mesh=mesh["efsdp"])
    everyone = init_device_mesh("cpu", (layout.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)


__all__ = ["shard_model"]
