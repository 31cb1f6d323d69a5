"""Plan a save by a planner: its planned and resolved items become a rank's items."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType

from shardckpt.archive import check_loadable
from shardckpt.chunks import LocalItems
from shardckpt.distributed import Comm  # noqa: TC001 - DCP then keeps no process group: see tensors.torch_private
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedObject
from shardckpt_torch_dist.plan.custom_planner import list_leaves, scatter_plans
from shardckpt_torch_dist.plan.objects import check_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from shardckpt.mapping import ShardedBase
    from shardckpt_torch_dist.plan.save_planner import ShardedSavePlanner


def plan_by(
    planner: ShardedSavePlanner, shards: Sequence[ShardedBase], comm: Comm, allow_globals: Iterable[Any]
) -> tuple[LocalItems, dict[str, bytes]]:
    """Collective: plan with a planner, and ask it for the values; its methods are called as ``dcp.save`` calls them.

    Returns the items that this rank stores, and the archives of its objects by unique key; these may name
    ``allow_globals``, in addition to the plain ones. It is an error if a rank cannot plan, or a value is not as
    planned.
    """
    with comm.local_phase("planning"):
        planner.set_up_planner(state_dict=list_leaves(shards), storage_meta=StorageMeta(), is_coordinator=comm.is_main)
        plan = planner.create_local_plan()
    if comm.all_true(getattr(planner, "can_run_decentralized_global_plan", False)):
        with comm.local_phase("planning for all ranks"):
            plan = planner.create_decentralized_global_plan(plan)  # type: ignore[attr-defined]
    else:
        plans = comm.gather(plan)
        with comm.local_phase("planning for all ranks"):
            plans = planner.create_global_plan(plans)[0] if comm.is_main else []
        plan = scatter_plans(plans, comm)
    with comm.local_phase("finishing the plan"):
        return _resolve(planner.finish_plan(plan), planner, shards, tuple(allow_globals))


def check_tensor(value: Any, item: WriteItem) -> torch.Tensor:
    """Return a planner's value for an item, after a check that it is a tensor as planned.

    With plan caching, a planner of DCP's misses a changed dtype.
    """
    data = item.tensor_data
    if data is None or not isinstance(value, torch.Tensor):
        raise ShardingError(f"{item.index.fqn!r}: the planner gave a {type(value).__name__} for a tensor")
    planned = data.properties.dtype, tuple(data.chunk.sizes)
    if (value.dtype, tuple(value.shape)) != planned:
        raise ShardingError(
            f"tensor {item.index.fqn!r} was planned as {planned[0]} {planned[1]}, and is {value.dtype} "
            f"{tuple(value.shape)}: plan the dtype and the shape that resolve_data gives; a planner with "
            "enable_plan_caching=True does not see that dtypes have changed: save with a new class, or without caching"
        )
    return value


def check_archive(value: Any, item: WriteItem, allow_globals: Iterable[Any]) -> bytes:
    """Return a planner's value for an object, after a check that it is a BytesIO of an archive that a load takes."""
    key = item.index.fqn
    if not isinstance(value, io.BytesIO):
        raise ShardingError(f"object {key!r}: the planner gave a {type(value).__name__}, expected a BytesIO")
    check_loadable(value, f"object {key!r}", allow_globals)
    return value.getvalue()


def _resolve(
    plan: SavePlan, planner: ShardedSavePlanner, shards: Sequence[ShardedBase], allow_globals: tuple[Any, ...]
) -> tuple[LocalItems, dict[str, bytes]]:
    found, archives = LocalItems(), dict[str, bytes]()
    positions = {
        shard.unique_key: position for position, shard in enumerate(shards) if isinstance(shard, ShardedObject)
    }
    for item in plan.items:
        key, data = item.index.fqn, item.tensor_data
        if item.type == WriteItemType.BYTE_IO or data is None:
            if key not in positions:
                raise ShardingError(
                    f"object {key!r}: the planner plans it, and no ShardedObject of this rank has that unique key: add "
                    "one to the state dict that is saved"
                )
            found.objects[key] = positions[key]
            archives[key] = check_archive(planner.resolve_data(item), item, allow_globals)
            continue
        tensor = check_tensor(planner.resolve_data(item), item).detach()
        number = found.add_tensor(key, tensor.dtype, tuple(data.size))
        found.boxes.add(number, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        found.tensors.append(tensor)
    check_keys(found.objects, shards)
    return found, archives
