"""The content of a new object of a store: digested and cut into parts, which are sent while the next ones are filled.

Nothing is written to a local disk. Each file has at most ``SHARDCKPT_REMOTE_PARTS`` parts on their way, one that waits
for its turn, and one that is being filled.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.storage.digest import SEGMENT_BYTES
from shardckpt.storage.store_errors import mask_password
from shardckpt.storage.stream import ContentStream
from shardckpt.tensors.memory import LARGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from shardckpt.storage.digest import Segments
    from shardckpt.storage.store_abilities import ObjectWriter, StreamsWrites


class ObjectStream(ContentStream):
    """The content of a new object; ``count`` is called with the number of bytes appended since the last call."""

    def __init__(
        self,
        folder: StreamsWrites,
        path: Path,
        name: str,
        algorithm: str,
        part_bytes: int,
        count: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(algorithm)
        #: Where the object appears, for errors; a save to a store has a local directory, too.
        self._path = f"{url}/{name}" if (url := mask_password(getattr(folder, "url", ""))) else path
        self._part_bytes = part_bytes
        self._count = count
        #: The part that is being filled, and how many bytes it has; it is longer where its memory is used again.
        self._part = bytearray()
        self._filled = 0
        #: Parts that the store's client has, or has had.
        self._sent: list[bytearray] = []
        #: Sends an object of one part, once it has ended.
        self._closing: ThreadPoolExecutor | None = None
        self._closed: Future[None] | None = None
        self._writer: ObjectWriter | None = self._call(lambda: folder.open_write(name, self._part_bytes), "begin")

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
        """Send an object of one part, by a thread: several small ones are then on their way at a time.

        Of a larger one, :meth:`finish` sends the last part.
        """
        if self.error is None and self._writer is not None and not self._sent and self._closing is None:
            self._closing = ThreadPoolExecutor(1, "shardckpt-close")
            # with the caller's context: a training that waits for it is as patient in this thread
            self._closed = self._closing.submit(copy_context().run, self._close, self._writer)

    def _close(self, writer: ObjectWriter) -> None:
        """Send the last part, and let the object appear."""
        if self._filled:
            self._send()
        self._call(writer.close, "complete")

    def finish(self) -> Segments:
        """Send the last part, and let the object appear; see the base."""
        if self.error is None:
            writer = self._writer
            if writer is None:
                raise StorageError(f"{self._path}: the object was given up before it was complete")
            if self._closed is None:
                self._close(writer)
            else:
                self._closed.result()
            self._writer = None
            self._sent.clear()
        return super().finish()

    def stop(self) -> None:
        """Give the object up unless it is complete; may be called twice."""
        if self._closing is not None:
            self._closing.shutdown()  # before the writer is given up: it may have only one caller
        writer, self._writer = self._writer, None
        self._part, self._filled = bytearray(), 0
        self._sent.clear()
        if writer is not None:
            writer.abort()

    def _fill(self, data: bytes | memoryview) -> None:
        data = memoryview(data)
        if self._count is not None:
            self._count(data.nbytes)
        while data.nbytes:
            piece = data[: self._part_bytes - self._filled]
            end = self._filled + piece.nbytes
            if end <= len(self._part):
                with memoryview(self._part) as view:
                    view[self._filled : end] = piece
            else:  # the first parts, which grow: most objects are small
                self._part += piece
            data, self._filled = data[piece.nbytes :], end
            if end == self._part_bytes:
                self._send()

    def _send(self) -> None:
        writer, part = self._writer, memoryview(self._part)[: self._filled]
        self._sent.append(self._part)  # the store's client has it until it has arrived
        self._part, self._filled = self._take_part(), 0
        if writer is None:
            raise StorageError(f"{self._path}: the object was given up before it was complete")
        what = f"write {self._what} and the bytes before it to" if self._what else "write"
        self._call(lambda: writer.write(part), what)

    def _take_part(self) -> bytearray:
        """Return the memory of a part that has arrived; new memory if there is none.

        With new memory for each part a save of 512 MiB took 50,000 page faults in place of 33,000.
        """
        for number, part in enumerate(self._sent):
            try:
                part.pop()  # refused while the client has a view of it
            except BufferError:
                continue
            part.append(0)
            return self._sent.pop(number)
        return bytearray()

    def _call(self, call: Callable[[], ObjectWriter | None], action: str) -> ObjectWriter | None:
        try:
            return call()
        except CheckpointingException:
            raise
        except Exception as exc:  # stores raise errors of many kinds
            raise StorageError(f"cannot {action} {self._path}: {type(exc).__name__}: {exc}") from exc


class SentObject(ContentStream):
    """The content of an object that an earlier process has sent: nothing of it is sent again.

    ``refuse`` makes the error of an append. The object stays for the next process until the save is given up.
    """

    def __init__(
        self, lengths: list[int], digests: list[int], algorithm: str, refuse: Callable[[], CheckpointingException]
    ) -> None:
        super().__init__(algorithm)
        self._lengths.extend(lengths)
        self._digests.extend(digests)
        self._refuse = refuse

    def put(self, parts: list[memoryview], release: Callable[[], None], what: str = "") -> None:  # noqa: ARG002
        """Refuse a record that the object does not have."""
        release()
        raise self._refuse()

    def _fill(self, data: bytes | memoryview) -> None:  # noqa: ARG002 - as of a stream
        raise self._refuse()
