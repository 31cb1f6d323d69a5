"""Open a checkpoint without torch, by its outline."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.engine.locations import find_local
from shardckpt.plugins.outline import hold_plain, read_outline
from shardckpt.storage.filesystem import file_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardckpt.manifest.plain import PlainRecord
    from shardckpt.plugins.outline import Outline


class OutlinedCheckpoint(NamedTuple):
    """A checkpoint of which all files are there: its path, its directory held open, its record and its outline."""

    location: Path
    place: Path
    record: PlainRecord
    outline: Outline


def open_by_outline(path: str, own: Mapping[tuple[str, int], str]) -> OutlinedCheckpoint | None:
    """Open a checkpoint by its outline; ``own`` and the errors are those of ``read_outline``.

    None if it is at a URL or not of this library, if a file is missing, or there is no outline: then its strategy says
    better what it is.
    """
    location = find_local(path)
    held = None if location is None else hold_plain(location)
    if location is None or held is None:
        return None
    if any(file_size(held[0] / name) != size for name, size in held[1].list_files().items()):
        return None
    outline = read_outline(*held, own)
    return None if outline is None else OutlinedCheckpoint(location, *held, outline)
