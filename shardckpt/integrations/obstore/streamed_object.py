"""An object that is sent in parts by a thread, while the caller makes the next ones."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import obstore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from obstore.store import ObjectStore


class _AbortedError(Exception):
    """Makes obstore abort the multipart upload whose parts it takes."""


class StreamedObject:
    """An object that appears with :meth:`close`; one part is one request, more are a multipart upload.

    Each part but the last has ``part_bytes``; ``parts`` are on their way at a time. ``calling`` makes the context
    manager in which obstore is called.
    """

    def __init__(
        self,
        store: ObjectStore,
        path: str,
        part_bytes: int,
        parts: int,
        calling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._store = store
        self._path = path
        self._part_bytes = part_bytes
        self._parts = parts
        self._calling = calling
        #: The first part, until a second one shows that the object is large.
        self._first: memoryview | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        #: The part that obstore takes next. One is enough: obstore itself holds those on their way.
        self._next: memoryview | None = None
        self._closed = False
        self._aborted = False
        self._error: BaseException | None = None

    def write(self, part: memoryview) -> None:
        """Hand over the next part, and wait until obstore takes it, which first sends others if it holds too many."""
        if self._thread is None:
            if self._first is None:
                self._first = part
                return
            self._start()
            with self._changed:
                self._next, self._first = self._first, None
                self._changed.notify_all()
        with self._changed:
            self._wait_until_taken()
            self._next = part
            self._changed.notify_all()
            # a third part would be in memory if the caller filled it before obstore has taken this one
            self._wait_until_taken()

    def close(self) -> None:
        """Send what is left, and wait until the object is there."""
        if self._error is not None:
            raise self._error
        if self._thread is None:
            with self._calling():
                obstore.put(self._store, self._path, self._first or b"", use_multipart=False)
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Give the object up, and wait until the parts that have arrived are deleted."""
        self._first = None
        if self._thread is not None:
            with self._changed:
                self._aborted = True
                self._changed.notify_all()
            self._thread.join()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._send, name="shardckpt-stream", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as exc:  # not Ctrl-C, during which the thread may have begun
            self._thread = None  # there is none that abort() could wait for
            self._error = exc
            raise

    def _wait_until_taken(self) -> None:
        """Wait, with the lock, until obstore has taken the next part; raise its error if it has failed."""
        self._changed.wait_for(lambda: self._next is None or self._error is not None)
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        try:
            with self._calling():
                obstore.put(
                    self._store,
                    self._path,
                    self._take_parts(),
                    use_multipart=True,
                    chunk_size=self._part_bytes,
                    # one less: obstore takes the next part while this many are on their way
                    max_concurrency=self._parts - 1,
                )
        except BaseException as exc:  # noqa: BLE001 - write() or close() raises it
            with self._changed:
                self._error = exc
                self._next = None
                self._changed.notify_all()

    def _take_parts(self) -> Iterator[memoryview]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed or self._aborted)
                if self._aborted:
                    raise _AbortedError
                part, self._next = self._next, None
                self._changed.notify_all()
            if part is None:
                return
            yield part
            del part  # obstore alone has it now
