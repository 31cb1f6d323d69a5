"""The outline of a checkpoint: what it stores, read without torch, which takes seconds to import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import PluginError
from shardckpt.plugins.entries import StrategyAction

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest import Manifest
    from shardckpt.plugins.manager import PluginManager


class Outline(NamedTuple):
    """What a checkpoint stores, in columns, as :class:`shardckpt.strategy.StoredColumns` has it with torch's dtypes.

    Attributes:
        keys: Of the tensors, in any order.
        dtypes: torch's names of their dtypes: ``"bfloat16"``.
        shapes: Their global shapes.
        itemsizes: Bytes of an element of each dtype.
        objects: The unique keys of the ShardedObjects.
        common: The names in the common state.
    """

    keys: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    itemsizes: dict[str, int]
    objects: list[str]
    common: list[str]


def read_outline(directory: Path, manifest: Manifest, plugins: PluginManager) -> Outline | None:
    """Return the outline of a checkpoint of ours by the function that its strategy was registered with.

    Args:
        directory: The checkpoint, on this machine, as :func:`shardckpt.plugins.hold_checkpoint` returned it.
        manifest: Its manifest.
        plugins: The plugin manager.

    Returns:
        None if there is no such function, or it leaves the checkpoint to the strategy.

    Raises:
        PluginError: the function cannot be imported.
    """
    entry = plugins.registry.find(StrategyAction.LOAD_SHARDED, manifest.backend, manifest.version)
    if manifest.record is None or entry is None or not entry.outline:
        return None
    module, _, name = entry.outline.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as exc:
        raise PluginError(
            f"{entry.outline} of {entry.distribution} cannot be imported: {type(exc).__name__}: {exc}"
        ) from exc
    found: Outline | None = function(directory, manifest.record)
    return found
