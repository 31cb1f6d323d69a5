"""Megatron's names without a counterpart here: importing one raises an error that says what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


#: Instead of Megatron's conversions of its shards to torch's.
SAVE_PLANNER = "dcp.save(..., planner=shardckpt_torch_dist.ShardedSavePlanner()) takes ShardedTensors as they are"
LOAD_PLANNER = "dcp.load(..., planner=shardckpt_torch_dist.ShardedLoadPlanner()) takes ShardedTensors as they are"
#: Instead of Megatron's writers in the background.
QUEUE = "dist_checkpointing.save(..., async_sharded_save=True) plans, and an AsyncCallsQueue writes and finalizes"


def make_refusing_getattr(module: str, refused: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's ``__getattr__`` that refuses names.

    Args:
        module: The module's name.
        refused: What to do instead, by name.

    Returns:
        The function. It raises ImportError for these names, because ``from module import name`` shows the text of an
        ImportError but not of an AttributeError; for any other name, it raises AttributeError as usual.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the module's
        if name in refused:
            raise ImportError(f"{module}.{name} has no counterpart in shardckpt: {refused[name]}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


__all__ = ["LOAD_PLANNER", "QUEUE", "SAVE_PLANNER", "make_refusing_getattr"]
