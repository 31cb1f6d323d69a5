"""Writes the golden checkpoints of torch_checkpointing; run by a Python that has it, torch and safetensors.

    python torch_checkpointing_script.py FOLDER

Every parameter is ``arange`` in its global shape plus 100 times its number; the moments are multiples of it. The
package needs CUDA at one place, where the ranks gather their metadata: a gather of gloo takes its place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_checkpointing import CheckpointManager, DefaultShardingMetadata, ItemSpec, optimizer_transform_pre
from torch_checkpointing.checkpoint_layout import (
    JsonSerialization,
    LayoutInfo,
    RawSerialization,
    SafetensorsSerialization,
)
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

#: The directories, each with the number of its ranks.
GOLDEN = {"torch-1": 1, "torch-2": 2, "safetensors-2": 2, "unlisted-2": 2, "mesh-4": 4, "stages-4": 4, "boxes-2": 2}


def _gather(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


DefaultMetadataManager._all_gather_pickled_data = _gather


def _fill(tensor: Any, values: torch.Tensor) -> None:
    """Set a parameter or a moment to values of its global shape."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(values)
        return
    local = values
    # FSDP cuts what tensor parallelism has left, and is the first axis of the mesh
    for axis in reversed(range(tensor.device_mesh.ndim)):
        if not tensor.placements[axis].is_replicate():
            index, count = tensor.device_mesh.get_local_rank(axis), tensor.device_mesh.size(axis)
            parts = local.chunk(count, tensor.placements[axis].dim)
            local = parts[index] if index < len(parts) else local[:0]
    tensor.to_local().copy_(local)
    if not torch.equal(tensor.full_tensor(), values):
        raise ValueError(f"{tensor.placements} are cut otherwise")


class _Boxes(torch.Tensor):
    """A local tensor that says which boxes of a global tensor it has."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets = ((0, 0), (1, 0))
    local_sizes = ((1, 3), (1, 3))


class _BoxResharder(DefaultResharder):
    """Describes tensors by their boxes; torch_checkpointing has the metadata for it, and no resharder that uses it."""

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> Any:
        return {(name,): DefaultShardingMetadata.from_tensor(value) for name, value in item_value.items()}


def _make_boxes(rank: int) -> Any:
    """Return two rows of ``arange(12)`` in shape (4, 3): 3 and 0, or 2 and 1."""
    rows = [3 - rank, rank]
    made: Any = torch.arange(12, dtype=torch.bfloat16).view(4, 3)[rows].as_subclass(_Boxes)
    made.global_shape, made.global_offsets = (4, 3), tuple((row, 0) for row in rows)
    return made


def _write(rank: int, name: str, folder: str) -> None:
    world = GOLDEN[name]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("GOLDEN_PORT", "29671"))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    if name == "mesh-4":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif name == "stages-4":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        model[2 * (1 - rank // 2)] = torch.nn.Identity()
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    named = list(model.named_parameters())
    decayed = {"params": [(n, p) for n, p in named if p.ndim == 2], "weight_decay": 0.5}
    others = {"params": [(n, p) for n, p in named if p.ndim == 1], "lr": 0.125, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, others], lr=0.25)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for parameter_name, parameter in named:
            number = ["0.weight", "0.bias", "2.weight", "2.bias"].index(parameter_name)
            values = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape) + 100 * number
            _fill(parameter, values)
            _fill(optimizer.state[parameter]["exp_avg"], -values)
            _fill(optimizer.state[parameter]["exp_avg_sq"], 2 * values)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat if name == "safetensors-2" else None),
        "lr_scheduler": schedule.state_dict(),
        "loader": {"position": 10 + rank, "rng": torch.full((2,), rank, dtype=torch.uint8)},
        "train_state": {"step": torch.tensor(7), "log": [torch.tensor(3), torch.tensor(4)], "name": "run"},
        "step": 7,
        "note": b"a note",
    }
    if name == "mesh-4":
        state["optimizer"] = optimizer_transform_pre(optimizer.state_dict())
    if name == "unlisted-2":
        state["optimizer"] = optimizer.state_dict()
    resharder = None if name == "unlisted-2" else DefaultResharder()
    if name == "boxes-2":
        state = {"model": {"w": _make_boxes(rank)}, "local": {"w": torch.full((2,), float(rank))}, "step": 7}
    safetensors = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization({"written": "golden"}))
    in_safetensors = name in ("safetensors-2", "boxes-2")
    items = {
        "local": ItemSpec(resharder=resharder, required=False),
        "model": ItemSpec(
            resharder=_BoxResharder() if name == "boxes-2" else resharder,
            layout=safetensors if in_safetensors else None,
        ),
        "optimizer": ItemSpec(resharder=resharder, required=False),
        "step": ItemSpec(layout=LayoutInfo("step_{rank}.json", JsonSerialization(int))),
        "note": ItemSpec(layout=LayoutInfo("note_{rank}.bin", RawSerialization()), required=False),
    }
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(
        CheckpointManager.Config(items=items, save=SyncCheckpointSaverConfig(), storage_config=storage)
    )
    manager.save(str(Path(folder) / name), state)
    dist.barrier()  # rank 0 has the store at which the others may still wait in their saves
    manager.close()
    dist.destroy_process_group()


def main() -> None:
    """Write all directories."""
    folder = sys.argv[1]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, world in GOLDEN.items():
        # forks: what they need is imported, and no thread has been started
        torch.multiprocessing.start_processes(_write, (name, folder), world, start_method="fork")


if __name__ == "__main__":
    main()
