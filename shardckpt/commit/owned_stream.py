"""Streams to a store's folder that end with an error once another save has taken the folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.storage import ObjectWriter, StreamsWrites


class OwnedStream:
    """Begins objects of a save, which appear only while the folder is the save's.

    Args:
        store: The folder.
        check: Raises an error for an object's name if the folder is no longer the save's, or cannot have the name.
    """

    def __init__(self, store: StreamsWrites, check: Callable[[str], None]) -> None:
        self._store = store
        self._check = check

    def open_write(self, name: str, part_bytes: int) -> ObjectWriter:
        """Begin an object."""
        return _OwnedObject(self._store.open_write(name, part_bytes), lambda: self._check(name))


class _OwnedObject:
    def __init__(self, writer: ObjectWriter, check: Callable[[], None]) -> None:
        self._check = check
        self.write = writer.write
        self.abort = writer.abort
        self._close = writer.close

    def close(self) -> None:
        """Let the object appear, unless it would replace another save's."""
        self._check()
        self._close()
