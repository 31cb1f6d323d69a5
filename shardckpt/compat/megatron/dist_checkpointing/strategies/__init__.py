"""megatron.core.dist_checkpointing.strategies."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from shardckpt.compat.megatron.defaults import register_built_in_strategies as register_default_common_strategies

#: Megatron's callers reach modules as attributes of the package.
_MODULES = {module.name for module in pkgutil.iter_modules(__path__)}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["register_default_common_strategies"]
