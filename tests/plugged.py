"""Plugins that are registered in this process for as long as a test needs them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from shardckpt.plugins.manager import get_plugin_manager

if TYPE_CHECKING:
    from collections.abc import Iterator

_P = TypeVar("_P")


@contextmanager
def registered(plugin: _P) -> Iterator[_P]:
    """Register a plugin until the block ends, and with it the strategies that it adds."""
    with get_plugin_manager().registry.preserved():
        get_plugin_manager().register(plugin)
        try:
            yield plugin
        finally:
            get_plugin_manager().unregister(plugin)


__all__ = ["registered"]
