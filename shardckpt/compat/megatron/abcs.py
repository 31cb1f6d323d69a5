"""Megatron's names of the strategy base classes: for ``isinstance``, and as bases of strategies for our interface."""

from __future__ import annotations

import inspect
from typing import Any

from shardckpt.errors import PluginError
from shardckpt.strategy import AsyncSaveStrategy, LoadStrategy, SaveStrategy


def _refuse_path(kind: type[Any], method: str, ours: str) -> None:
    """Raise for a class that was written for Megatron: it would write to a path, outside the atomic commit."""
    written = vars(kind).get(method)
    if inspect.isfunction(written) and list(inspect.signature(written).parameters)[2:] == ["checkpoint_dir"]:
        raise PluginError(
            f"{kind.__qualname__}.{method} takes a checkpoint_dir: here a strategy implements {ours} of "
            f"shardckpt.{'SaveStrategy' if method == 'save' else 'LoadStrategy'}; the core handles files, digests and "
            "the commit"
        )


class SaveStrategyBase(SaveStrategy):
    """A strategy that saves."""

    #: Every strategy here stores objects too.
    can_handle_sharded_objects = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_path(cls, "save", "save(shards, common, context)")


class SaveShardedStrategy(SaveStrategyBase):
    """A strategy that saves shards, and the common state with them."""


class AsyncSaveShardedStrategy(SaveShardedStrategy, AsyncSaveStrategy):
    """A strategy that can write in the background."""


class LoadStrategyBase(LoadStrategy):
    """A strategy that loads."""

    #: Every strategy here loads objects too.
    can_handle_sharded_objects = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_path(cls, "load", "load(wanted, context)")


class LoadShardedStrategy(LoadStrategyBase):
    """A strategy that loads shards, and the common state with them."""


__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "SaveShardedStrategy",
    "SaveStrategyBase",
]
