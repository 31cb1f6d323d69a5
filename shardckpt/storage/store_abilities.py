"""What a store's folder may do beyond :class:`~shardckpt.storage.remote.RemoteFolder`: each ability is asked for.

A plugin's folder has an ability if it has the method. Where it lacks one, a save does the same with what is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Collection


class ObjectWriter(Protocol):
    """An object that is being written: it appears with :meth:`close`, complete, or never."""

    def write(self, part: memoryview) -> None:
        """Send the next part, and wait while as many as ``SHARDCKPT_REMOTE_PARTS`` are on their way.

        Args:
            part: As many bytes as :meth:`StreamsWrites.open_write` was told; fewer only if it is the last part. They
                no longer change, and may be used after this returns.
        """

    def close(self) -> None:
        """Wait until all parts have arrived, and let the object appear."""

    def abort(self) -> None:
        """Give up, after an error of any method, too: no object appears, and the parts are deleted. Raise nothing."""


@runtime_checkable
class StreamsWrites(Protocol):
    """A folder to which objects are written while their bytes are produced: a save writes nothing to local disks."""

    def open_write(self, name: str, part_bytes: int) -> ObjectWriter:
        """Begin an object.

        Args:
            name: The object.
            part_bytes: Size of each part but the last, in bytes, at least 5 MiB.
        """


@runtime_checkable
class CreatesObjects(Protocol):
    """A folder that creates an object only if it is not there, in one step, whoever else tries at that moment."""

    def create(self, name: str, data: bytes) -> None:
        """Write a small object.

        Raises:
            FileExistsError: There is an object of that name, which has not changed.
        """


@runtime_checkable
class ReadsInto(Protocol):
    """A folder that reads into the caller's memory, without bytes of its own in between."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the start of the buffer with an object's bytes from an offset on.

        Returns:
            The number of bytes, fewer than the buffer has only where the object ends.
        """


@runtime_checkable
class DeletesMany(Protocol):
    """A folder that deletes many objects by few requests."""

    def delete_many(self, names: Collection[str]) -> None:
        """Delete objects; those that do not exist are no error."""


__all__ = ["CreatesObjects", "DeletesMany", "ObjectWriter", "ReadsInto", "StreamsWrites"]
