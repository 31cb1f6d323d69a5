"""What the tests of replacement share."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
from obstore.store import MemoryStore

from shardckpt.commit import Owner
from shardckpt.integrations.fsspec.folder import open_folder as open_by_fsspec
from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.manifest import find_generation
from shardckpt.plugins import get_plugin_manager, hookimpl
from shardckpt.plugins.stores import open_folder
from shardckpt.storage import RemotePath
from tests.commit import owners
from tests.remote import jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLD, NEW, LATER = 1.0, 2.0, 3.0
CALLS = ("files", "tree", "read", "read_into", "read_tagged", "upload", "open_write", "create", "replace", "delete")


class Killed(ValueError):
    """Ends a save, as a kill does: no request comes through any more. No kind of error that is tried again."""


class Stopping:
    """Counts the requests of a store, and lets none through from the n-th on, or loses that one's answer, too."""

    def __init__(self) -> None:
        self.count = 0
        self.at = 0
        self.is_answer_lost = False
        self.lock = threading.Lock()

    def stop(self, at: int, *, is_answer_lost: bool) -> None:
        """Begin to count."""
        self.count, self.at, self.is_answer_lost = 0, at, is_answer_lost

    def request(self, call: Callable[..., Any], *args: Any) -> Any:
        """Send a request, unless the save is dead."""
        with self.lock:
            self.count += 1
            is_dead = bool(self.at) and self.count >= self.at + self.is_answer_lost
            is_last = bool(self.at) and self.is_answer_lost and self.count == self.at
        if is_dead:
            raise Killed("killed")
        found = call(*args)
        if is_last:
            raise Killed("killed")
        return found


#: fsspec's store in memory is one for the process: each place has a folder of its own in it.
numbers = itertools.count()


class Place:
    """Serves objects://, of which each call may be the last.

    Attributes:
        url: A URL.
        stopping: Stops its requests.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.url = kind, "objects://bucket/step-1"
        self.stopping = Stopping()
        self._memory = MemoryStore()
        self._number = next(numbers)

    @hookimpl(tryfirst=True)
    def shardckpt_filesystem(self, url: str) -> Any:
        """Return the folder."""
        if not url.startswith("objects://"):
            return None
        path = url.removeprefix("objects://")
        if self.kind == "obstore":
            found: Any = ObstoreFolder(url, self._memory, path)
        else:
            found = open_by_fsspec(f"memory://{self._number}/{path}")
            found.url = url
        for name in (*CALLS, "delete_many", "folders"):
            if (call := getattr(found, name, None)) is not None:
                setattr(found, name, self._guard(call))
        return found

    def _guard(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self.stopping.request(call, *args)

    def folder(self) -> Any:
        """The folder. No property: pluggy below 1.7 reads those of a plugin before it is registered."""
        return open_folder(self.url, get_plugin_manager())

    def die(self) -> None:
        """Let what a save of this process has left be that of a dead one."""
        self.stopping.stop(0, is_answer_lost=False)
        folder = self.folder()
        for name, size in folder.tree().items():
            if ".shardckpt-uploading-" in name:
                said = folder.read(name, 0, size).replace(Owner.current().text.encode(), owners.dead().text.encode())
                (RemotePath(folder) / name).write(said)


@pytest.fixture(params=["obstore", "fsspec"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A store with conditions, and one without."""
    found = Place(request.param)
    get_plugin_manager().register(found)
    yield found
    get_plugin_manager().unregister(found)


def versions(url: str) -> list[float]:
    """The saves of which a load of the URL may be."""
    return [value for value in (OLD, NEW, LATER) if jobs.error_of(jobs.check, url, value) == ("", "")]


def generations(place: Place) -> set[str]:
    """The generations that a place holds."""
    return {find_generation(name) for name in place.folder().tree()}
