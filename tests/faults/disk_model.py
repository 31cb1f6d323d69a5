"""A disk of which only what was fsynced is sure: replays a traced program, and says what a power cut may leave.

The model is POSIX's, stricter than file systems in use: the bytes of a file are sure after an fsync of the file, its
name after an fsync of the directory. What is not sure is there, is not, or, bytes, is there in part. A rename is one
change: both of its names, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from pathlib import Path

PAGE = 4096


@dataclass(eq=False)
class File:
    """A file's sure bytes, and the changes since: bytes at a place, or a new size."""

    sure: bytes = b""
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)

    def sync(self) -> None:
        """All bytes are sure."""
        self.sure, self.pending = self.content(lambda _: True), []

    def content(self, keeps: Keep) -> bytes:
        """The sure bytes with the changes, whole or by page, that are kept."""
        found = bytearray(self.sure)
        for change in self.pending:
            if isinstance(change, int):
                if keeps("size"):
                    del found[change:]
                    found += bytes(change - len(found))
                continue
            offset, data = change
            if not keeps("write"):
                continue
            for begin in range(0, len(data), PAGE):
                if keeps("page"):
                    piece = data[begin : begin + PAGE]
                    found += bytes(max(0, offset + begin + len(piece) - len(found)))
                    found[offset + begin : offset + begin + len(piece)] = piece
        return bytes(found)


@dataclass(eq=False)
class Directory:
    """A directory's entries as running programs see them, and those that are sure."""

    now: dict[str, Node] = field(default_factory=dict)
    sure: dict[str, Node] = field(default_factory=dict)


@dataclass(eq=False)
class Link:
    """A symbolic link, which is whole or not there."""

    target: str


class Disk:
    """A tree of directories, files and links; paths are relative to its root, ``""``."""

    def __init__(self) -> None:
        self.root = Directory()
        #: Changes of entries that are not sure, in order: each is of one or two entries, by directory and name.
        self._pending: list[list[tuple[Directory, str, Node | None]]] = []

    def read(self, path: Path) -> None:
        """Hold what is below a real directory, all of it sure."""
        _read(path, self.root)

    def find(self, path: str) -> Node | None:
        """What a path names now."""
        node: Node | None = self.root
        for name in filter(None, path.split("/")):
            node = node.now.get(name) if isinstance(node, Directory) else None
        return node

    def create(self, path: str, node: Node) -> None:
        """Give a new file or directory, or a linked one, its name."""
        self._change([(path, node)])

    def remove(self, path: str) -> None:
        """Take a name away."""
        self._change([(path, None)])

    def rename(self, old: str, new: str, *, exchange: bool = False) -> None:
        """Give what has one name another, or exchange what two names have."""
        node, other = self.find(old), self.find(new)
        self._change([(old, other if exchange else None), (new, node)])

    def sync(self, path: str) -> None:
        """Make a file's bytes, or a directory's entries, sure."""
        node = self.find(path)
        if isinstance(node, File):
            node.sync()
        elif isinstance(node, Directory):
            left = []
            for change in self._pending:
                if any(directory is node for directory, _, _ in change):
                    _apply(change)
                else:
                    left.append(change)
            self._pending = left

    def materialize(self, path: Path, names: Keep, data: Keep) -> None:
        """Write what a power cut leaves below a new directory.

        Args:
            path: The directory.
            names: Says of each change of an entry that is not sure whether it is there.
            data: Says it of each change of a file, and of each page of one.
        """
        entries: dict[tuple[int, str], Node | None] = {}
        for change in self._pending:
            if names("name"):
                entries.update({(id(directory), name): node for directory, name, node in change})
        _write(path, self.root, entries, data)

    def _change(self, named: list[tuple[str, Node | None]]) -> None:
        change = []
        for path, node in named:
            above, _, name = path.rpartition("/")
            directory = self.find(above)
            if not isinstance(directory, Directory):
                raise KeyError(f"{path!r}: there is no directory {above!r}: the trace is not understood")
            change.append((directory, name, node))
        for directory, name, node in change:
            if node is None:
                del directory.now[name]
            else:
                directory.now[name] = node
        self._pending.append(change)


if TYPE_CHECKING:
    from collections.abc import Callable

    Node = File | Directory | Link
    Keep = Callable[[str], bool]


def policies(seeds: int, generator: random.Random) -> dict[str, tuple[Keep, Keep]]:
    """What to keep of names and of data, by name: the extremes, and random choices."""

    def everything(_: str) -> bool:
        return True

    def nothing(_: str) -> bool:
        return False

    def sizes(kind: str) -> bool:
        return kind == "size"

    def torn(kind: str) -> bool:
        return kind != "page" or generator.random() < 0.7

    def some(_: str) -> bool:
        return generator.random() < 0.5

    found: dict[str, tuple[Keep, Keep]] = {
        "all there": (everything, everything),
        "all dropped": (nothing, nothing),
        "names without data": (everything, nothing),
        "data without names": (nothing, everything),
        "names and sizes, zeros": (everything, sizes),
        "names, torn data": (everything, torn),
    }
    return {**found, **{f"some of each {n}": (some, some) for n in range(seeds)}}


def _apply(change: list[tuple[Directory, str, Node | None]]) -> None:
    for directory, name, node in change:
        if node is None:
            directory.sure.pop(name, None)
        else:
            directory.sure[name] = node


def _read(path: Path, directory: Directory) -> None:
    for entry in path.iterdir():
        node: Node
        if entry.is_symlink():
            node = Link(str(entry.readlink()))
        else:
            node = Directory() if entry.is_dir() else File(entry.read_bytes())
        if isinstance(node, Directory):
            _read(entry, node)
        directory.now[entry.name] = directory.sure[entry.name] = node


def _write(path: Path, directory: Directory, entries: dict[tuple[int, str], Node | None], data: Keep) -> None:
    path.mkdir()
    changed = {name: node for (owner, name), node in entries.items() if owner == id(directory)}
    for name, node in {**directory.sure, **changed}.items():
        if isinstance(node, Directory):
            _write(path / name, node, entries, data)
        elif isinstance(node, Link):
            (path / name).symlink_to(node.target)
        elif node is not None:
            (path / name).write_bytes(node.content(data))
