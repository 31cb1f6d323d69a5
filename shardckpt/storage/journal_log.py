"""Where a journal's lines are: in one file of a staging directory, or in objects of a store, which do not grow."""

from __future__ import annotations

import json
import os
import zlib
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from shardckpt import settings
from shardckpt.storage.abilities import on_store
from shardckpt.storage.filesystem import open_new, wrap_os_errors, write_all
from shardckpt.storage.input_file import read_file
from shardckpt.storage.remote import RemotePath, list_objects

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: The journal's name in a staging directory; on a store its lines have the name with their numbers.
JOURNAL_NAME = ".journal"
#: The first of these objects.
FIRST_LINE = f"{JOURNAL_NAME}-0"
_HEX = 8
#: Most bytes of a line on a store: it has the digests of one object.
_LINE_LIMIT = 1 << 28


class JournalLog(ABC):
    """The lines of the journal of a folder. :meth:`begin`, or :meth:`read` and :meth:`go_on`, comes before the rest."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a journal without lines."""

    @abstractmethod
    def read(self) -> list[dict[str, Any]]:
        """Return the complete lines that another process has left."""

    @abstractmethod
    def go_on(self, files: Mapping[str, int]) -> bool:
        """Make the folder ready for more, with so many bytes of each file; return False if some are not there."""

    @abstractmethod
    def append(self, line: dict[str, Any]) -> None:
        """Add a line."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The names of its files in the folder."""

    def close(self) -> None:  # noqa: B027 - objects need none of it
        """Close the open files; may be called twice."""


class FileLog(JournalLog):
    """The lines are in a file, which lives as long as the system that wrote it: nothing is fsynced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / JOURNAL_NAME
        self._fd = -1
        self._size = 0

    def begin(self) -> None:
        """Create the file."""
        self._fd = open_new(self._path)

    def read(self) -> list[dict[str, Any]]:
        """Return the lines up to one that was cut by the kill."""
        lines: list[dict[str, Any]] = []
        data = b""
        with suppress(OSError):  # it was killed before there was one, or another process has taken it
            data = self._path.read_bytes()
        for raw in data.splitlines(keepends=True):
            if (line := _decode(raw)) is None:
                break
            lines.append(line)
            self._size += len(raw)
        return lines

    def go_on(self, files: Mapping[str, int]) -> bool:
        """Remove unknown files, and cut the others to their known lengths; see the base."""
        for path in [path for path in self._folder.rglob("*") if path.is_symlink() or not path.is_dir()]:
            name = path.relative_to(self._folder).as_posix()
            with wrap_os_errors("remove", path):
                if name not in files and name != JOURNAL_NAME:
                    path.unlink()
        for name, nbytes in files.items():
            path = self._folder / name
            with wrap_os_errors("cut", path):
                if not path.is_file() or path.stat().st_size < nbytes:
                    return False
                os.truncate(path, nbytes)
        with wrap_os_errors("open", self._path):
            os.truncate(self._path, self._size)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return True

    def append(self, line: dict[str, Any]) -> None:
        """Write it to the end of the file."""
        data = _encode(line)
        write_all(self._fd, self._path, memoryview(data), self._size)
        self._size += len(data)

    @property
    def names(self) -> list[str]:
        """The file's name."""
        return [JOURNAL_NAME]

    def close(self) -> None:
        """Close the file."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            with suppress(OSError):  # on a file server: another process continues from the lines that are there
                os.close(descriptor)


class ObjectLog(JournalLog):
    """Each line is an object: written lines are not sent again with every new one."""

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder.refresh()
        self._lines = 0
        #: Lines behind an incomplete one: they would count again once a new line stands in its place.
        self._stale: set[str] = set()

    def begin(self) -> None:
        """Do nothing: the first line makes it."""

    def read(self) -> list[dict[str, Any]]:
        """Return the lines up to the first number that is missing."""
        lines: list[dict[str, Any]] = []
        paths = takewhile(RemotePath.is_file, (self._folder / _name_line(number) for number in count()))
        with ThreadPoolExecutor(settings.remote_threads(), "shardckpt-journal") as threads:
            # of this thread's context: it may bound the attempts of a request
            contexts = (copy_context() for _ in count())
            for line in threads.map(lambda path, own: own.run(_read_line, path), paths, contexts):
                if line is None:
                    break
                lines.append(line)
        self._lines = len(lines)
        return lines

    def go_on(self, files: Mapping[str, int]) -> bool:
        """Change nothing yet: another process may take this over first, and its lines must stay."""
        found = list_objects(self._folder.folder)
        if not files.items() <= found.items():
            return False
        self._stale = {name for name in found if is_journal(name)}.difference(self.names)
        return True

    def append(self, line: dict[str, Any]) -> None:
        """Write an object; before the first, remove the lines that :meth:`read` did not return."""
        if self._stale:
            self._folder.delete_all(self._stale)
            self._stale = set()
        (self._folder / _name_line(self._lines)).write(_encode(line))
        self._lines += 1

    @property
    def names(self) -> list[str]:
        """The objects' names."""
        return [*(_name_line(number) for number in range(self._lines)), *sorted(self._stale)]


def _read_line(path: Path) -> dict[str, Any] | None:
    return _decode(read_file(path, _LINE_LIMIT))


def is_journal(name: str) -> bool:
    """Return whether a file or object is a journal, or a line of one."""
    return name.partition("-")[0] == JOURNAL_NAME


def open_log(folder: Path) -> JournalLog:
    """Return the lines of the journal of a folder; nothing is opened yet."""
    return FileLog(folder) if (remote := on_store(folder)) is None else ObjectLog(remote)


def _name_line(number: int) -> str:
    return f"{JOURNAL_NAME}-{number}"


def _encode(line: dict[str, Any]) -> bytes:
    text = json.dumps(line).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _decode(raw: bytes) -> dict[str, Any] | None:
    """Return a line; None if it is not complete."""
    text = raw[_HEX + 1 : -1]
    if not raw.endswith(b"\n") or raw[:_HEX] != b"%08x" % zlib.crc32(text):
        return None
    found: dict[str, Any] = json.loads(text)
    return found
