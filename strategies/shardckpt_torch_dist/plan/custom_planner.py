"""The planner that a caller gives a strategy: its allowed classes, and how ranks plan with it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import CheckpointingException
from shardckpt.mapping import PlainObject, ShardedObject
from shardckpt.state_dict import map_reduce
from shardckpt_torch_dist.torch_private import caches_plans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.distributed import Comm
    from shardckpt.mapping import ShardedBase

_Planner = TypeVar("_Planner")
_Plan = TypeVar("_Plan")


def check_planner(planner: Any, base: type[Any]) -> None:
    """Raise CheckpointingException unless ``planner=`` is an instance or a subclass of a planner of ours."""
    name = name_planner(planner)
    if not issubclass(planner if isinstance(planner, type) else type(planner), base):
        raise CheckpointingException(
            f"planner={name}: expected an instance or a subclass of {base.__qualname__}, "
            "which plans ShardedTensors and ShardedObjects"
        )
    if caches_plans(planner):
        raise CheckpointingException(
            f"planner={name} with enable_plan_caching=True: DCP shares one cache among "
            "all planners of a class name, and does not see that a dtype has changed; leave it out"
        )


def make_planner(planner: _Planner | type[_Planner]) -> _Planner:
    """Return a given instance, or one of a given class, for the flat state dict of :func:`list_leaves`."""
    if not isinstance(planner, type):
        return planner
    kind: Any = planner
    return kind(flatten_state_dict=False)  # type: ignore[no-any-return]


def name_planner(planner: Any) -> str | None:
    """Return the name of a planner's class, which is the same on all ranks; None for None."""
    if planner is None:
        return None
    kind = planner if isinstance(planner, type) else type(planner)
    return f"{kind.__module__}.{kind.__qualname__}"


def list_leaves(shards: Sequence[ShardedBase]) -> dict[str, Any]:
    """Return shards as the state dict of a planner: each under its key, an object under its unique key.

    Where a rank has several shards of a key, its value is the list of them. A PlainObject is planned by its own key
    alone: the index lists it by the others.
    """
    leaves = [dataclasses.replace(each, keys=()) if isinstance(each, PlainObject) else each for each in shards]
    found = map_reduce(
        leaves, lambda each: each.unique_key if isinstance(each, ShardedObject) else each.key, reduce_fn=list
    )
    return {key: several[0] if len(several) == 1 else several for key, several in found.items()}


def scatter_plans(plans: Sequence[_Plan], comm: Comm) -> _Plan:
    """Collective: send each rank its plan; return this rank's. Only the main rank's ``plans`` count.

    It is an error if there is no plan for each rank.
    """
    with comm.local_phase("sending the plans of all ranks"):
        if comm.is_main and len(plans) != comm.world_size:
            raise CheckpointingException(f"create_global_plan returned {len(plans)} plans for {comm.world_size} ranks")
        return comm.scatter(plans)
