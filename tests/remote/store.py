"""A store with faults: fsspec's protocol ``faulty://`` over a directory, with a journal of all requests.

Journal and faults are files beside the objects, so that all processes of a test share them. An object appears whole, as
on any object store.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem


class Request(NamedTuple):
    """A request that came to the store: what, of which object, and how many bytes went out."""

    kind: str
    name: str
    nbytes: int = 0


class Store:
    """A directory that ``faulty://`` serves, seen from a test.

    Args:
        place: The directory.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir(exist_ok=True)
        self.url = f"faulty://{place}/c"
        self.objects = place / "c"

    def names(self) -> set[str]:
        """The objects in the checkpoint's folder."""
        return {path.name for path in self.objects.iterdir()} if self.objects.exists() else set()

    def requests(self, kind: str) -> list[Request]:
        """What came so far, in order."""
        journal = self._place / "journal"
        lines = journal.read_text().splitlines() if journal.exists() else []
        return [request for request in (Request(*json.loads(line)) for line in lines) if request.kind == kind]

    def forget(self) -> None:
        """Empty the journal: requests are counted from here on."""
        (self._place / "journal").unlink(missing_ok=True)

    def fails(self, kind: str, first: int, last: int | None = None, how: str = "before") -> None:
        """Let requests of a kind fail, from the ``first`` one in the journal to the ``last``.

        Args:
            kind: ``put``, ``read``, ``delete``, ``list``.
            first: Counted from 1.
            last: By default there is no last.
            how: ``before`` or ``after`` it has done its work; ``kill-before`` and ``kill-after`` end the process.
        """
        with (self._place / "faults").open("a") as faults:
            faults.write(json.dumps([kind, first, last or 1 << 30, how]) + "\n")

    def hides(self, name: str) -> None:
        """Let listings leave out an object."""
        (self._place / "hidden").write_text(name)

    def works(self) -> None:
        """No faults from here on."""
        for name in ("faults", "hidden"):
            (self._place / name).unlink(missing_ok=True)
        self.forget()


class FaultyFileSystem(AbstractFileSystem):
    """The store as fsspec sees it."""

    protocol = "faulty"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("faulty://").rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The objects in a folder."""
        folder = Path(path)
        with _Noted(folder, "list", ""):
            if not folder.is_dir():
                raise FileNotFoundError(path)
            hidden = folder.parent / "hidden"
            without = hidden.read_text() if hidden.exists() else None
            found = []
            for entry in sorted(folder.iterdir()):
                with suppress(FileNotFoundError):  # deleted meanwhile: a store lists in one step
                    size, kind = entry.stat().st_size, "directory" if entry.is_dir() else "file"
                    found.append({"name": str(entry), "size": size, "type": kind})
        return [entry for entry in found if Path(entry["name"]).name != without]

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is an object or a folder."""
        return Path(path).exists()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """A range of an object."""
        file = Path(path)
        assert start is not None
        assert end is not None
        with _Noted(file.parent, "read", file.name, end - start), file.open("rb") as opened:
            opened.seek(start)
            return opened.read(end - start)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Make a file an object, in one step."""
        file = Path(rpath)
        with _Noted(file.parent, "put", file.name, Path(lpath).stat().st_size):
            file.parent.mkdir(exist_ok=True)
            part = file.parent.parent / f"part-{os.getpid()}-{file.name}"
            shutil.copyfile(lpath, part)
            part.rename(file)

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        file = Path(path)
        with _Noted(file.parent, "delete", file.name):
            file.unlink()

    def rmdir(self, path: str) -> None:
        """Remove a folder that is empty."""
        Path(path).rmdir()


class _Noted:
    """Notes a request, and lets it fail if it is one of those that do."""

    def __init__(self, folder: Path, kind: str, name: str, nbytes: int = 0) -> None:
        place = folder.parent
        with (place / "journal").open("a+") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            journal.write(json.dumps(Request(kind, name, nbytes)) + "\n")
            journal.flush()
            journal.seek(0)
            number = sum(json.loads(line)[0] == kind for line in journal)
        faults = place / "faults"
        rules = [json.loads(line) for line in faults.read_text().splitlines()] if faults.exists() else []
        bad = (how for what, first, last, how in rules if what == kind and first <= number <= last)
        self._how = next(bad, "")
        self._name = name

    def __enter__(self) -> None:
        self._fail("before")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._fail("after")

    def _fail(self, when: str) -> None:
        if self._how == f"kill-{when}":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == when:
            raise ConnectionError(f"the store does not answer about {self._name!r}")


class LoopedFileSystem(AsyncFileSystem):
    """A directory behind an event loop, with listings that are kept, as fsspec's cloud filesystems have them."""

    protocol = "looped"
    _listings: ClassVar[dict[str, list[Any]]] = {}
    _local = LocalFileSystem(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("looped://").rstrip("/")

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget all listings."""
        self._listings.clear()

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        if path not in self._listings:
            self._listings[path] = self._local.ls(path, detail)
        return self._listings[path]

    async def _exists(self, path: str, **_: Any) -> bool:
        return self._local.exists(path)  # type: ignore[no-any-return]

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._local.cat_file(path, start, end)  # type: ignore[no-any-return]

    async def _put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self._local.put_file(lpath, rpath)

    async def _rm_file(self, path: str, **_: Any) -> None:
        self._local.rm_file(path)


fsspec.register_implementation("looped", LoopedFileSystem, clobber=True)
fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)

__all__ = ["FaultyFileSystem", "LoopedFileSystem", "Request", "Store"]
