"""Complete or absent on an object store: the marker comes last.

A store has no rename, so the order of the objects protects the checkpoint:

1. The main rank claims an empty folder: it creates the claim, an object that only one save can create where the store
   has conditional writes, and then an in-progress object with the save's id. Another save then refuses the folder.
2. Every rank streams its files to the store, or uploads them from a spool directory where the store cannot do that.
3. The main rank writes the files that name them.
4. The main rank lists the folder: every file must be there with its size.
5. The main rank creates the marker (``metadata.json``), without which nothing is loaded, and deletes the claim and the
   in-progress object. A crash before the marker leaves no checkpoint; a crash after it leaves a complete one.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.commit.leftovers import create_spool
from shardckpt.commit.owned_stream import OwnedStream
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manifest import RECORD_LIMIT, RECORD_NAME, Record, list_parents
from shardckpt.storage import (
    CreatesObjects,
    DeletesMany,
    HasFolders,
    RemotePath,
    StreamsWrites,
    attempt,
    can_rename,
    list_objects,
    read_file,
    refuse_unrecorded,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from shardckpt.manifest import FileRecord
    from shardckpt.storage import RemoteFolder

logger = logging.getLogger(__name__)

_UNDER_WAY = ".shardckpt-uploading-"
#: The in-progress object of a removal (:mod:`shardckpt.commit.removal`). It has the prefix of a save's: once the
#: marker is deleted, a later save may take the folder like that of a save that never ended.
REMOVAL_IN_PROGRESS = f"{_UNDER_WAY}removal"
#: The object that only one save at a time can create: it says who saves. The in-progress objects, which have the save's
#: id in their names, then show a save whether another has taken its place (by overwrite=True).
_CLAIM = f"{_UNDER_WAY}claim"
#: Bytes of a claim that are read, for an error.
_CLAIM_BYTES = 300


class Upload:
    """One rank's part of a save to a store.

    Args:
        folder: The checkpoint's folder on the store.
        marker: Name of the file that is uploaded last, and makes the others a checkpoint.
    """

    def __init__(self, folder: RemoteFolder, marker: str) -> None:
        self._folder = folder
        self._target = RemotePath(folder)
        self._marker = marker
        #: The save's id, the same on all ranks; empty before the save has begun.
        self.save_id = ""
        #: Names of this rank's objects that were streamed, and so are not in the spool directory.
        self.streamed: set[str] = set()
        self._claim = b""
        self._handed_over = False
        self._marking = False
        self._committed = False
        #: The local directory to which this rank writes its files before they are uploaded.
        self.spool = create_spool()

    def begin(self, save_id: str, *, overwrite: bool) -> None:
        """Take the folder for this save; only the main rank calls it.

        Args:
            save_id: The save's id.
            overwrite: Whether the objects of a save that never ended may be deleted.

        Raises:
            StorageError: the folder has objects that may not be deleted.
        """
        found = set(list_objects(self._folder))
        left = {name for name in found if name.startswith(_UNDER_WAY)}
        if self._marker in found or (found and not left):
            raise StorageError(
                f"{self._target} is not empty, and a store cannot exchange several objects in one step, even to "
                "overwrite them: give another URL, or delete the objects there first"
            )
        if found and not overwrite:
            raise StorageError(
                f"{self._target} has {len(found)} objects of a save that has not ended{self._describe_other(found)}: "
                "if it is not still going on, overwrite=True deletes them; or give another URL"
            )
        others = found - self._without_others(found)
        if others:
            raise StorageError(
                f"{self._target} has other saves in its folders, such as {min(others)}, and objects of a save that has "
                "not ended: give another URL, or delete the objects there first"
            )
        self._delete(found - left)
        self._delete(left)  # last: after a crash in between, the rest is still known as that of an unfinished save
        self._take_claim(save_id)
        self.save_id = save_id
        # Two saves that begin at once may both have seen an empty folder. Each finds the other's in-progress object in
        # commit(), and then neither commits.
        (self._target / _in_progress_name(save_id)).write(b"A save to this place has begun, and not ended.\n")

    def check(self, names: Iterable[str]) -> None:
        """Raise an error for files that cannot be uploaded.

        Raises:
            StorageError: the spool directory has other files than these, or the store cannot have one of the names.
        """
        names = set(names)
        refuse_unrecorded(self.spool, names)
        refuse_folders(self._folder, names)

    def put(self, names: Iterable[str]) -> None:
        """Upload files of the spool directory; those that were streamed are there already."""
        upload_files(self._folder, self.spool, [name for name in names if name not in self.streamed], self.save_id)

    def hand_over(self) -> None:
        """Note that this rank's objects may be part of a checkpoint from now on: only the main rank may delete them."""
        self._handed_over = True

    def commit(self, files: Iterable[FileRecord], marker: bytes | None = None) -> None:
        """Write the marker if the store has all files in their sizes; only the main rank calls it.

        Args:
            files: The records of the files of all ranks.
            marker: The marker's bytes; None if it is in the spool directory.

        Raises:
            StorageError: a file is missing or has another size, or another save has taken the folder.
        """
        found = list_objects(self._folder)
        if self._is_anothers(found) or _in_progress_name(self.save_id) not in found:
            raise _taken(self._target, self._describe_other(found))
        uploaded = [(file.rank, name, size) for file in files for name, size in file.list_files().items()]
        for rank, name, size in uploaded:
            if found.get(name) != size:
                has = f"has {found[name]}" if name in found else "does not have it"
                raise StorageError(f"{self._target / name}: rank {rank} uploaded {size} bytes, the store {has}")
        self._marking = True  # before the upload: if it raises, the marker may exist all the same
        self._put_marker(marker)
        self._committed = True
        try:
            self._delete([*([_CLAIM] if self._claim else []), _in_progress_name(self.save_id)])
        except CheckpointingException as exc:
            logger.warning("%s, which is no longer needed", exc)

    def close(self) -> None:
        """Remove the spool directory."""
        shutil.rmtree(self.spool, ignore_errors=True)

    def abort(self, *, main: bool) -> None:
        """Delete this save's objects as far as possible, unless it is committed; raise nothing."""
        try:
            if self.save_id and not self._committed and (main or not self._handed_over):
                self._undo(main=main)
        except (CheckpointingException, OSError) as exc:
            logger.warning("objects of a failed save may remain at %s: %s", self._target, exc)
        finally:
            self.close()

    def _undo(self, *, main: bool) -> None:
        if self._marking:
            self._delete([self._marker])  # first: at no moment is there a marker with files missing
        found = set(list_objects(self._folder))
        # a rank knows of its own objects that no checkpoint needs them; only the main rank knows it of all
        own = {path.relative_to(self.spool).as_posix() for path in self.spool.rglob("*")} | self.streamed
        if not self._is_anothers(found):
            mine = self._without_others(found) | found & own if main else found & own
            self._delete(mine - {_in_progress_name(self.save_id), _CLAIM})
        if main:
            if self._claim and _CLAIM in found and self._read_claim() == self._claim:
                self._delete([_CLAIM])
            self._delete([_in_progress_name(self.save_id)])

    def _take_claim(self, save_id: str) -> None:
        """Claim the folder, where the store has conditional writes."""
        if not isinstance(self._folder, CreatesObjects):
            return
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        claim = f"save {save_id} of process {os.getpid()} on {socket.gethostname()}, begun {now}".encode()
        if not (self._target / _CLAIM).create(claim) and self._read_claim() != claim:
            other = self._describe_other([_CLAIM])
            raise StorageError(
                f"{self._target}: another save has begun there at the same time{other}; it goes on, and this one has "
                "written nothing: give another URL, or wait for the other"
            )
        self._claim = claim
        # the answer may be a lie: some servers ignore the condition. There the in-progress objects decide: of two saves
        # that see each other's, none commits
        if (self._target / _CLAIM).create(claim):
            logger.warning(
                "the store of %s ignores conditions of writes: of two saves that begin there at once, both will fail",
                self._target,
            )

    def _read_claim(self) -> bytes:
        return (self._target / _CLAIM).read_range(0, _CLAIM_BYTES)

    def _put_marker(self, content: bytes | None) -> None:
        """Write the marker; where the store can, only if there is none."""
        target = self._target / self._marker
        if isinstance(self._folder, CreatesObjects):
            data = (self.spool / self._marker).read_bytes() if content is None else content
            if not target.create(data):
                self._marking = False  # not to delete the other's
                if self._read_save_id() != self.save_id:  # else an attempt of ours had created it
                    raise _taken(self._target, self._describe_other([self._marker]))
        elif content is not None:
            target.write(content)
        else:
            _upload(self._folder, self.spool, [self._marker])

    def _read_save_id(self) -> str:
        """Return the id of the save whose record is at the URL."""
        return Record.parse(read_file(RemotePath(self._folder) / RECORD_NAME, RECORD_LIMIT)).save_id

    def _describe_other(self, found: Collection[str]) -> str:
        """Say which other save has these objects, as far as they tell; ``""`` if they do not."""
        try:
            if _CLAIM in found and (claim := self._read_claim()) != self._claim:
                return f" ({claim.decode(errors='replace')!r})"
            if self._marker in found:
                return f" (save {self._read_save_id()})"
        except (CheckpointingException, OSError, ValueError) as exc:
            logger.info("cannot say which save has %s: %s", self._target, exc)
        return ""

    def _is_anothers(self, found: Collection[str]) -> bool:
        """Whether another save has taken the folder, judged by a listing; any object there may then be its own."""
        own = _in_progress_name(self.save_id)
        return self._marker in found or any(name.startswith(_UNDER_WAY) and name not in (own, _CLAIM) for name in found)

    def _without_others(self, found: set[str]) -> set[str]:
        """Return the objects that are not of another checkpoint, or another save, in a folder below."""
        marks = (name.rpartition("/") for name in found)
        others = {
            folder for folder, _, name in marks if folder and (name == self._marker or name.startswith(_UNDER_WAY))
        }
        return {name for name in found if others.isdisjoint(list_parents(name))}

    def _delete(self, names: Collection[str]) -> None:
        delete_objects(self._folder, names)


def upload_files(folder: RemoteFolder, spool: Path, names: Iterable[str], save_id: str) -> None:
    """Upload files of a spool directory, one after the other.

    Args:
        folder: The checkpoint's folder on the store.
        spool: The spool directory.
        names: Of the files.
        save_id: The save's id.

    Raises:
        StorageError: an upload failed, or the folder no longer belongs to the save.
    """
    names = list(names)
    refuse_folders(folder, names)
    if not _is_own(folder, save_id):
        raise _taken(RemotePath(folder))
    _upload(folder, spool, names)


def open_stream(folder: RemoteFolder, save_id: str) -> StreamsWrites | None:
    """Return where a save streams its files to, which refuses them once another save has the folder.

    Args:
        folder: The checkpoint's folder on the store.
        save_id: The save's id.

    Returns:
        The stream; None if the store cannot stream writes.
    """

    def check(name: str) -> None:
        refuse_folders(folder, [name])
        if not _is_own(folder, save_id):
            raise _taken(RemotePath(folder))

    return OwnedStream(folder, check) if isinstance(folder, StreamsWrites) else None


def _is_own(folder: RemoteFolder, save_id: str) -> bool:
    return _in_progress_name(save_id) in attempt("list", RemotePath(folder), folder.files)


@contextmanager
def delete_if_failed(folder: RemoteFolder | None, save_id: str) -> Iterator[set[str]]:
    """Return a context manager that gives a set for the names of streamed objects; an error of the block deletes them.

    For a process that writes a rank's files, and knows no more of the save.
    """
    names: set[str] = set()
    try:
        yield names
    except BaseException:
        if folder is not None:
            try:
                if names and _is_own(folder, save_id):
                    delete_objects(folder, names)
            except CheckpointingException as exc:
                logger.warning("objects of a failed save may remain at %s: %s", RemotePath(folder), exc)
        raise


def _upload(folder: RemoteFolder, spool: Path, names: Iterable[str]) -> None:
    target = RemotePath(folder)
    for name in names:
        attempt("upload", target / name, functools.partial(folder.upload, name, spool / name))


def refuse_folders(folder: RemoteFolder, names: Iterable[str]) -> None:
    """Raise StorageError if a name has folders, and the store's plugin does not know them."""
    name = min((name for name in names if "/" in name), default="")
    if name and not isinstance(folder, HasFolders):
        raise StorageError(
            f"{RemotePath(folder)} cannot have {name!r}: the plugin that serves it knows no objects in folders "
            f"({type(folder).__name__} lacks the method of shardckpt.storage.HasFolders); save to a directory, to a "
            "URL that fsspec serves, or by a strategy whose files are not in folders"
        )


def is_under_way(directory: Path) -> bool:
    """Return whether a save to (or a removal of) the folder has begun and not ended; False for a local directory."""
    return not can_rename(directory) and any(path.name.startswith(_UNDER_WAY) for path in directory.iterdir())


def _in_progress_name(save_id: str) -> str:
    """Name of the in-progress object of a save."""
    return f"{_UNDER_WAY}{save_id}"


def _taken(target: RemotePath, other: str = "") -> StorageError:
    return StorageError(f"{target}: another save has begun there{other}, or the objects of this one were deleted")


def delete_objects(folder: RemoteFolder, names: Collection[str]) -> None:
    """Delete objects from a store, by few requests where it can; it is no error if they are gone.

    Raises:
        StorageError: the store failed in every attempt.
    """
    if names and isinstance(folder, DeletesMany):
        delete_many = folder.delete_many
        attempt(f"delete {len(names)} objects of", RemotePath(folder), lambda: delete_many(names))
        return
    if len(names) < 2:  # noqa: PLR2004
        for name in names:
            delete_object(folder, name)
        return
    with ThreadPoolExecutor(settings.remote_threads(), "shardckpt-delete") as threads:
        list(threads.map(functools.partial(delete_object, folder), names))


def delete_object(folder: RemoteFolder, name: str) -> None:
    """Delete an object from a store; it is no error if it is gone.

    Raises:
        StorageError: the store failed in every attempt.
    """

    def delete() -> None:
        with suppress(FileNotFoundError):
            folder.delete(name)

    attempt("delete", RemotePath(folder) / name, delete)
