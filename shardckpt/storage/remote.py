"""Checkpoints on object stores: the interface that a plugin implements for a URL, and a path object over it."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from shardckpt import settings
from shardckpt.distributed.pickling import PicklingError, pickle_value
from shardckpt.errors import CheckpointingException, StorageError, format_many, is_first_warning, listed
from shardckpt.storage.memory_budget import plan_upload
from shardckpt.storage.open_path import OpenPath
from shardckpt.storage.store_abilities import (
    CopiesObjects,
    CreatesObjects,
    DeletesMany,
    ReadsInto,
    ReplacesObjects,
    StreamsWrites,
    TellsTimes,
)
from shardckpt.storage.store_errors import find_problem, mask_password, mask_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping

    from shardckpt.storage.store_errors import StoreProblem

logger = logging.getLogger(__name__)

_S = TypeVar("_S")
_T = TypeVar("_T")

#: The level at which an attempt that is repeated is logged.
_level = ContextVar("shardckpt_level_of_attempts", default=logging.WARNING)


class _Patience:
    """The seconds that are left for attempts that fail, and for the pauses behind them.

    Threads that wait for the store at one time use up that time once.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._counted_until = 0.0
        self._lock = threading.Lock()

    @property
    def is_used_up(self) -> bool:
        """Whether no further call is made."""
        return self._left < 0

    def spend(self, start: float, end: float) -> None:
        """Count the time between two of ``time.monotonic``, unless another thread has."""
        with self._lock:
            self._left -= max(0.0, end - max(start, self._counted_until))
            self._counted_until = max(self._counted_until, end)


#: The limit of the block around a call; None: any number of seconds.
#: A context variable: the thread that commits an earlier save has opened its paths before the call that waits now.
_patience: ContextVar[_Patience | None] = ContextVar("shardckpt_patience", default=None)

#: Errors that another attempt would meet again.
_PERMANENT = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    NotImplementedError,
    ValueError,
)
_FIRST_DELAY = 0.25  # seconds; each further one is twice as long
_LONGEST_DELAY = 8.0
_MOST_SHOWN = 200  # characters of a client's text besides the cause that we know
_LEAST_PART = 5 << 20  # bytes; S3 takes no smaller parts


class RemoteFolder(Protocol):
    """The result of a plugin's hook ``shardckpt_filesystem`` for a URL: access to the objects directly below it.

    Several threads call the methods at a time. They raise whatever the store raises: ``FileNotFoundError`` for an
    object that does not exist; after most other errors :func:`attempt` repeats the call.

    Attributes:
        url: The URL, without a slash at its end.
    """

    url: str

    def files(self) -> dict[str, int]:
        """Return each object's size in bytes by name, from the store, not a cache; ``{}`` for a URL without objects."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return a range of an object, and request no more than that from the store.

        Returns:
            The bytes; fewer only where the object ends.
        """

    def upload(self, name: str, path: Path) -> None:
        """Upload a local file as the object of that name.

        The object must appear complete or not at all: a marker that exists says that its checkpoint is complete.
        """

    def delete(self, name: str) -> None:
        """Remove an object."""


@runtime_checkable
class HasFolders(Protocol):
    """A :class:`RemoteFolder` that takes paths for names, as checkpoints with files in folders need.

    ``read``, ``upload`` and ``delete`` accept names such as ``"a/b/c"``: the object at ``<url>/a/b/c``.
    """

    def tree(self) -> dict[str, int]:
        """Return each object's size in bytes by its path below the URL, at any depth, from the store, not a cache."""


@runtime_checkable
class ListsFolders(Protocol):
    """A :class:`RemoteFolder` that also lists the folders directly below it, as the search for checkpoints needs."""

    def folders(self) -> list[str]:
        """Return the names of the folders directly below, from the store, not a cache; ``[]`` for a URL without any."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder without objects, on stores where such a folder exists; on other stores do nothing."""


class RemotePath(OpenPath):
    """A URL's folder, or an object in it, with the part of pathlib's interface that reading a checkpoint needs.

    The name ``""`` is the folder itself. Paths made from one another share one listing of the folder, which is
    requested when it is first needed. A path that was pickled requests one of its own; the pickle has what the plugin's
    folder has, credentials included.
    """

    #: Read by :mod:`shardckpt.storage.abilities`.
    has_local_files = has_links = False
    takes_requests = True
    #: The listing of :meth:`attach_listing`, as for :meth:`use_listing`. Only the first :meth:`hold` uses it: the
    #: result has none attached, so that a second one requests a new listing.
    listing: Mapping[str, int] | None = None
    #: Whether the listing in use is older than the path. Who gave the listing looks again at what seems wrong.
    is_listed_before = False

    def __init__(self, folder: RemoteFolder, name: str = "") -> None:
        self.folder = folder
        self._name = name
        #: Returns the size in bytes of each object by name: one request to the store, for all paths made from this one.
        self._sizes = functools.cache(lambda: _list(folder, folder.files))
        #: The same with the objects in folders, which takes more requests: asked for where a name has a folder.
        self._tree = functools.cache(lambda: list_objects(folder))

    def refresh(self) -> RemotePath:
        """Return the folder without its listing."""
        return RemotePath(self.folder)

    def hold(self) -> RemotePath:
        """Return the folder with the listing that came with it, or none."""
        return self.refresh() if self.listing is None else self.use_listing(self.listing)

    def has_changed(self) -> bool:
        """Return whether an object of the first listing is gone, or has another size."""
        if self.is_listed_before:
            return False
        before = self._sizes()
        return not before.items() <= _list(self.folder, self.folder.files).items()

    def use_listing(self, listing: Mapping[str, int]) -> RemotePath:
        """Return the folder with a listing that was requested before: bytes by path, of the objects at any depth."""
        path = RemotePath(self.folder)
        sizes = {name: size for name, size in listing.items() if "/" not in name}
        path._sizes = functools.cache(lambda: sizes)
        path._tree = functools.cache(lambda: {**listing})
        path.is_listed_before = True
        return path

    def attach_listing(self, listing: Mapping[str, int]) -> RemotePath:
        """Return the folder with a listing, as :meth:`use_listing` does, for the first :meth:`hold`, too."""
        path = self.use_listing(listing)
        path.listing = listing
        return path

    @property
    def url(self) -> str:  # type: ignore[override]
        """The URL that opens it in another process, with any password in it."""
        return f"{self.folder.url}/{self._name}" if self._name else self.folder.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return (self._name or self.folder.url).rpartition("/")[2]

    @property
    def size(self) -> int:
        """The object's size in bytes; FileNotFoundError if it does not exist."""
        if self._name not in self._listing():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._listing()[self._name]

    def list_tree(self) -> Mapping[str, int]:
        """Return the size in bytes of each object in the folder and in those below it, by its path in the folder.

        It is a StorageError if the plugin cannot list folders.
        """
        if not isinstance(self.folder, HasFolders):
            raise StorageError(
                f"cannot list the folders in {self}: the plugin that serves it cannot ({type(self.folder).__name__} "
                "lacks the method of shardckpt.storage.HasFolders); copy the checkpoint to a directory"
            )
        return self._tree()

    def is_dir(self) -> bool:
        """Return whether it is a folder with at least one object."""
        return not self._name and bool(self._sizes())

    def is_file(self) -> bool:
        """Return whether it is an object in the folder."""
        return bool(self._name) and self._name in self._listing()

    def is_symlink(self) -> bool:
        """Return False: stores have no links."""
        return False

    def rmdir(self) -> None:
        """Do nothing: a folder is there as long as an object is in it."""

    def resolve(self) -> RemotePath:  # type: ignore[override]
        """Return the path itself: no link leads anywhere."""
        return self

    def exists(self) -> bool:
        """Return whether it is an object, or a folder with at least one object."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """Return an iterator of the objects directly in the folder."""
        if not self._name:
            for name in self._sizes():
                yield self / name
            return
        for name in self._tree():
            folder, _, inner = name.rpartition("/")
            if folder == self._name:
                yield self / inner

    def read_range(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of the object from ``offset`` on; fewer only where it ends.

        A store that gives more bytes than were asked for is refused with StorageError.
        """
        found = attempt(f"read at offset {offset} of", self, lambda: self.folder.read(self._name, offset, nbytes))
        if len(found) > nbytes:
            raise StorageError(
                f"{self}: asked for {nbytes} bytes at offset {offset}, its store gave {len(found)}: it may answer each "
                "range with the whole object; none of them is used. Copy the checkpoint to another store or a directory"
            )
        return found

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the start of the buffer from an offset of the object on; return the number of bytes."""
        folder = self.folder
        if isinstance(folder, ReadsInto):
            return attempt(f"read at offset {offset} of", self, partial(folder.read_into, self._name, offset, buffer))
        found = self.read_range(offset, buffer.nbytes)
        buffer[: len(found)] = found
        return len(found)

    def write(self, data: bytes) -> None:
        """Write a small object in one step, or replace it; no local file is needed where the store streams writes."""
        attempt("write", self, lambda: self._send([data], max(_LEAST_PART, len(data))))

    def create(self, data: bytes) -> bool:
        """Write a small object unless one of that name exists; only for folders that :class:`CreatesObjects`.

        Returns False if one was there. It may be this call's own: an attempt may have created it, and its answer been
        lost.
        """
        folder = self.folder
        if not isinstance(folder, CreatesObjects):
            raise StorageError(f"cannot create {self}: the store's plugin has no conditional writes")
        return self._put_if("create", partial(folder.create, self._name, data))

    def read_tagged(self) -> tuple[bytes, object]:
        """Return all bytes of a small object, and the store's tag of this content, for :meth:`replace_tagged`.

        The tag is None where the store cannot replace by a condition.
        """
        folder = self.folder
        if isinstance(folder, ReplacesObjects):
            return attempt("read", self, partial(folder.read_tagged, self._name))
        size = RemotePath(self.folder, self._name).size  # now, not that of an earlier listing
        return self.read_range(0, size), None

    def replace_tagged(self, data: bytes, tag: object) -> bool:
        """Write a small object in the place of the one with that tag; None as the tag replaces any.

        Returns False if the object has changed since, or is gone. The change may be this call's own: an attempt may
        have written it, and its answer been lost.
        """
        folder = self.folder
        if tag is None or not isinstance(folder, ReplacesObjects):
            self.write(data)
            return True
        return self._put_if("replace", partial(folder.replace, self._name, data, tag))

    def _put_if(self, action: str, put: Callable[[], None]) -> bool:
        """Return whether the condition of a write held."""

        def call() -> bool:
            try:
                put()
            except FileExistsError:
                return False
            return True

        return attempt(action, self, call)

    def upload(self, file: Path) -> None:
        """Upload a local file as the object."""
        attempt("upload", self, lambda: self.folder.upload(self._name, file))

    def copy_from(self, source: Path) -> None:
        """Copy a local file here, or an object of any store: by that itself where it can, else part by part.

        An object of the name is replaced in one step.
        """
        if not isinstance(source, RemotePath):
            self.upload(source.resolve())  # those of the Hub's cache are links
            return
        if source == self:  # stores refuse to copy an object onto itself
            return
        nbytes, folder = source.size, self.folder
        if isinstance(folder, CopiesObjects) and attempt(
            f"copy {source} to", self, partial(folder.copy, source.url, self._name, nbytes)
        ):
            return
        part_bytes = plan_upload(None, nbytes).part_bytes
        starts = range(0, nbytes, part_bytes)
        attempt(
            f"copy {source} to",
            self,
            lambda: self._send((source.read_range(n, min(part_bytes, nbytes - n)) for n in starts), part_bytes),
        )

    def _send(self, parts: Iterable[bytes], part_bytes: int) -> None:
        """Write the object in parts, or, where the store streams no writes, by way of a local file."""
        if not isinstance(self.folder, StreamsWrites):
            try:
                with tempfile.NamedTemporaryFile(prefix="shardckpt-") as file:
                    file.writelines(parts)
                    file.flush()
                    self.upload(Path(file.name))
            except OSError as exc:
                raise StorageError(
                    f"cannot write a temporary file for {self}: {exc}; TMPDIR names the folder for such files"
                ) from exc
            return
        writer = self.folder.open_write(self._name, part_bytes)
        try:
            for part in parts:
                writer.write(memoryview(part))
            writer.close()
        except BaseException:
            writer.abort()
            raise

    def delete(self) -> None:
        """Delete the object; no error if it does not exist."""

        def call() -> None:
            with suppress(FileNotFoundError):
                self.folder.delete(self._name)

        attempt("delete", self, call)

    def times(self) -> dict[str, float]:
        """Return when each object below was written, as :class:`TellsTimes` does; none where the store does not say."""
        return attempt("list", self, self.folder.times) if isinstance(self.folder, TellsTimes) else {}

    def delete_all(self, names: Collection[str]) -> None:
        """Delete objects of the folder, by few requests where the store can; no error if they do not exist."""
        if names and isinstance(self.folder, DeletesMany):
            many = format_many(len(names), "object")
            attempt(f"delete {many} of", self, partial(self.folder.delete_many, names))
        elif len(names) < 2:  # noqa: PLR2004
            for name in names:
                (self / name).delete()
        else:
            map_requests(lambda name: (self / name).delete(), names, "shardckpt-delete")

    def __truediv__(self, name: str | os.PathLike[str]) -> RemotePath:
        path = RemotePath(self.folder, f"{self._name}/{os.fspath(name)}" if self._name else os.fspath(name))
        path._sizes = self._sizes
        path._tree = self._tree
        return path

    def _listing(self) -> dict[str, int]:
        return self._tree() if "/" in self._name else self._sizes()

    def __str__(self) -> str:
        return mask_password(self.url)

    def __copy__(self) -> RemotePath:
        return self  # a path does not change

    def __deepcopy__(self, _: dict[int, object]) -> RemotePath:
        return self

    def __reduce__(self) -> tuple[Callable[[RemoteFolder, str], RemotePath], tuple[RemoteFolder, str]]:
        try:
            pickle_value(self.folder)
        except Exception as exc:  # a plugin's class may refuse with any error
            raise PicklingError(
                f"{self} cannot be pickled, because the {type(self.folder).__qualname__} that its plugin returned "
                f"cannot ({type(exc).__name__}: {exc}): send the URL, and open the checkpoint there by that"
            ) from exc
        return RemotePath, (self.folder, self._name)


def list_objects(folder: RemoteFolder) -> dict[str, int]:
    """Return the size in bytes of each object in a folder, by name, from the store, not a cache.

    Of a store that :class:`HasFolders` there are also those in folders, by path.
    """
    return _list(folder, folder.tree if isinstance(folder, HasFolders) else folder.files)


def _list(folder: RemoteFolder, call: Callable[[], dict[str, int]]) -> dict[str, int]:
    found = attempt("list", RemotePath(folder), call)
    return {name: found[name] for name in skip_impossible(folder.url, found)}


def skip_impossible(url: str, names: Iterable[str]) -> list[str]:
    """Return the names that a file of a checkpoint, of any library, can have; log the others."""
    possible: list[str] = []
    others: list[str] = []
    for name in names:
        is_possible = "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))
        (possible if is_possible else others).append(name)
    others = sorted(filter(None, others))  # the folder's own object, which consoles of clouds make, has no name
    if others and is_first_warning(__name__, url):
        logger.warning(
            "%s: %s with a name that no file of a checkpoint can have: %s: left out of listings, and neither read nor "
            "removed: remove such by the store's own tools",
            mask_password(url),
            format_many(len(others), "object or folder") if len(others) == 1 else f"{len(others)} objects or folders",
            listed([*map(repr, others)], limit=3),
        )
    return possible


@contextmanager
def quiet_attempts() -> Iterator[None]:
    """Log attempts that are repeated in the block at DEBUG: the caller comes again, and reports the failure once."""
    token = _level.set(logging.DEBUG)
    try:
        yield
    finally:
        _level.reset(token)


@contextmanager
def limit_attempts(seconds: float | None = None) -> Iterator[None]:
    """Limit the seconds that all repeated calls of this thread in the block take together.

    For calls that a training waits for: one that a store does not answer takes ``SHARDCKPT_REMOTE_TIMEOUT`` seconds,
    the default here, at each attempt. When the time is used up, all further calls fail at once; with 0, what fails once
    is not repeated.
    """
    token = _patience.set(_Patience(settings.remote_timeout() if seconds is None else seconds))
    try:
        yield
    finally:
        _patience.reset(token)


def map_requests(call: Callable[[_S], _T], items: Iterable[_S], name: str) -> list[_T]:
    """Return the results of calls that wait for a store, made by several threads of that name.

    Each is made in the caller's context: :func:`limit_attempts` and :func:`quiet_attempts` hold for it, too.
    """
    with ThreadPoolExecutor(settings.remote_threads(), name) as threads:
        contexts = (copy_context() for _ in itertools.count())  # one can be entered by one thread at a time
        return list(threads.map(lambda context, item: context.run(call, item), contexts, items))


def attempt(action: str, path: Path, call: Callable[[], _T]) -> _T:
    """Call a store, and repeat the call after errors that may pass, ``SHARDCKPT_REMOTE_ATTEMPTS`` times in all.

    In a block of :func:`limit_attempts` less often, once that has no time left. If every attempt failed, or another
    cannot help, it is a StorageError with the path and the last error.
    """
    attempts = settings.remote_attempts()
    patience = _patience.get()
    if patience is not None and patience.is_used_up:
        raise StorageError(
            f"cannot {action} {path}: not tried, since the store has not answered for {settings.remote_timeout()} s "
            f"({settings.REMOTE_TIMEOUT}) while the training waits"
        )
    number, said = 1, None
    while True:
        started = time.monotonic()
        try:
            return call()
        except CheckpointingException:
            raise
        except Exception as exc:  # stores raise errors of many kinds
            problem = find_problem(exc)
            why = _explain(exc, problem)
            # the text of the store goes before the class: s3fs has PermissionError for a session that has ended, too
            is_permanent = isinstance(exc, _PERMANENT) if problem is None else problem.is_permanent
            delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (number - 1))
            if patience is not None:
                patience.spend(started, time.monotonic() + delay)
            is_late = patience is not None and patience.is_used_up
            if is_permanent or is_late or number >= attempts:
                times = "" if number == 1 else f" in {number} attempts"
                if is_late and not is_permanent:
                    times += f", while the training waits, {settings.REMOTE_TIMEOUT}={settings.remote_timeout()} s"
                raise StorageError(f"cannot {action} {path}{times}: {why}") from exc
            told = "as before" if problem is not None and problem.advice == said else why
            logger.log(_level.get(), "cannot %s %s, attempt %d of %d: %s", action, path, number, attempts, told)
            said = problem and problem.advice
        time.sleep(delay * random.uniform(0.5, 1))  # noqa: S311 - so that a thousand ranks do not come back at once
        number += 1


def _explain(error: Exception, problem: StoreProblem | None) -> str:
    """Return the cause of a client's error, advice, and the client's text, cut; the text alone of an unknown cause."""
    shown = mask_secrets(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    if problem is None:
        return shown
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:_MOST_SHOWN]} ..."
    return f"{problem.advice}; the client: {shown}"
