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
    """A checkpoint of which all files are there.

    Attributes:
        location: Its path.
        place: Its directory, held open, so that all that is read through it is of one save.
        record: The record of its files.
        outline: What it stores.
    """

    location: Path
    place: Path
    record: PlainRecord
    outline: Outline


def open_by_outline(path: str, own: Mapping[tuple[str, int], str]) -> OutlinedCheckpoint | None:
    """Open a checkpoint by its outline; ``own`` is that of ``read_outline``.

    None if it must be opened by its strategy, whose errors say more: it is at a URL or not of this library, has no
    outline, or a file is missing or has another size than recorded.
    """
    location = find_local(path)
    if location is None:
        return None
    held = hold_plain(location)
    if held is None:
        return None
    place, record = held
    if any(file_size(place / name) != size for name, size in record.list_files().items()):
        return None
    outline = read_outline(place, record, own)
    return None if outline is None else OutlinedCheckpoint(location, place, record, outline)
