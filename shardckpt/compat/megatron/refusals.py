"""Names of Megatron's that have no counterpart here: asking for one says what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


#: Where Megatron turns its shards into torch's.
SAVE_PLANNER = "dcp.save(..., planner=shardckpt_torch_dist.ShardedSavePlanner()) takes ShardedTensors as they are"
LOAD_PLANNER = "dcp.load(..., planner=shardckpt_torch_dist.ShardedLoadPlanner()) takes ShardedTensors as they are"
#: Where Megatron writes in the background.
QUEUE = "dist_checkpointing.save(..., async_sharded_save=True) plans, and an AsyncCallsQueue writes and finalizes"


def refusing(module: str, refused: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that refuses names.

    Args:
        module: The module's name.
        refused: What to do instead, by name. These raise ImportError, whose text is shown by
            ``from module import name`` too; any other name is an AttributeError as usual.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the module's
        if name in refused:
            raise ImportError(f"{module}.{name} has no counterpart in shardckpt: {refused[name]}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


__all__ = ["LOAD_PLANNER", "QUEUE", "SAVE_PLANNER", "refusing"]
