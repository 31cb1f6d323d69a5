"""A store that fails or is slow on request: fsspec's protocol ``faulty://`` over a directory, with a journal.

Journal and faults are files next to the objects, so that all processes of a test share them. An object appears whole,
as on any object store.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec  # type: ignore[import-untyped]
from fsspec import AbstractFileSystem

#: A file in the store's directory, by which requests for objects at any depth find the journal.
_ROOT = ".faulty-store"


class Request(NamedTuple):
    """A request that came to the store: its kind, its object, and the bytes that went out."""

    kind: str
    name: str
    nbytes: int = 0


class FaultyStore:
    """A directory that ``faulty://`` serves, seen from a test; ranks and worker processes see the same store.

    A process that opens the URL has imported this module: functions that ranks run import ``shardckpt.testing``'s
    FaultyStore.

    Args:
        place: The directory, which is made if it is missing.

    Attributes:
        url: A checkpoint's URL in the store.
        objects: The directory that has that checkpoint's objects as files.

    Example:
        ::

            store = FaultyStore(tmp_path / "store")
            store.fails("put", 3)  # the third upload and all later ones
            with pytest.raises(StorageError):
                dist_checkpointing.save(state_dict, store.url)
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir(exist_ok=True)
        (place / _ROOT).touch()
        self.url = f"faulty://{place}/c"
        self.objects = place / "c"

    def names(self) -> set[str]:
        """Return the names of the objects in the checkpoint's folder."""
        return {path.name for path in self.objects.iterdir()} if self.objects.exists() else set()

    def requests(self, kind: str) -> list[Request]:
        """Return the requests of a kind that came so far, in order."""
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

    def delays(self, kind: str, seconds: float) -> None:
        """Let each request of a kind take so many seconds longer."""
        with (self._place / "delays").open("a") as delays:
            delays.write(json.dumps([kind, seconds]) + "\n")

    def hides(self, name: str) -> None:
        """Let listings leave out an object, as stores of the past did for a while."""
        (self._place / "hidden").write_text(name)

    def works(self) -> None:
        """End all faults and delays, and empty the journal."""
        for name in ("delays", "faults", "hidden"):
            (self._place / name).unlink(missing_ok=True)
        self.forget()


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The store as fsspec sees it; an object appears in one step."""

    protocol = "faulty"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("faulty://").rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: ARG002 - fsspec says it
        """The objects in a folder."""
        folder = Path(path)
        with _JournaledRequest(folder / "listing", "list", ""):
            if not folder.is_dir():
                raise FileNotFoundError(path)
            hidden = _find_place(folder / "listing") / "hidden"
            without = hidden.read_text() if hidden.exists() else None
            found = []
            for entry in sorted(folder.iterdir()):
                with suppress(FileNotFoundError):  # deleted meanwhile: a store lists in one step
                    size, kind = entry.stat().st_size, "directory" if entry.is_dir() else "file"
                    found.append({"name": str(entry), "size": size, "type": kind})
        return [entry for entry in found if Path(str(entry["name"])).name != without]

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is an object or a folder."""
        return Path(path).exists()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """A range of an object."""
        file = Path(path)
        if start is None or end is None:
            raise ValueError(f"{path} is read as a whole: a checkpoint's files are read by ranges")
        with _JournaledRequest(file, "read", _name(file), end - start), file.open("rb") as opened:
            opened.seek(start)
            return opened.read(end - start)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Make a file an object, in one step."""
        file = Path(rpath)
        with _JournaledRequest(file, "put", _name(file), Path(lpath).stat().st_size):
            file.parent.mkdir(parents=True, exist_ok=True)
            part = _find_place(file) / f"part-{os.getpid()}-{file.name}"
            shutil.copyfile(lpath, part)
            part.rename(file)

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        file = Path(path)
        with _JournaledRequest(file, "delete", _name(file)):
            file.unlink()

    def rmdir(self, path: str) -> None:
        """Remove a folder that is empty."""
        Path(path).rmdir()


def _find_place(path: Path) -> Path:
    """Return the store's directory, which has the journal."""
    return next((folder for folder in path.parents[1:] if (folder / _ROOT).exists()), path.parent.parent)


def _name(file: Path) -> str:
    """Return an object's path below the checkpoint's URL."""
    return "/".join(file.relative_to(_find_place(file)).parts[1:])


class _JournaledRequest:
    """Notes a request, and lets it fail if it is to fail."""

    def __init__(self, path: Path, kind: str, name: str, nbytes: int = 0) -> None:
        place = _find_place(path)
        with (place / "journal").open("a+") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            journal.write(json.dumps(Request(kind, name, nbytes)) + "\n")
            journal.flush()
            journal.seek(0)
            number = sum(json.loads(line)[0] == kind for line in journal)
        rules = _lines(place / "faults")
        self._delay = sum(seconds for what, seconds in _lines(place / "delays") if what == kind)
        bad = (how for what, first, last, how in rules if what == kind and first <= number <= last)
        self._how = next(bad, "")
        self._name = name

    def __enter__(self) -> None:
        time.sleep(self._delay)
        self._fail("before")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._fail("after")

    def _fail(self, when: str) -> None:
        if self._how == f"kill-{when}":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == when:
            raise ConnectionError(f"the store does not answer about {self._name!r}")


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
