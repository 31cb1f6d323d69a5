"""Plugins: the hooks that they implement, how they are found, and which strategy reads a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.plugins.entries import StrategyAction, check_key, get_strategy_key
    from shardckpt.plugins.hookspecs import Event, hookimpl
    from shardckpt.plugins.key_mapping import (
        Identity,
        KeyMapEntry,
        KeyMapping,
        KnowsKeys,
        Padding,
        UsesConfig,
        get_key_map_entries,
    )
    from shardckpt.plugins.legacy_megatron import describe_legacy_megatron
    from shardckpt.plugins.manager import PluginManager, get_plugin_manager, list_unknown_disabled
    from shardckpt.plugins.origin import bracket_origin, describe_origin, describe_strategy, name_origin
    from shardckpt.plugins.outline import (
        Outline,
        cut_shapes,
        find_own_formats,
        hold_plain,
        is_object_key,
        read_outline,
    )
    from shardckpt.plugins.registry import StrategyRegistry, parse_key, parse_keys
    from shardckpt.plugins.resolver import (
        CALLER,
        Accept,
        check_policy,
        choose_reader,
        find_reader,
        hold_checkpoint,
        hold_same,
        parse_file,
        read_manifest,
    )
    from shardckpt.plugins.stores import (
        ABSENT,
        check_served,
        find_options,
        name_stored_siblings,
        open_folder,
        read_stores,
    )

# lazy: ``shardckpt.hookimpl`` must not import torch
__getattr__ = lazy_getattr(
    __name__,
    {
        "entries": ("StrategyAction", "check_key", "get_strategy_key"),
        "hookspecs": ("Event", "hookimpl"),
        "key_mapping": (
            "Identity",
            "KeyMapEntry",
            "KeyMapping",
            "KnowsKeys",
            "Padding",
            "UsesConfig",
            "get_key_map_entries",
        ),
        "legacy_megatron": ("describe_legacy_megatron",),
        "manager": ("PluginManager", "get_plugin_manager", "list_unknown_disabled"),
        "outline": ("Outline", "cut_shapes", "find_own_formats", "hold_plain", "is_object_key", "read_outline"),
        "origin": ("bracket_origin", "describe_origin", "describe_strategy", "name_origin"),
        "registry": ("StrategyRegistry", "parse_key", "parse_keys"),
        "resolver": (
            "CALLER",
            "Accept",
            "check_policy",
            "choose_reader",
            "find_reader",
            "hold_checkpoint",
            "hold_same",
            "parse_file",
            "read_manifest",
        ),
        "stores": ("ABSENT", "check_served", "find_options", "name_stored_siblings", "open_folder", "read_stores"),
    },
)

__all__ = [
    "ABSENT",
    "CALLER",
    "Accept",
    "Event",
    "Identity",
    "KeyMapEntry",
    "KeyMapping",
    "KnowsKeys",
    "Outline",
    "Padding",
    "PluginManager",
    "StrategyAction",
    "StrategyRegistry",
    "UsesConfig",
    "bracket_origin",
    "check_key",
    "check_policy",
    "check_served",
    "choose_reader",
    "cut_shapes",
    "describe_legacy_megatron",
    "describe_origin",
    "describe_strategy",
    "find_options",
    "find_own_formats",
    "find_reader",
    "get_key_map_entries",
    "get_plugin_manager",
    "get_strategy_key",
    "hold_checkpoint",
    "hold_plain",
    "hold_same",
    "hookimpl",
    "is_object_key",
    "list_unknown_disabled",
    "name_origin",
    "name_stored_siblings",
    "open_folder",
    "parse_file",
    "parse_key",
    "parse_keys",
    "read_manifest",
    "read_outline",
    "read_stores",
]
