"""The outline of a checkpoint: its names, dtypes and shapes, read without torch, which takes seconds to import."""

from __future__ import annotations

import importlib
import math
import sys
from typing import TYPE_CHECKING, NamedTuple

from shardckpt import settings
from shardckpt.errors import PluginError
from shardckpt.manifest.names import MARKER_LIMIT, MARKER_NAME, RECORD_LIMIT, RECORD_NAME
from shardckpt.manifest.plain import parse_plain
from shardckpt.plugins.installed import has_foreign_plugins
from shardckpt.storage.directory import open_directory
from shardckpt.storage.input_file import read_file

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from shardckpt.manifest.plain import PlainRecord


class Outline(NamedTuple):
    """The content of a checkpoint, in columns, as :class:`shardckpt.strategy.StoredColumns` has it with torch's dtypes.

    Attributes:
        keys: Of the tensors, in any order.
        dtypes: torch's names of their dtypes: ``"bfloat16"``.
        shapes: Their global shapes.
        itemsizes: Bytes of an element of each dtype.
        objects: The unique keys of the ShardedObjects.
        common: The names in the common state.
        plain_common: Bytes that say all values of the common state, without anything that a load may refuse; where
            two checkpoints have the same bytes, the values are equal. ``b""`` where only the strategy knows.
        object_places: Where bytes are that say the value of an object, in the order of ``objects`` and then of
            ``plain_objects``: their encoding, the file, the first byte and their number. Empty where only the strategy
            knows.
        plain_objects: The keys of the PlainObjects.
    """

    keys: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    itemsizes: dict[str, int]
    objects: list[str]
    common: list[str]
    plain_common: bytes = b""
    object_places: Sequence[tuple[str, str, int, int]] = ()
    plain_objects: Sequence[str] = ()


def is_object_key(name: str) -> bool:
    """Return whether a name is the unique key of a ShardedObject, with an offset and a shape."""
    _, found, tail = name.rpartition("/shard_")
    offset, *shape = (part.split(".") for part in tail.split("_"))
    return (
        bool(found) and len(shape) == 1 and len(shape[0]) == len(offset) and all(map(str.isdecimal, offset + shape[0]))
    )


def cut_shapes(extents: Sequence[int], axes: Sequence[int], most_elements: int) -> list[tuple[int, ...]]:
    """Return the shapes in a table, with 1 behind the shape in each row; equal ones are one tuple.

    The table has ``extents`` row by row, and is as wide as the shape with the most axes. It is a ValueError if it is no
    such table, or a shape has ``most_elements`` or more, where an extent of 0 counts as 1.
    """
    width = max(axes, default=0)
    if len(extents) != width * len(axes):
        raise ValueError("no table of shapes")
    rows = list(zip(axes, *(extents[axis::width] for axis in range(width)), strict=True))
    # most of many tensors have one of a few shapes
    shapes = {row: row[1 : row[0] + 1] for row in set(rows)}
    if not all(
        {*row[row[0] + 1 :]} <= {1} and math.prod(max(size, 1) for size in row[1:]) < most_elements for row in shapes
    ):
        raise ValueError("no table of shapes")
    return list(map(shapes.__getitem__, rows))


def open_with_record(directory: Path) -> tuple[Path, PlainRecord] | None:
    """Return the directory of a checkpoint, held open so that all files are read from one save, and its record.

    None if it is not an unchanged checkpoint that a save of this library has committed. JSON files that cannot be read
    are an OSError or a CheckpointingException.
    """
    # a directory that a save, an overwrite or a removal has not finished has a name with a dot in front
    if directory.name.startswith(".") or not directory.is_dir():
        return None
    place = open_directory(directory)
    record = parse_plain(read_file(place / MARKER_NAME, MARKER_LIMIT), read_file(place / RECORD_NAME, RECORD_LIMIT))
    return None if record is None else (place, record)


def read_outline(directory: Path, record: PlainRecord, own_functions: Mapping[tuple[str, int], str]) -> Outline | None:
    """Return the outline of a checkpoint of this library by the function that its strategy was registered with.

    None if there is no such function, or it leaves the checkpoint to the strategy. The directory is as
    :func:`open_with_record` returned it. ``own_functions`` are those of this distribution's formats by backend and
    version, as their plugins register them: where no other distribution has plugins, none are looked for, which takes
    longer than to list a checkpoint. A function that cannot be imported is a PluginError.
    """
    registered, distribution = _find_function(record.backend, record.version, own_functions)
    if not registered:
        return None
    module, _, name = registered.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as exc:
        raise PluginError(f"{registered} of {distribution} cannot be imported: {type(exc).__name__}: {exc}") from exc
    found: Outline | None = function(directory, record)
    return found


def find_own_formats(own: Collection[tuple[str, int]]) -> frozenset[tuple[str, int]] | None:
    """Return the formats of this distribution that are read here, by backend and version.

    None if anyone else has registered a reader, which may know other files, too.
    """
    if _is_alone():
        return frozenset(own)
    from shardckpt.plugins.entries import StrategyAction
    from shardckpt.plugins.manager import get_plugin_manager

    entries = get_plugin_manager().registry.entries(StrategyAction.LOAD_SHARDED)
    if any(entry.distribution.partition(" ")[0] != "shardckpt" for entry in entries):
        return None
    return frozenset((entry.backend, entry.version) for entry in entries)


def _is_alone() -> bool:
    """Return whether no plugins of other distributions can have been loaded, or need be looked for."""
    is_looked_for = f"{__package__}.manager" in sys.modules  # then to ask the registry takes no time
    return not is_looked_for and not settings.disabled_plugins() and not has_foreign_plugins()


def _find_function(backend: str, version: int, own_functions: Mapping[tuple[str, int], str]) -> tuple[str, str]:
    """Return the function of a format, ``""`` for none, and its distribution."""
    if _is_alone():
        return own_functions.get((backend, version), ""), "shardckpt"
    from shardckpt.plugins.entries import StrategyAction
    from shardckpt.plugins.manager import get_plugin_manager

    entry = get_plugin_manager().registry.find(StrategyAction.LOAD_SHARDED, backend, version)
    return ("", "") if entry is None else (entry.outline, entry.distribution)
