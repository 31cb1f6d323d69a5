"""Open a checkpoint without torch, by its outline."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.engine.locations import find_local
from shardckpt.plugins.outline import open_with_record, read_outline
from shardckpt.storage.filesystem import file_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardckpt.manifest.plain import PlainRecord
    from shardckpt.plugins.outline import Outline


class OutlinedCheckpoint(NamedTuple):
    """A checkpoint whose files all have their recorded sizes.

    Attributes:
        location: Its path.
        place: Its directory, held open: every file is read from the same save, even if another replaces it.
        record: The record of its files.
        outline: Its tensors, objects and common names.
    """

    location: Path
    place: Path
    record: PlainRecord
    outline: Outline


def open_by_outline(path: str, own_functions: Mapping[tuple[str, int], str]) -> OutlinedCheckpoint | None:
    """Open a checkpoint by its outline, with ``own_functions`` for :func:`read_outline`.

    None if it is at a URL or of another library, has no outline, or has a file of another size than recorded; an
    OSError or a CheckpointingException if a file is missing or cannot be read. In each case the caller opens it by its
    strategy, whose errors say more.
    """
    location = find_local(path)
    opened = None if location is None else open_with_record(location)
    if location is None or opened is None:
        return None
    place, record = opened
    is_complete = all(file_size(place / name) == size for name, size in record.list_files().items())
    outline = read_outline(place, record, own_functions) if is_complete else None
    return None if outline is None else OutlinedCheckpoint(location, place, record, outline)
