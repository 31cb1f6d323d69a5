"""shardckpt: sharded checkpoints for PyTorch.

``shardckpt.dist_checkpointing`` saves and loads. Importing this package imports neither torch nor pydantic: each
name is imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt import dist_checkpointing
    from shardckpt.errors import CheckpointingException
    from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
    from shardckpt.plugins import Event, hookimpl
    from shardckpt.strategy import LoadContext, LoadStrategy, Migration, SaveContext, SaveStrategy

__version__ = "0.1.0"

#: The module of each name.
_MODULES = {
    "CheckpointingException": "errors",
    "Event": "plugins.hookspecs",
    "LoadContext": "strategy",
    "LoadStrategy": "strategy",
    "LocalNonpersistentObject": "mapping",
    "Migration": "strategy",
    "SaveContext": "strategy",
    "SaveStrategy": "strategy",
    "ShardedObject": "mapping",
    "ShardedTensor": "mapping",
    "ShardedTensorFactory": "mapping",
    "dist_checkpointing": "",
    "hookimpl": "plugins.hookspecs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _MODULES[name]:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *_MODULES))


__all__ = [
    "CheckpointingException",
    "Event",
    "LoadContext",
    "LoadStrategy",
    "LocalNonpersistentObject",
    "Migration",
    "SaveContext",
    "SaveStrategy",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "__version__",
    "dist_checkpointing",
    "hookimpl",
]
