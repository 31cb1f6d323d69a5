"""The content of a new object of a store: digested and cut into parts, which are sent while the next ones are filled.

Nothing is written to a local disk. Each file has at most ``SHARDCKPT_REMOTE_PARTS`` parts on their way, one that waits
for its turn, and one that is being filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.storage.digest import SEGMENT_BYTES, Segments, digest_function
from shardckpt.tensors import LARGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.storage.store_abilities import ObjectWriter, StreamsWrites

#: S3 takes 10,000 parts an object.
_MOST_PARTS = 9_000
_MIB = 1 << 20


class ObjectStream:
    """The content of a new object, appended by one thread at a time; :class:`FileWriter` fills it as a FileStream.

    Args:
        folder: The store.
        path: The object, for errors.
        name: Its name in the folder.
        algorithm: Name of the digest algorithm.
        nbytes: The least size in bytes, if it is known: parts are larger where they would be too many.
        count: Called with the number of bytes appended since the last call.
    """

    def __init__(
        self,
        folder: StreamsWrites,
        path: Path,
        name: str,
        algorithm: str,
        nbytes: int = 0,
        count: Callable[[int], None] | None = None,
    ) -> None:
        self._path = path
        self._part_bytes = choose_part_bytes(nbytes)
        self._count = count
        self._digest = digest_function(algorithm)
        self._algorithm = algorithm
        self._lengths: list[int] = []
        self._digests: list[int] = []
        self._part = bytearray()
        #: Key of the last bytes, for errors.
        self._what = ""
        self._writer: ObjectWriter | None = self._call(lambda: folder.open_write(name, self._part_bytes), "begin")
        #: The first error; the object cannot be completed after it.
        self.error: BaseException | None = None
        #: Seconds of waiting for fsync; a store has none.
        self.sync_seconds = 0.0

    def put_small(self, data: bytes | memoryview, what: str = "") -> None:
        """Append bytes as one segment; ``what`` is what they are (a key), named in errors."""
        if data:
            self._what = what or self._what
            self._lengths.append(len(data))
            self._digests.append(self._digest(data))
            self._fill(memoryview(data))

    def put(self, parts: list[memoryview], release: Callable[[], None], what: str = "") -> None:
        """Append a record; when this returns or raises, ``release`` was called, and its memory is no longer used."""
        try:
            for part in parts:
                step = SEGMENT_BYTES if part.nbytes >= LARGE else max(1, part.nbytes)
                for start in range(0, part.nbytes, step):
                    self.put_small(part[start : start + step], what)
        finally:
            release()

    def end(self) -> None:
        """Do nothing: the last part is sent by :meth:`finish`."""

    def finish(self) -> Segments:
        """Send the last part, and let the object appear.

        Returns:
            The table of digests.

        Raises:
            BaseException: The first error.
        """
        if self.error is not None:
            raise self.error
        writer = self._writer
        if writer is None:
            raise StorageError(f"{self._path}: the object was given up before it was complete")
        if self._part:
            self._send()
        self._call(writer.close, "complete")
        self._writer = None
        return Segments(self._lengths, self._digests, self._algorithm)

    def fail(self, error: BaseException) -> None:
        """Note an error: the object cannot be completed."""
        self.error = self.error or error

    def stop(self) -> None:
        """Give the object up unless it is complete; may be called twice."""
        writer, self._writer = self._writer, None
        self._part = bytearray()
        if writer is not None:
            writer.abort()

    def _fill(self, data: memoryview) -> None:
        if self._count is not None:
            self._count(data.nbytes)
        while data.nbytes:
            room = self._part_bytes - len(self._part)
            self._part += data[:room]
            data = data[room:]
            if len(self._part) == self._part_bytes:
                self._send()

    def _send(self) -> None:
        writer, part = self._writer, memoryview(self._part)
        self._part = bytearray()  # the store's client has the old one until it has arrived
        if writer is None:
            raise StorageError(f"{self._path}: the object was given up before it was complete")
        self._call(lambda: writer.write(part), f"write {self._what} and what precedes it to" if self._what else "write")

    def _call(self, call: Callable[[], ObjectWriter | None], action: str) -> ObjectWriter | None:
        try:
            return call()
        except CheckpointingException:
            raise
        except Exception as exc:  # stores raise errors of many kinds
            raise StorageError(f"cannot {action} {self._path}: {type(exc).__name__}: {exc}") from exc


def choose_part_bytes(nbytes: int) -> int:
    """Return the size of an object's parts: ``SHARDCKPT_REMOTE_PART_MIB``, or more for an object of many such parts."""
    return max(settings.remote_part_mib() * _MIB, -(-nbytes // _MOST_PARTS))
