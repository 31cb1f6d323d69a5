"""The registry of strategies under Megatron's names."""

from __future__ import annotations

from enum import Enum
from typing import Any

from shardckpt import dist_checkpointing
from shardckpt.compat.megatron.path_adapter import adapt_loader, adapt_saver
from shardckpt.compat.megatron.strategies import callable_with_path
from shardckpt.errors import CheckpointingException, UnknownBackendError
from shardckpt.plugins.entries import StrategyAction as Action
from shardckpt.plugins.manager import get_plugin_manager


class StrategyAction(Enum):
    """The action of a strategy. The actions for the common state are refused: sharded strategies store it."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Return the registered strategy for an action and a format.

    Unlike Megatron's, this never replaces a strategy that the user registered.

    Args:
        action: Load or save.
        backend: Name of the format.
        version: Version of the format.

    Returns:
        The strategy, which can be called with a path; one of Megatron's kind as it was registered.

    Raises:
        UnknownBackendError: none is registered.
    """
    ours, manager = _action(action), get_plugin_manager()
    entry = manager.registry.find(ours, backend, version)
    if entry is None:
        known = ", ".join(f"{e.backend} {e.version}" for e in manager.registry.entries(ours)) or "none"
        raise UnknownBackendError(
            f"no strategy {ours.verb}s ({backend!r}, {version}); installed: {known}{manager.faults_text()}"
        )
    return callable_with_path(entry.create())


def register_default_strategy(action: StrategyAction, backend: str, version: int, strategy: Any) -> None:
    """Register a strategy: :func:`shardckpt.dist_checkpointing.register_default_strategy`.

    Args:
        action: Whether it saves or loads.
        backend: The backend that it serves.
        version: The version that it serves.
        strategy: An instance of a class of Megatron's kind; or a class or instance of ours.
    """
    ours = _action(action)
    adapt = adapt_loader if ours is Action.LOAD_SHARDED else adapt_saver
    adapted = adapt(strategy, backend, version)
    dist_checkpointing.register_default_strategy(ours, backend, version, adapted)


def register_built_in_strategies() -> None:
    """Find the installed strategies now; otherwise this happens at their first use."""
    get_plugin_manager()


def _action(action: Any) -> Action:
    if not isinstance(action, StrategyAction | Action):
        raise CheckpointingException(f"action={action!r}: pass LOAD_SHARDED or SAVE_SHARDED of StrategyAction")
    try:
        return Action(action.value)
    except ValueError:
        raise CheckpointingException(
            f"{action}: there are no strategies for the common state; the sharded strategy stores it, and "
            "dist_checkpointing.load_common_state_dict(checkpoint_dir) loads it"
        ) from None
