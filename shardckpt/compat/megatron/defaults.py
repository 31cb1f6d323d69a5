"""The registry of strategies under Megatron's names."""

from __future__ import annotations

from enum import Enum
from typing import Any

from shardckpt import dist_checkpointing
from shardckpt.compat.megatron.by_path import LoadsByPath, SavesByPath
from shardckpt.compat.megatron.torch_dist import BY_PATH
from shardckpt.errors import CheckpointingException, UnknownBackendError
from shardckpt.plugins import StrategyAction as Action
from shardckpt.plugins import get_plugin_manager
from shardckpt.strategy import LoadStrategy


class StrategyAction(Enum):
    """What a strategy does. The actions for the common state are refused: sharded strategies store it."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Return the registered strategy for an action and a format.

    Unlike Megatron's, this never replaces what the user registered.

    Args:
        action: Load or save.
        backend: Name of the format.
        version: Version of the format.

    Returns:
        The strategy, which can be called with a path.

    Raises:
        UnknownBackendError: none is registered.
    """
    ours = _action(action)
    entry = get_plugin_manager().registry.find(ours, backend, version)
    if entry is None:
        known = ", ".join(f"{e.backend} {e.version}" for e in get_plugin_manager().registry.entries(ours)) or "none"
        raise UnknownBackendError(
            f"no strategy {ours.verb}s ({backend!r}, {version}); installed: {known}{get_plugin_manager().faults_text()}"
        )
    return callable_with_path(entry.create())


def register_default_strategy(action: StrategyAction, backend: str, version: int, strategy: Any) -> None:
    """Register a strategy: :func:`shardckpt.dist_checkpointing.register_default_strategy`."""
    dist_checkpointing.register_default_strategy(_action(action), backend, version, strategy)


def register_built_in_strategies() -> None:
    """Find the installed strategies now; otherwise this happens at their first use."""
    get_plugin_manager()


def callable_with_path(strategy: Any) -> Any:
    """Make a strategy callable with a path.

    Args:
        strategy: A save or load strategy.

    Returns:
        The strategy itself if it can be called with a path; else a copy that can, of Megatron's class if there is one.
    """
    if isinstance(strategy, LoadsByPath | SavesByPath):
        return strategy
    kind = type(strategy)
    mixin = LoadsByPath if isinstance(strategy, LoadStrategy) else SavesByPath
    by_path: Any = BY_PATH.get(kind) or type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    # without __init__, whose arguments are not known here
    copied = object.__new__(by_path)
    vars(copied).update(vars(strategy))
    return copied


def _action(action: Any) -> Action:
    try:
        return Action(action.value)
    except ValueError:
        raise CheckpointingException(
            f"{action}: there are no strategies for the common state; the sharded strategy stores it, and "
            "dist_checkpointing.load_common_state_dict(checkpoint_dir) loads it"
        ) from None


__all__ = [
    "StrategyAction",
    "callable_with_path",
    "get_default_strategy",
    "register_built_in_strategies",
    "register_default_strategy",
]
