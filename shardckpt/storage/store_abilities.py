"""The optional abilities of a store's folder beyond :class:`~shardckpt.storage.remote.RemoteFolder`.

A plugin's folder has an ability if it has the method. If it lacks one, a save uses the other methods instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

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
            part_bytes: Size of each part but the last, in bytes, at least 5 MiB.

        Returns:
            The writer that takes the parts.
        """


@runtime_checkable
class CreatesObjects(Protocol):
    """A folder that creates an object only if it does not exist, in one step, whoever else tries at that moment."""

    def create(self, name: str, data: bytes) -> None:
        """Write a small object.

        Raises:
            FileExistsError: There is an object of that name, which has not changed.
        """


@runtime_checkable
class ReplacesObjects(Protocol):
    """A folder that replaces an object in one step, unless it was replaced since it was read."""

    def read_tagged(self, name: str) -> tuple[bytes, object]:
        """Return all bytes of a small object, and the store's tag of this content."""

    def replace(self, name: str, data: bytes, tag: object) -> None:
        """Write a small object in the place of the one with that tag.

        Raises:
            FileExistsError: The object has changed since, or is gone.
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
        """Delete objects; a missing object is no error."""


class PendingUpload(NamedTuple):
    """An object that is being uploaded in parts, which listings do not show.

    Attributes:
        name: The object, by its path below the URL.
        id: The store's id of the upload.
        begun: When it began, in seconds since 1970.
    """

    name: str
    id: str
    begun: float


@runtime_checkable
class AbortsUploads(Protocol):
    """A folder that finds and aborts uploads whose process was killed."""

    def uploads(self) -> list[PendingUpload] | None:
        """Return the uploads below the URL, at any depth, that have not ended; None if nothing here can list them."""

    def abort_upload(self, upload: PendingUpload) -> None:
        """Abort an upload; no error if it has ended."""


@runtime_checkable
class CopiesObjects(Protocol):
    """A folder whose store copies objects by itself, so that their bytes do not come here."""

    def copy(self, source: str, name: str, nbytes: int) -> bool:
        """Copy an object, which may be in any folder, to this one; an object of that name is replaced.

        Returns:
            Whether the store has copied it; False if it cannot: it does not have the object, or copies none so large.
        """


@runtime_checkable
class LimitsUploads(Protocol):
    """A folder whose uploads can be told how much memory they may take."""

    def limit_uploads(self, nbytes: int) -> None:
        """Hold at most so many bytes of an object at a time, in every upload and streamed write from now on.

        Args:
            nbytes: Bytes of the parts on their way, of one that waits, and of one that is being filled: of a streamed
                write as many are on their way as fit, and at least one.
        """


@runtime_checkable
class TellsTimes(Protocol):
    """A folder that knows when its objects were written."""

    def times(self) -> dict[str, float]:
        """Return when each object below the URL, at any depth, was written, by path, in seconds since 1970.

        An object whose age the store does not say is left out.
        """
