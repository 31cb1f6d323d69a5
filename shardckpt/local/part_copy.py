"""The two ends of a copy of a stored part: read it from one disk, check it and write it to another."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.commit.commit import publish_staging, staging_directory
from shardckpt.errors import CorruptCheckpointError
from shardckpt.local.messages import Buffers, list_messages
from shardckpt.manifest.models import Record
from shardckpt.manifest.names import MARKER_LIMIT, MARKER_NAME, RECORD_LIMIT, RECORD_NAME
from shardckpt.storage.digest import digest_function
from shardckpt.storage.filesystem import check_file_name, make_folders, refuse_linked_folders
from shardckpt.storage.input_file import open_existing, read_file
from shardckpt.storage.new_file import NewFile
from shardckpt.tensors.memory import LARGE

if TYPE_CHECKING:
    from pathlib import Path


class Head(NamedTuple):
    """A checkpoint's JSON files."""

    #: The manifest file, whose presence makes a directory a checkpoint.
    marker: bytes
    #: The record of its files and their digests.
    record: bytes


class Outgoing:
    """A part on this rank's disk, in the directory ``path``, that is sent to other ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.head = Head(read_file(path / MARKER_NAME, MARKER_LIMIT), read_file(path / RECORD_NAME, RECORD_LIMIT))
        self.messages = list_messages(_parse_record(self.head, str(path)))
        self.buffers = Buffers(self.messages)

    def read(self, number: int) -> None:
        """Read message ``number`` into the buffers."""
        message = self.messages[number]
        path = self._path / check_file_name(message.name)
        refuse_linked_folders(self._path, message.name)
        with open_existing(path) as file:
            file.read_into(self.buffers.view(number), message.span.start)


class Incoming:
    """A part that this rank receives: in a staging directory until it is complete and checked.

    ``target`` is the directory that it is published as, and ``origin`` names the sender in errors.
    """

    def __init__(self, target: Path, head: Head, origin: str) -> None:
        self._target = target
        self._head = head
        self._origin = origin
        record = _parse_record(head, origin)
        self._digest = digest_function(record.digest_algorithm)
        self.messages = list_messages(record)
        self.buffers = Buffers(self.messages)
        self._waiting = list(record.files)
        self._file: NewFile | None = None
        self._stack = ExitStack()
        self._staging = self._stack.enter_context(staging_directory(target))

    def write(self, number: int) -> None:
        """Check message ``number``, which is in the buffers, and write it; call it for the messages in their order."""
        message, view = self.messages[number], self.buffers.view(number)
        for start, stop, digest in message.span.segments:
            if self._digest(view[start - message.span.start : stop - message.span.start]) != digest:
                raise CorruptCheckpointError(
                    f"bytes {start} to {stop} of {self._target.name}/{message.name}, from {self._origin}, are not "
                    "those that were written (digest differs): they were damaged on its disk, or in transit"
                )
        while self._file is None or self._file.path != self._staging / message.name:  # empty files have no message
            self._next_file()
        self._file.write(view, message.span.start)

    def complete(self) -> None:
        """Complete all files, and make them durable."""
        while self._file is not None or self._waiting:
            self._next_file()
        # the marker comes last: without it the directory is no checkpoint
        for name, content in ((RECORD_NAME, self._head.record), (MARKER_NAME, self._head.marker)):
            file = NewFile(self._staging / name)
            try:
                file.write(memoryview(content), 0)
                file.finish(len(content))
            finally:
                file.close()

    def publish(self) -> None:
        """Rename the staging directory to the target, which must not exist."""
        publish_staging(self._staging, self._target)

    def close(self) -> None:
        """Close the files, and remove the staging directory if it was not published."""
        if self._file is not None:
            self._file.close()
        self._stack.close()

    def _next_file(self) -> None:
        """Complete the file that is being written, if any, and begin the next one of the record."""
        if self._file is not None:
            self._file.finish(self._file.expected)
            self._file.close()
            self._file = None
        if self._waiting:
            record = self._waiting.pop(0)
            # another rank has sent the name: it must not leave the directory
            path = self._staging / check_file_name(record.name)
            make_folders(self._staging, record.name)
            self._file = NewFile(path, record.size)
            if record.size >= LARGE:
                self._file.reserve(record.size)


def _parse_record(head: Head, origin: str) -> Record:
    try:
        return Record.parse(head.record)
    except (ValueError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{RECORD_NAME} of {origin} is damaged: {exc!s:.500}") from exc
