"""Plugins: the hooks that they implement, how they are found, and which strategy reads a checkpoint."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt.plugins.entries import StrategyAction
    from shardckpt.plugins.hookspecs import Event, hookimpl
    from shardckpt.plugins.key_mapping import Identity, KeyMapEntry, KeyMapping, get_key_map_entries
    from shardckpt.plugins.manager import PluginManager, get_plugin_manager
    from shardckpt.plugins.registry import StrategyRegistry, parse_key
    from shardckpt.plugins.resolver import Accept, choose_reader, hold_checkpoint, hold_same, parse_file, read_manifest

#: The module of each name, imported at first use: ``shardckpt.hookimpl`` must not import torch.
_MODULES = {
    "Accept": "resolver",
    "Event": "hookspecs",
    "Identity": "key_mapping",
    "KeyMapping": "key_mapping",
    "KeyMapEntry": "key_mapping",
    "PluginManager": "manager",
    "StrategyAction": "entries",
    "StrategyRegistry": "registry",
    "choose_reader": "resolver",
    "hold_checkpoint": "resolver",
    "hold_same": "resolver",
    "hookimpl": "hookspecs",
    "get_plugin_manager": "manager",
    "get_key_map_entries": "key_mapping",
    "parse_file": "resolver",
    "parse_key": "registry",
    "read_manifest": "resolver",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "Accept",
    "Event",
    "Identity",
    "KeyMapEntry",
    "KeyMapping",
    "PluginManager",
    "StrategyAction",
    "StrategyRegistry",
    "choose_reader",
    "get_key_map_entries",
    "get_plugin_manager",
    "hold_checkpoint",
    "hold_same",
    "hookimpl",
    "parse_file",
    "parse_key",
    "read_manifest",
]
